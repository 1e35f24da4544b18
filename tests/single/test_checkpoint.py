"""Checkpoints on disk: complete, or reported by name and skipped; never pickled."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hvdtrain.checkpoint.format import Checkpoint, read, write
from hvdtrain.checkpoint.layout import MARKER, DamagedError, directory_name, verify
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.spread import read_part
from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.errors import UserError
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.tensor_shards import model_tensors

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "files.json", MARKER]


def _checkpoint(step: int) -> Checkpoint:
    generator = torch.Generator().manual_seed(step)
    return Checkpoint(
        {
            "model": {"a.weight": torch.randn(3, 4, generator=generator), "n": torch.tensor(step)},
            "optimizer": {
                "a.weight/exp_avg": torch.randn(3, 4, generator=generator).to(torch.bfloat16)
            },
        },
        state={"step": step, "seed": 2**63, "fingerprint": None},
    )


def _same(a: Checkpoint, b: Checkpoint) -> bool:
    return a.state == b.state and all(
        x.keys() == y.keys()
        and all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)
        for x, y in ((a.parts[name], b.parts[name]) for name in a.parts.keys() | b.parts.keys())
    )


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    """Checkpoints of steps 10 and 20."""
    manager = CheckpointManager(tmp_path / "checkpoints", keep=2)
    for step in (10, 20):
        manager.save(_checkpoint(step))
    return manager


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(byte: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[byte] ^= 0x80
        path.write_bytes(content)

    return flip


DAMAGES = {
    "truncated": _truncate,
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" "),
    "first byte": _flip(0),
    "last byte": _flip(-1),
    "missing": Path.unlink,
}


def test_checkpoint_round_trip_is_lossless(manager: CheckpointManager) -> None:
    assert _same(read(manager.finished()[-1]), _checkpoint(20))
    newest = manager.newest()
    assert newest is not None and _same(newest, _checkpoint(20))


def test_run_without_checkpoints_has_no_newest_one(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "nowhere", keep=1).newest() is None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoint_is_named_and_skipped(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    directory = manager.finished()[-1]
    DAMAGES[damage](directory / name)
    with pytest.raises(DamagedError, match=directory.name):
        read(directory)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        found = manager.newest()
    assert found is not None and _same(found, _checkpoint(10))
    (line,) = caplog.messages
    assert directory.name in line and "trying the one before it" in line


@pytest.mark.parametrize("name", FILES[:3])
def test_verify_names_the_damaged_file(manager: CheckpointManager, name: str) -> None:
    directory = manager.finished()[-1]
    verify(directory)
    _flip(-1)(directory / name)
    with pytest.raises(DamagedError, match=f"{directory}: {name} was altered"):
        verify(directory)


def test_resume_is_refused_when_all_checkpoints_are_damaged(manager: CheckpointManager) -> None:
    for directory in manager.finished():
        _flip(100)(directory / "model.safetensors")
    with pytest.raises(UserError, match=r"step_00000020, step_00000010.*run\.id"):
        manager.newest()


def test_only_the_newest_checkpoints_are_kept(manager: CheckpointManager) -> None:
    for step in (30, 40):
        manager.save(_checkpoint(step))
    assert [path.name for path in manager.finished()] == ["step_00000030", "step_00000040"]
    assert sorted(path.name for path in manager.root.iterdir()) == [
        "step_00000030",
        "step_00000040",
    ]


@pytest.mark.parametrize("keep", [1, 2])
def test_superseded_checkpoints_are_set_aside_and_not_resumed_from(
    tmp_path: Path, keep: int
) -> None:
    # The run resumed from step 10, because 20 is damaged or another checkpoint was requested.
    manager = CheckpointManager(tmp_path, keep)
    for step in (10, 20):
        write(tmp_path, _checkpoint(step))
    manager.supersede(after=10)
    assert [path.name for path in manager.finished()] == ["step_00000010"]
    manager.save(_checkpoint(15))
    newest = manager.newest()
    assert newest is not None and newest.state["step"] == 15
    assert _same(read(tmp_path / "left_step_00000020"), _checkpoint(20))
    for step in (20, 30):  # the same again
        write(tmp_path, _checkpoint(step))
    manager.supersede(after=15)
    assert manager.finished()[-1].name == "step_00000015"


def test_checkpoint_of_the_same_step_is_replaced(manager: CheckpointManager) -> None:
    other = _checkpoint(20)
    other.parts["model"]["a.weight"] += 1
    manager.save(other)
    assert _same(read(manager.finished()[-1]), other)


def _fails_to_rename(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_interrupted_write_leaves_no_files_and_keeps_older_checkpoints(
    manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "rename", _fails_to_rename)
        manager.save(_checkpoint(30))
    assert sorted(path.name for path in manager.root.iterdir()) == [
        "step_00000010",
        "step_00000020",
    ]
    assert _same(read(manager.finished()[-1]), _checkpoint(20))
    manager.save(_checkpoint(30))
    assert _same(read(manager.finished()[-1]), _checkpoint(30))


# The limit stops a write as a full disk would; every tensor is larger than 64 bytes.
@pytest.mark.slow
@pytest.mark.parametrize("limit", [64, 800])
def test_full_disk_leaves_no_files_and_keeps_older_checkpoints(
    manager: CheckpointManager, limit: int
) -> None:
    code = (
        "import resource, signal, sys, torch\n"
        "from pathlib import Path\n"
        "from hvdtrain.checkpoint.format import Checkpoint, write\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "try:\n"
        "    state = {'step': 30, 'more': 'x' * 4000}\n"
        "    write(Path(sys.argv[1]), Checkpoint({'model': {'a': torch.ones(4)}}, state))\n"
        "except OSError as error:\n"
        "    sys.exit(0)\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(manager.root), str(limit)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in manager.root.iterdir()) == [
        "step_00000010",
        "step_00000020",
    ]
    assert _same(read(manager.finished()[-1]), _checkpoint(20))


def test_leftovers_of_a_killed_write_are_ignored_and_overwritten(
    manager: CheckpointManager,
) -> None:
    # Killed before the rename: a temporary directory. Killed before the marker: no marker.
    whole = manager.root / directory_name(20)
    shutil.copytree(whole, manager.root / f".{directory_name(30)}.tmp")
    shutil.copytree(whole, manager.root / directory_name(40))
    (manager.root / directory_name(40) / MARKER).unlink()
    newest = manager.newest()
    assert newest is not None and newest.state["step"] == 20
    for step in (30, 40):
        manager.save(_checkpoint(step))
        assert _same(read(manager.finished()[-1]), _checkpoint(step))
    assert not list(manager.root.glob(".*"))


def test_checkpoint_files_contain_no_pickle(manager: CheckpointManager) -> None:
    for directory in manager.finished():
        assert sorted(path.name for path in directory.iterdir()) == sorted(FILES)
        for path in directory.iterdir():
            content = path.read_bytes()
            # A pickle of protocol 2 or later starts with 0x80, torch's archives with "PK".
            assert content[:1] != b"\x80" and content[:2] != b"PK", path
        for name in FILES[:2]:
            assert load_file(directory / name)


def test_tied_parameters_and_buffers_survive_a_round_trip(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 4)
            self.norm = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight
            self.turned = nn.Parameter(torch.randn(4, 6).t())  # not contiguous

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embedding(tokens)))

    torch.manual_seed(0)
    model = Tied()
    model(torch.arange(5))
    directory = write(tmp_path, Checkpoint({"model": model_tensors(model)}, {"step": 1}))
    saved = read(directory).parts["model"]
    assert "head.weight" not in saved and int(saved["norm.num_batches_tracked"]) == 1
    torch.manual_seed(1)
    other = Tied()
    for name, tensor in model_tensors(other).items():
        tensor.copy_(saved[name])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


class _EndingGeneration(Heartbeat):
    """End the generation after two chunks of a file."""

    def advance(self) -> None:
        self.generation_over = self.read()[0] >= 2
        super().advance()


READERS = {
    "checkpoint": read,
    "shards": lambda directory: read_part(directory, "model"),
    "verification": verify,
    "weights": lambda directory: read_weights(directory / FILES[0]),
}


@pytest.mark.parametrize("reader", READERS)
def test_read_stops_when_the_generation_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    tensors = {"a": torch.zeros(16 << 20, dtype=torch.uint8)}
    directory = write(tmp_path, Checkpoint({"model": tensors}, {"step": 1}))
    ending = _EndingGeneration()
    monkeypatch.setattr(heartbeat, "HEARTBEAT", ending)
    with pytest.raises(RankLostError, match="this generation is over"):
        READERS[reader](directory)
    assert ending.read()[0] <= 4, "it read on"
