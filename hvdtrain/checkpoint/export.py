"""Export of a checkpoint's weights for other programs, with config.json."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.layout import MODEL, STATE, TENSORS, DamagedError, parse_state, verify
from hvdtrain.errors import UserError
from hvdtrain.files import sync_directory
from hvdtrain.untrusted import SMALL_FILE_BYTES, is_of, open_regular, parse_json, read_regular

_COMPILED = "_orig_mod."  # as in runtime/wrappers.py, which imports torch
# Writes weights, a file or tensors by name, into a directory.
Write = Callable[[Path, "Path | Mapping[str, Any]"], None]


def export(
    checkpoint: Path,
    config: dict[str, Any],
    out: Path,
    ema: bool = False,
    write: Write | None = None,
) -> None:
    """Write the directory `out` atomically.

    Args:
        config: how the model is built; written to config.json together with the "step" and
            "samples" of the training.
        ema: export the averaged weights, see `averaged_weights`.
        write: see `write_export`.

    Raises:
        UserError: `out` exists or cannot be written, or the checkpoint is damaged.
    """
    _check_free(out)
    verify(checkpoint)
    try:
        state = parse_state(read_regular(checkpoint / STATE))
        trained = {name: state[name] for name in ("step", "samples")}
        weights = averaged_weights(checkpoint) if ema else _weights(checkpoint)
        if isinstance(weights, Path):
            _header(weights)
        known = {**_with_vocabulary(config, weights), **trained}
    except OSError as error:
        raise DamagedError(f"checkpoint {checkpoint}: {error.filename}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise DamagedError(f"checkpoint {checkpoint}: {error}") from None
    write_export(out, known, weights, write)


def _weights(checkpoint: Path) -> Path | dict[str, Any]:
    """Return the model file, or the tensors if ranks have saved shards or names have prefixes."""
    whole = checkpoint / MODEL
    if whole.exists() and _COMPILED not in "".join(_header(whole)):
        return whole
    from hvdtrain.checkpoint.spread import read_part
    from hvdtrain.runtime.wrappers import plain_names

    tensors = read_part(checkpoint, "model")
    return plain_names(tensors, tensors)


def averaged_weights(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors with the averages of optim.ema_decay, in the model's dtype.

    Raises:
        UserError: the checkpoint has no averages, or is damaged.
    """
    from hvdtrain.checkpoint.spread import read_part

    if not any(checkpoint.glob(f"ema*{TENSORS}")):  # whole, or in shards
        raise UserError(f"{checkpoint} has no averaged weights: its run had no optim.ema_decay")
    model, averages = (read_part(checkpoint, part) for part in ("model", "ema"))
    return model | {name: tensor.to(model[name].dtype) for name, tensor in averages.items()}


def write_export(
    out: Path,
    config: dict[str, Any],
    weights: Path | Mapping[str, Any],
    write: Write | None = None,
) -> None:
    """Write the directory `out` with config.json and the weights atomically.

    Args:
        weights: a file to copy, or tensors by name.
        write: writes the weights into a directory; None: model.safetensors.

    Raises:
        UserError: `out` exists or cannot be written.
    """
    with new_directory(out) as hidden:
        (write or write_whole)(hidden, weights)
        (hidden / "config.json").write_text(json.dumps(config, indent=1) + "\n")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory for files (no subdirectories), which is renamed to `out` on success.

    Raises:
        UserError: `out` exists or cannot be written.
    """
    _check_free(out)
    hidden = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        for path in hidden.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_directory(hidden)
        os.rename(hidden, out)
        sync_directory(hidden.parent)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def dtypes(out: Path) -> list[str]:
    """Return the dtypes of the weights in an exported directory, as far as they are known."""
    names = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
    headers = [_header(path) for path in out.glob("*.safetensors")]
    found = {t["dtype"] for header in headers for t in header.values() if "dtype" in t}
    return sorted(names.get(dtype, dtype) for dtype in found)


def _header(path: Path) -> dict[str, Any]:
    """Raise ValueError if the file is not a safetensors file."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size)) if size < SMALL_FILE_BYTES else None
    if header is None or not is_of(header, dict[str, dict[str, Any]]):
        raise ValueError("not a safetensors file")
    return dict(header)


def _check_free(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out} exists already; name a directory that does not")


def write_whole(directory: Path, weights: Path | Mapping[str, Any]) -> None:
    """Write model.safetensors."""
    if isinstance(weights, Path):
        shutil.copyfile(weights, directory / MODEL)
        return
    from safetensors.torch import save

    (directory / MODEL).write_bytes(save(dict(weights), metadata={"format": "pt"}))


def write_files_of(max_bytes: int) -> Write:
    """Return a function that writes model-00001-of-0000N.safetensors and their index.

    Args:
        max_bytes: largest size of a file, unless a single tensor is larger.
    """

    def write(directory: Path, weights: Path | Mapping[str, Any]) -> None:
        try:
            from huggingface_hub import save_torch_state_dict
        except ImportError:
            raise UserError(
                "--max-shard-size requires huggingface_hub: `pip install 'hvdtrain[transformers]'`"
            ) from None
        save_torch_state_dict(_tensors(weights), directory, max_shard_size=max_bytes)

    return write


def write_dcp(optimizer: Mapping[str, Any] | None = None) -> Write:
    """Return a function that writes a directory of torch.distributed.checkpoint.

    Its names are model.NAME and, if given, optimizer.state.NAME.ENTRY.

    Args:
        optimizer: the optimizer's tensors, as "NAME/ENTRY".
    """

    def write(directory: Path, weights: Path | Mapping[str, Any]) -> None:
        from torch.distributed import checkpoint as dcp

        content: dict[str, Any] = {"model": dict(_tensors(weights))}
        for path, tensor in (optimizer or {}).items():
            name, _, entry = path.rpartition("/")
            states = content.setdefault("optimizer", {}).setdefault("state", {})
            states.setdefault(name, {})[entry] = tensor
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.save(content, checkpoint_id=str(directory), no_dist=True)

    return write


def _tensors(weights: Path | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(weights, Path):
        return dict(weights)
    from safetensors.torch import load_file

    return dict(load_file(weights))


def _with_vocabulary(config: dict[str, Any], weights: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Add the vocabulary size, which the language model takes from the data if no key sets it."""
    model = config.get("model")
    if not isinstance(model, dict) or model.get("vocab_size", 0) is not None:
        return config
    name = "embedding.weight"
    shape = _header(weights)[name]["shape"] if isinstance(weights, Path) else weights[name].shape
    return {**config, "model": {**model, "vocab_size": shape[0]}}
