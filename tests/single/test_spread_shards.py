"""Tensors stored in shards: assembled from any files, or refused if a shard is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hvdtrain.checkpoint.format import Checkpoint, SharedDirectory, write, write_own_files
from hvdtrain.checkpoint.layout import DamagedError, file_of_rank, verify
from hvdtrain.checkpoint.spread import SpreadPart, open_part
from hvdtrain.runtime.tensor_shards import ShardPosition, assemble, flat_range

WHOLE = torch.arange(24.0).view(4, 6)
FLAT = [(0, 5), (5, 6), (6, 24)]


def _flat(start: int, stop: int) -> tuple[ShardPosition, Tensor]:
    return ShardPosition((4, 6), start), WHOLE.view(-1)[start:stop]


def _box(row: int, column: int, height: int, width: int) -> tuple[ShardPosition, Tensor]:
    box = WHOLE[row : row + height, column : column + width]
    return ShardPosition((4, 6), offsets=(row, column)), box


BOXES = [_box(0, 0, 4, 2), _box(0, 2, 1, 4), _box(1, 2, 3, 4)]


def test_shards_of_any_shape_are_assembled_in_order() -> None:
    assert torch.equal(assemble(BOXES), WHOLE)
    assert torch.equal(assemble([_flat(*ends) for ends in reversed(FLAT)]), WHOLE)
    assert torch.equal(flat_range(BOXES, 3, 11), WHOLE.view(-1)[3:11])
    # Shards outside of the range may be missing.
    assert torch.equal(flat_range([_flat(0, 5), _flat(5, 9)], 4, 8), WHOLE.view(-1)[4:8])
    scalar = torch.tensor(3.0)
    assert torch.equal(assemble([(ShardPosition((), 0), scalar.view(1))]), scalar)


def test_shard_description_round_trips() -> None:
    for position, _ in (*BOXES, _flat(5, 6)):
        assert ShardPosition.of(position.described()) == position


@pytest.mark.parametrize("shards", [BOXES[:2], [_flat(0, 5), _flat(6, 24)]])
def test_missing_shard_is_refused(shards: list[tuple[ShardPosition, Tensor]]) -> None:
    part = SpreadPart({"w": shards}, "checkpoint x")
    with pytest.raises(DamagedError, match=r"checkpoint x: w: its shards have \d+ elements of 24"):
        part.whole("w")
    with pytest.raises(DamagedError):
        part.range("w", 0, 24)


def _save(root: Path) -> Path:
    """Save a checkpoint of three ranks, each with a row of `w`; the first also has a step count."""
    hidden = ".step_00000003.here.1.0.tmp"
    captured = []
    for rank, ends in enumerate(FLAT):
        position, tensor = _flat(*ends)
        name = file_of_rank("optimizer", rank)
        tensors = {"w/exp_avg": tensor} | ({"w/step": torch.tensor(3.0)} if rank == 0 else {})
        others = tuple(file_of_rank("optimizer", other) for other in (1, 2))
        shared = SharedDirectory(hidden, others if rank == 0 else ())
        positions = {name: {"w/exp_avg": position}}
        captured.append(Checkpoint({name: tensors}, {"step": 3}, shared, positions=positions))
    for checkpoint in captured[1:]:
        write_own_files(root, checkpoint)
    return write(root, captured[0])


def test_saved_shards_can_be_read_back_and_by_safetensors(tmp_path: Path) -> None:
    directory = _save(tmp_path)
    verify(directory)
    part = open_part(directory, "optimizer")
    assert part is not None and part.names() == ["w/exp_avg", "w/step"]
    assert torch.equal(part.whole("w/exp_avg"), WHOLE)
    assert torch.equal(part.whole("w/step"), torch.tensor(3.0))
    assert torch.equal(part.range("w/exp_avg", 4, 8), WHOLE.view(-1)[4:8])
    theirs = load_file(directory / "optimizer.rank_00002.safetensors")
    assert torch.equal(theirs["w/exp_avg"], WHOLE.view(-1)[6:])
    assert open_part(directory, "ema") is None


def test_damaged_shard_is_refused(tmp_path: Path) -> None:
    damaged = _save(tmp_path) / "optimizer.rank_00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedError, match=damaged.name):
        open_part(damaged.parent, "optimizer")
