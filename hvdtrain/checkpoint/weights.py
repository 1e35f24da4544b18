"""Model weights alone, from a run, a checkpoint, a directory of another program or a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain.checkpoint.layout import MODEL, STATE, TENSORS, finished
from hvdtrain.checkpoint.spread import read_part
from hvdtrain.checkpoint.tensor_file import read_file, unpack
from hvdtrain.errors import UserError
from hvdtrain.untrusted import is_of, read_json

_CONFIG = "config.json"
# Index of weights that transformers saved in several files: tensor name -> file.
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Weights:
    """Weights, and their model's configuration if known.

    Args:
        tensors: by name, on the CPU.
        facts: config.json of the same directory; of Megatron-LM its arguments, with the
            "model_type" megatron; empty if there is none.
        adapters: these are the weights of PEFT's adapters only, without those of the frozen model.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    adapters: bool = False


def read_weights(path: Path) -> Weights:
    """Read weights; for a run, from its newest checkpoint.

    Args:
        path: a run directory, a checkpoint, a directory with model.safetensors or with several
            files and their index (and config.json), a safetensors file, or a directory of
            torch.distributed.checkpoint or Megatron-LM.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file or directory")
    if path.is_file():
        return Weights(_read_file(path))
    if (path / "checkpoints").is_dir():
        checkpoints = finished(path / "checkpoints")
        if not checkpoints:
            raise UserError(f"{path}: this run has no finished checkpoint")
        path = checkpoints[-1]
    if (path / STATE).exists():
        return Weights(read_part(path, "model"))
    if (path / _INDEX).exists():
        names = _files_of(path / _INDEX)
        parts = [_read_file(path / name) for name in names]
        return Weights({k: v for part in parts for k, v in part.items()}, _facts(path / _CONFIG))
    if (path / MODEL).exists():
        return Weights(_read_file(path / MODEL), _facts(path / _CONFIG))
    from hvdtrain.checkpoint import foreign  # imports torch.distributed

    if (path / foreign.DCP_INDEX).exists():
        return Weights(foreign.read_dcp(path), _facts(path / _CONFIG))
    file = foreign.find_megatron(path)
    if file is None:
        raise UserError(
            f"{path}: a run, a checkpoint, or a directory with {MODEL}, of "
            "torch.distributed.checkpoint or of Megatron-LM is expected (other pickled weights "
            "are not read)"
        )
    arguments, tensors = foreign.read_megatron(file)
    return Weights(tensors, {**arguments, "model_type": "megatron"})


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix != TENSORS:
        raise UserError(f"{path}: a file of weights ends with {TENSORS}")
    try:
        content, _ = read_file(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    try:
        return unpack(content)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"{path} is not a complete safetensors file: {error}") from None


def _facts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def _files_of(index: Path) -> list[str]:
    found = _facts(index).get("weight_map", {})
    # A name must not point outside the directory.
    if not is_of(found, dict[str, str]) or any(n != Path(n).name for n in found.values()):
        raise UserError(f"{index}: weight_map does not say which file holds which tensor")
    return sorted(set(found.values()))
