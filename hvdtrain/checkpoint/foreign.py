"""Weights in directories of torch.distributed.checkpoint (DCP) and of Megatron-LM.

Both formats contain pickles. Nothing in them is executed: DCP's index is read by an unpickler that
knows only the classes of an index, and has inert objects in place of all others, such as Megatron's
plans of the save; Megatron's own file is read by pickled.py.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from hvdtrain.checkpoint.pickled import UNEXPECTED, Inert, first_line, load_inert, read_pickled
from hvdtrain.errors import UserError
from hvdtrain.untrusted import SMALL_FILE_BYTES, shown

DCP_INDEX = ".metadata"
_MEGATRON_FILE = "model_optim_rng.pt"
_MEGATRON_NEWEST = "latest_checkpointed_iteration.txt"
# Classes that an index needs, by module. None of them does anything when it is built.
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
NOT_WEIGHTS = re.compile(r"(optim|optimizers?|lr_scheduler|dataloader|train_state)(\.|$)")


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _OF_INDEX.get(module, ()):
            return super().find_class(module, name)
        return Inert


class _DcpReader(dcp.FileSystemReader):
    """Reader of a directory whose index has been read already."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class DcpDirectory:
    """A directory of torch.distributed.checkpoint.

    Args:
        path: the directory.
        values: whether `tensors` reads them; False: only those of one value, and the others are on
            the meta device.

    Attributes:
        names: of all that it contains.

    Raises:
        UserError: it is not such a directory.
    """

    def __init__(self, path: Path, values: bool = True) -> None:
        self._path = path
        self._values = values
        with self._described():
            self._index = _read_index(path / DCP_INDEX)
        self.names = [*self._index.state_dict_metadata]

    def tensors(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """Read tensors, whole and on the CPU.

        Args:
            wanted: whether to read a name.

        Raises:
            UserError: the directory is not complete.
        """
        with self._described():
            tensors = {}
            for name, found in self._index.state_dict_metadata.items():
                if isinstance(found, TensorStorageMetadata) and wanted(name):
                    device = "cpu" if self._values or found.size.numel() == 1 else "meta"
                    dtype = found.properties.dtype
                    tensors[name] = torch.empty(found.size, dtype=dtype, device=device)
            read = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                reader = _DcpReader(self._path, self._index)
                dcp.load(read, storage_reader=reader, no_dist=True)
        return tensors

    def value(self, name: str) -> Any:
        """Read a value that is not a tensor, without executing anything; None: there is none.

        Raises:
            UserError: the directory is not complete.
        """
        if not isinstance(self._index.state_dict_metadata.get(name), BytesStorageMetadata):
            return None
        with self._described():  # torch's own reader would execute it
            place = self._index.storage_data[MetadataIndex(name)]
            with open(self._path / place.relative_path, "rb") as file:
                file.seek(place.offset)
                return load_inert(BytesIO(file.read(place.length)))

    @contextmanager
    def _described(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = error.filename or self._path
            raise UserError(f"{self._path}: {path}: {error.strerror or error}") from None
        except (*UNEXPECTED, dcp.api.CheckpointException) as error:
            failures = getattr(error, "failures", None) or {0: (error, None)}
            reason = first_line(next(iter(failures.values()))[0])
            what = f"is not a complete DCP directory: {reason}"
            raise UserError(f"{self._path} {what}") from None


def read_dcp(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a DCP directory that are not an optimizer's, whole and on the CPU.

    Raises:
        UserError: it is not such a directory, or is not complete.
    """
    return DcpDirectory(path).tensors(lambda name: not NOT_WEIGHTS.match(name))


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
    path = newest_of_megatron(path)
    files = [*path.glob(f"mp_rank_*/{_MEGATRON_FILE}"), *path.glob(_MEGATRON_FILE)]
    if len(files) > 1:
        raise UserError(
            f"{path}: {len(files)} files share the model; only one file is read: save it with "
            "tensor and pipeline parallelism 1 (Megatron-LM's tools/checkpoint/convert.py)"
        )
    return files[0] if files else None


def newest_of_megatron(path: Path) -> Path:
    """Return the directory that latest_checkpointed_iteration.txt names, or `path` without it."""
    newest = path / _MEGATRON_NEWEST
    if not newest.is_file():
        return path
    iteration = newest.read_text(errors="replace").strip()
    return path / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else "release")


def megatron_arguments(content: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with which Megatron was started, as far as they are plain values."""
    arguments = vars(content.get("args") or argparse.Namespace())
    plain = (bool, int, float, str)
    return {name: value for name, value in arguments.items() if isinstance(value, plain)}


def read_megatron(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read Megatron's file of weights, on the CPU.

    Returns:
        The arguments with which Megatron was started, as far as they are numbers, strings and
        booleans; tensors by name, without the prefix `model.`.

    Raises:
        UserError: it is not such a file.
    """
    content = read_pickled(path)
    try:
        if float(content.get("checkpoint_version", 3.0)) < 2:
            raise ValueError("its version is before 2, in which q, k and v have another order")
        arguments = megatron_arguments(content)
        tensors = dict(_flat(content["model"]))
    except UNEXPECTED as error:
        raise UserError(f"{path} is not a checkpoint of Megatron: {first_line(error)}") from None
    return arguments, tensors


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries, with their full names."""
    for name, value in content.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
