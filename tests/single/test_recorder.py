"""Start events written late: after a full disk, or by the next rank 0."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.process.recorder import RunRecorder
from hvdtrain.run_files.events_file import read_lines
from hvdtrain.run_files.run_directory import RunDirectory

KEEP = CheckpointConfig(keep=1)


def _generation(number: int) -> dict[str, Any]:
    return {"claim": f"a.{number}", "source": "memory", "step": 10 * number, "cause": "failure"}


def _starts(directory: Path) -> list[tuple[int, int]]:
    lines = read_lines(directory / "events.jsonl")
    return [(line["generation"], line["step"]) for line in lines if line["event"] == "start"]


def test_start_that_a_dead_rank_0_could_not_write_is_recorded_later(tmp_path: Path) -> None:
    generations = [_generation(number) for number in range(4)]
    first = RunRecorder(RunDirectory(tmp_path), KEEP)
    first.emit_starts(generations[:2])
    # Rank 0 of generation 2 could not write. The next rank 0 had joined in generation 1.
    RunRecorder(RunDirectory(tmp_path), KEEP).emit_starts(generations[1:])
    assert _starts(tmp_path) == [(0, 0), (1, 10), (2, 20), (3, 30)]


def test_generation_older_than_the_last_recorded_one_is_omitted(tmp_path: Path) -> None:
    # Its rank 0 was not among the ranks that began it.
    RunRecorder(RunDirectory(tmp_path), KEEP).emit_starts([_generation(0)])
    RunRecorder(RunDirectory(tmp_path), KEEP).emit_starts([_generation(0), _generation(2)])
    RunRecorder(RunDirectory(tmp_path), KEEP).emit_starts([_generation(n) for n in range(4)])
    assert _starts(tmp_path) == [(0, 0), (1, 20), (2, 30)]


def test_generations_recorded_after_a_disk_failure_have_distinct_numbers(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "later")
    recorder = RunRecorder(directory, CheckpointConfig(keep=1))
    recorder.emit_starts([_generation(0)])
    recorder.emit_starts([_generation(0), _generation(1)])
    directory.path.mkdir()
    recorder.emit_starts([_generation(0), _generation(1), _generation(2)])
    assert _starts(directory.path) == [(0, 0), (1, 10), (2, 20)]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENODEV])
def test_start_again_may_help_when_the_disk_fails_at_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    recorder = RunRecorder(RunDirectory(tmp_path), KEEP)
    monkeypatch.setattr(recorder.directory.ownership, "recognize", fail)
    with pytest.raises(UserError, match=os.strerror(number)) as failed:
        recorder.choose("auto", begun=True)
    assert failed.value.exit_code == EXIT_CRASH
