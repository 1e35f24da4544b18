"""Hosts that do not share run.root: their own directory is not taken for an unmounted disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import log
from hvdtrain.config import Config, RunConfig
from hvdtrain.log import logger
from hvdtrain.process import recorder
from hvdtrain.process.recorder import PersistentState
from hvdtrain.run_files import ownership
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership
from hvdtrain.runtime.mesh import Topology
from tests.support.job import poll


@pytest.fixture
def state(tmp_path: Path) -> Iterator[PersistentState]:
    """A process on a host of its own, with nothing in run.root yet."""
    config = Config(run=RunConfig(root=str(tmp_path / "runs"), id="run"))
    state = PersistentState(config, None, 0, "task")
    yield state
    state.close()
    state.release()
    log.close()


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that the recorder logs."""
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *of: said.append(text % of))
    return said


def _ranks(rank: int, size: int) -> Topology:
    return Topology(rank, size, 0, 1, tuple(f"host{number}" for number in range(size)))


@pytest.mark.parametrize("trained", [False, True], ids=["launched", "joined"])
def test_host_without_shared_root_logs_and_may_become_rank_0(
    state: PersistentState, errors: list[str], trained: bool
) -> None:
    for ranks, begun in ((_ranks(2, 3), trained), (_ranks(1, 2), True)):
        for _ in range(2):  # as a generation does
            state.open_directory(ranks, None, begun)
    logs = state.directory.logs
    assert sorted(path.name for path in logs.iterdir()) == ["rank_00001.jsonl", "rank_00002.jsonl"]
    state.open_directory(_ranks(0, 1), None, True)
    assert state.recorder is not None and not errors


def test_joining_process_makes_nothing_while_a_rank_lacks_the_disk(
    state: PersistentState, errors: list[str]
) -> None:
    state.lost_disk = True
    state.open_directory(_ranks(1, 2), None, True)
    assert "not mounted" in errors[0] and not state.directory.path.parent.exists()


def test_directory_without_a_token_is_lost_only_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, run = [1], tmp_path / "run"
    monkeypatch.setattr(ownership, "_device", lambda _: device[0])
    owner = Ownership(run)
    owner.recognize(strict=False)
    device[0] = 2
    assert not owner.has_lost(), "it was not there yet"
    run.mkdir()
    owner.recognize(strict=False)
    run.rmdir()
    assert not owner.has_lost(), "it may be made again"
    device[0] = 3
    assert owner.has_lost()
    with pytest.raises(OSError, match="not mounted"):
        owner.recognize(strict=False)


def test_directory_that_is_being_opened_again_costs_no_generation(
    state: PersistentState, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_RETURN_SECONDS", 0.01)
    state.lost_disk = True
    state.open_directory(_ranks(0, 2), None, True)
    assert errors and state.recorder is None and not state.directory_returned
    state.lost_disk = False  # a rank is lost meanwhile
    prepare = state.directory.prepare

    def slow(*args: Any) -> None:
        prepare(*args)
        poll(lambda: state._waits is not None and not state._waits.is_alive(), 60, "the return")

    monkeypatch.setattr(state.directory, "prepare", slow)
    state.open_directory(_ranks(0, 1), None, True)
    assert state.recorder is not None and not state.directory_returned


def test_directory_that_is_there_again_is_opened_by_a_generation(
    state: PersistentState, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_RETURN_SECONDS", 0.01)
    state.lost_disk = True
    state.open_directory(_ranks(0, 2), None, True)
    earlier = Ownership(state.directory.path)
    earlier.acquire(Claim.of_this_process())
    earlier.release()
    poll(lambda: state.directory_returned, 60, "the return")
    state.open_directory(_ranks(0, 2), None, True)
    assert errors and state.recorder is not None and not state.directory_returned
