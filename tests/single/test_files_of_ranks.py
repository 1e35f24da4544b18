"""Checkpoints written by several ranks: per-rank state is saved and inherited."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain.checkpoint.format import Checkpoint, read
from hvdtrain.checkpoint.layout import DamagedError, verify
from hvdtrain.checkpoint.manager import CheckpointManager, FilesOfRank
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.runtime.mesh import Group
from tests.support.counted import Counter
from tests.support.runs import run

LIMIT = 30.0


def _state(steps: int) -> RunState:
    model = nn.Linear(2, 1)
    counter = Counter()
    counter.steps += steps
    optimizer = torch.optim.SGD(model.parameters())
    return RunState(model, optimizer, Progress(step=4), {}, (counter,))


def _steps(state: RunState) -> int:
    [part] = state.of_scope("local")
    return int(part.tensors()["steps"])


def _save(root: Path, captured: Sequence[Checkpoint]) -> Path:
    """Save with rank 0 and the other given ranks, each in a separate thread."""
    others = [threading.Thread(target=FilesOfRank(root).save, args=[c]) for c in captured[1:]]
    for thread in others:
        thread.start()
    try:
        return CheckpointManager(root, keep=2).save(captured[0])
    finally:
        for thread in others:
            thread.join(LIMIT)


def _captured(ranks: int) -> list[Checkpoint]:
    """Return the state of ranks of which rank r has done 10**r steps."""
    return [
        _state(10**rank).capture(Group(rank, ranks), ".step_00000004.here.1.0.tmp")
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "expected"), [(3, [1, 10, 100]), (2, [101, 10]), (1, [111]), (4, [1, 10, 100, 0])]
)
def test_per_rank_state_is_preserved_on_another_number_of_ranks(
    tmp_path: Path, ranks: int, expected: list[int]
) -> None:
    directory = _save(tmp_path, _captured(3))
    verify(directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == [directory.name]
    found = []
    for rank in range(ranks):
        state = _state(7)
        state.load(read(directory))
        state.load_local(directory, Group(rank, ranks))
        assert state.progress.step == 4
        found.append(_steps(state))
    assert found == expected


def test_new_run_resets_per_rank_state(tmp_path: Path) -> None:
    state = _state(7)
    state.load_local(None, Group(0, 1))
    assert _steps(state) == 0


def test_checkpoint_missing_a_ranks_file_is_abandoned_and_removed(tmp_path: Path) -> None:
    captured = _captured(3)
    shared = captured[0].shared
    assert shared is not None
    threading.Timer(0.5, shared.given_up.set).start()
    with pytest.raises(TimeoutError, match="another rank") as error:
        _save(tmp_path, captured[:2])
    assert error.value.filename == "counter.rank_00002.safetensors"
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_with_a_damaged_per_rank_file_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = _save(tmp_path, _captured(3))
    later = _captured(3)
    for checkpoint in later:
        checkpoint.state["step"] = 5
    damaged = _save(tmp_path, later) / "counter.rank_00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    newest = CheckpointManager(tmp_path, keep=2).newest()
    assert newest is not None and newest.directory == good
    assert damaged.name in caplog.text
    with pytest.raises(DamagedError, match=damaged.name):
        _state(0).load_local(damaged.parent, Group(2, 3))


def _counted(directory: Path, step: int) -> list[int]:
    files = sorted((directory / f"checkpoints/step_{step:08}").glob("counter.rank_*"))
    return [int(load_file(file)["steps"]) for file in files]


def test_run_resumes_with_its_per_rank_state(tmp_path: Path) -> None:
    argv = [
        *("--task", "tests.support.counted:Counted", "--run.root", str(tmp_path)),
        *("--run.id", "case", "--batch.global_size", "12", "--batch.micro_size", "2"),
        *("--checkpoint.every", "3", "--telemetry.port", "0", "--eval.every", "0"),
    ]
    directory = tmp_path / "case"
    done = run(tmp_path / "output", [*argv, "--train.duration", "8"], "gloo:3")
    assert done.returncode == 0, done
    assert _counted(directory, 6) == [6] * 3 and _counted(directory, 8) == [8] * 3
    done = run(tmp_path / "output", [*argv, "--train.duration", "10"], "mpirun:2")
    assert done.returncode == 0, done
    assert _counted(directory, 10) == [18, 10]
