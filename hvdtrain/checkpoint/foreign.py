"""Weights in directories of torch.distributed.checkpoint (DCP) and of Megatron-LM.

Both formats contain pickles. Nothing in them is executed: DCP's index is read by an unpickler that
knows only the classes of an index, and Megatron's file by `torch.load(weights_only=True)`, with
inert objects in place of all classes that it names, such as Megatron's own enumerations.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hvdtrain.errors import UserError
from hvdtrain.untrusted import SMALL_FILE_BYTES, shown

DCP_INDEX = ".metadata"
_MEGATRON_FILE = "model_optim_rng.pt"
_MEGATRON_NEWEST = "latest_checkpointed_iteration.txt"
# Classes in an index, by module. None of them does anything when it is built.
_OF_INDEX = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "device", "contiguous_format", "preserve_format", "strided"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "builtins": {"set", "frozenset", "dict", "list", "tuple"},
}
# State of a training other than its weights.
_NOT_WEIGHTS = re.compile(r"(optim|optimizers?|lr_scheduler|dataloader|train_state)(\.|$)")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _OF_INDEX.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {shown(f'{module}.{name}')}, which is not executed")


class _DcpReader(dcp.FileSystemReader):
    """Reader of a directory whose index has been read already."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


def read_dcp(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a DCP directory that are not an optimizer's, whole and on the CPU.

    Raises:
        UserError: it is not such a directory, or is not complete.
    """
    try:
        index = _read_index(path / DCP_INDEX)
        sizes = {
            name: found
            for name, found in index.state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata) and not _NOT_WEIGHTS.match(name)
        }
        tensors = {
            name: torch.empty(found.size, dtype=found.properties.dtype)
            for name, found in sizes.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(tensors), storage_reader=_DcpReader(path, index), no_dist=True)
    except OSError as error:
        raise UserError(f"{path}: {error.filename or path}: {error.strerror or error}") from None
    except (
        *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError),
        *(pickle.UnpicklingError, dcp.api.CheckpointException, AssertionError),
    ) as error:
        raise UserError(f"{path} is not a complete DCP directory: {_short(error)}") from None
    return tensors


def _read_index(path: Path) -> Metadata:
    with open(path, "rb") as file:
        if path.stat().st_size > SMALL_FILE_BYTES * 16:
            raise ValueError("its index is larger than any")
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("its index is not one of DCP")
    for info in index.storage_data.values():
        # A name must not point outside the directory.
        if info.relative_path != Path(info.relative_path).name:
            raise ValueError(f"it names the file {shown(info.relative_path)}")
    return index


def find_megatron(path: Path) -> Path | None:
    """Return Megatron's file of weights in a directory; None if there is none.

    Args:
        path: a directory with latest_checkpointed_iteration.txt, an iter_... directory in it, or
            its mp_rank_00.

    Raises:
        UserError: several files share the model.
    """
    newest = path / _MEGATRON_NEWEST
    if newest.is_file():
        iteration = newest.read_text(errors="replace").strip()
        path = path / (f"iter_{int(iteration):07d}" if iteration.isdigit() else "release")
    files = [*path.glob(f"mp_rank_*/{_MEGATRON_FILE}"), *path.glob(_MEGATRON_FILE)]
    if len(files) > 1:
        raise UserError(
            f"{path}: {len(files)} files share the model; only one file is read: save it with "
            "tensor and pipeline parallelism 1 (Megatron-LM's tools/checkpoint/convert.py)"
        )
    return files[0] if files else None


def read_megatron(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read Megatron's file of weights, on the CPU.

    Returns:
        The arguments with which Megatron was started, as far as they are numbers, strings and
        booleans; tensors by name, without the prefix `model.`.

    Raises:
        UserError: it is not such a file.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        inert: list[Any] = [(_Inert, name) for name in names if name != "argparse.Namespace"]
        with torch.serialization.safe_globals([argparse.Namespace, *inert]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if float(content.get("checkpoint_version", 3.0)) < 2:
            raise ValueError("its version is before 2, in which q, k and v have another order")
        arguments = vars(content.get("args") or argparse.Namespace())
        tensors = dict(_flat(content["model"]))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (
        *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError),
        pickle.UnpicklingError,
    ) as error:
        raise UserError(f"{path} is not a checkpoint of Megatron: {_short(error)}") from None
    plain = (bool, int, float, str)
    return {k: v for k, v in arguments.items() if isinstance(v, plain)}, tensors


class _Inert:
    """Takes the place of a class that is not read."""

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, with their full names."""
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")


def _short(error: BaseException) -> str:
    """The first line of an error; torch's have many."""
    return (str(error) or type(error).__name__).strip().splitlines()[0]
