"""A part of the state that ranks saved in shards, readable by any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from hvdtrain.checkpoint.layout import (
    TENSORS,
    DamagedError,
    check_marker,
    checked_sums,
    compare,
    part_and_rank,
    sha256_of,
)
from hvdtrain.checkpoint.tensor_file import map_file, positions_of, unpack
from hvdtrain.runtime.tensor_shards import ShardPosition, assemble, flat_range
from hvdtrain.runtime.wrappers import plain_name, plain_names


class SpreadPart:
    """The tensors of a part by name, whole or in shards, assembled one at a time on request.

    Args:
        shards: shards of each tensor, memory-mapped.
        where: location named in errors.
    """

    def __init__(
        self, shards: Mapping[str, list[tuple[ShardPosition, Tensor]]], where: str
    ) -> None:
        self._shards = shards
        self._where = where

    def names(self) -> list[str]:
        return sorted(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shards[name][0][0].shape

    def whole(self, name: str) -> Tensor:
        """Return the whole tensor; raise DamagedError if a shard is missing."""
        try:
            return assemble(self._shards[name])
        except ValueError as error:
            raise DamagedError(f"{self._where}: {name}: {error}") from None

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Return a range of a tensor's elements, flattened in C order.

        Raises:
            DamagedError: a shard is missing.
        """
        try:
            return flat_range(self._shards[name], start, stop)
        except ValueError as error:
            raise DamagedError(f"{self._where}: {name}: {error}") from None


def as_in(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a checkpoint, perhaps of a wrapped model, by the names in the model."""
    return plain_names(tensors, [plain_name(name) for name, _ in model.named_parameters()])


def open_part(directory: Path, part: str, model: nn.Module | None = None) -> SpreadPart | None:
    """Open a part of a checkpoint and verify its files; None if it has no part of this name.

    Args:
        model: gives whole tensors their names, if the checkpoint's model was in a wrapper.

    Raises:
        DamagedError: it differs from what was written.
    """
    check_marker(directory)
    shards: dict[str, list[tuple[ShardPosition, Tensor]]] = {}
    try:
        sums = checked_sums(directory)
        files = [f for f in sums if f.endswith(TENSORS) and _part_of(f) == part]
        for file in files:
            path = directory / file
            compare(directory, file, sums[file], path.stat().st_size, sha256_of(path))
            content = map_file(path)
            known, tensors = positions_of(content), unpack(content)
            if model is not None and not known:
                tensors = as_in(model, tensors)
            for name, tensor in tensors.items():
                position = known.get(name, ShardPosition((*tensor.shape,), 0))
                shards.setdefault(name, []).append((position, tensor))
    except OSError as error:
        raise DamagedError(f"checkpoint {directory}: {error.filename}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise DamagedError(f"checkpoint {directory}: {error}") from None
    return SpreadPart(shards, f"checkpoint {directory}") if files else None


def read_part(directory: Path, part: str) -> dict[str, Tensor]:
    """Return the whole tensors of a part, whichever ranks saved it; verify only its files.

    Raises:
        DamagedError: it differs from what was written, or is missing.
    """
    found = open_part(directory, part)
    if found is None:
        raise DamagedError(f"checkpoint {directory}: it has no {part}")
    return {name: found.whole(name) for name in found.names()}


def _part_of(file: str) -> str:
    return part_and_rank(file.removesuffix(TENSORS))[0]
