"""Files of a run that someone removes, moves or replaces while it trains: none stops a save."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from pathlib import Path

import pytest

from hvdtrain import cli, log
from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.layout import finished, verify
from hvdtrain.files import FileLock, is_open_at
from hvdtrain.process.recorder import RunRecorder
from hvdtrain.run_files import ownership
from hvdtrain.run_files.events_file import EventsFile, read_lines
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership, TokenPace
from hvdtrain.run_files.run_directory import RunDirectory
from tests.support import runs
from tests.support.job import poll


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_run_whose_directory_is_removed_is_saved_completely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "purged"
    flags = [
        *("--task", "tests.support.tasks:Purged", "--train.duration", "9", "--checkpoint.every"),
        *("2", "--batch.global_size", "4", "--batch.micro_size", "4", "--telemetry.port", "0"),
        *("--run.root", str(tmp_path), "--run.id", run.name),
    ]
    done = runs.run(tmp_path / "output", flags, env={"HVDTRAIN_TEST_PURGED": str(run)})
    assert done.returncode == 0, done
    assert "could not be written" not in done.stderr, done
    named = re.findall(
        r"(\S+) was removed or moved while the run trains: it is made again", str(done)
    )
    assert {*named} == {
        str(run / name)
        for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl", "config.yaml", "manifest.json")
    }
    assert _steps(run / "metrics.jsonl") == [*range(1, 10)]
    assert [path.name[-1] for path in finished(run / "checkpoints")] == ["6", "8", "9"]
    for checkpoint in finished(run / "checkpoints"):
        verify(checkpoint)
    assert cli.main(["audit", str(run)]) == 0, capsys.readouterr()
    messages = [line["message"] for line in read_lines(run / "logs" / "rank_00000.jsonl")]
    assert any("was removed or moved" in message for message in messages)


@pytest.mark.parametrize("by", ["removed", "moved", "replaced"])
def test_metrics_file_keeps_its_lines_if_it_loses_its_name(tmp_path: Path, by: str) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path, after=0)
    for step in (1, 2):
        file.write({"step": step})
    if by == "removed":
        path.unlink()
        path.parent.rmdir()
    elif by == "moved":
        path.rename(tmp_path / "old")
    else:  # as `sed -i` does
        (tmp_path / "edited").write_bytes(path.read_bytes())
        (tmp_path / "edited").replace(path)
    file.sync()
    file.write({"step": 3})
    path.unlink()
    file.roll_back(2)
    file.write({"step": 3})
    path.unlink()
    file.close()
    assert _steps(path) == [1, 2, 3]


def test_events_file_keeps_its_lines_if_it_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    events = EventsFile(path)
    for step in (1, 2):
        events.write("checkpoint", step=step)
    path.unlink()
    path.parent.rmdir()
    before = len(os.listdir("/proc/self/fd"))
    for step in (3, 4, 5):
        events.write("checkpoint", step=step)
        assert _steps(path) == [*range(1, step + 1)]
        path.unlink()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_a_disk_that_is_away_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, disk, away = [1], tmp_path / "disk", tmp_path / "away"
    monkeypatch.setattr(ownership, "_device", lambda _: device[0])
    recorder = RunRecorder(RunDirectory(disk / "run"), CheckpointConfig(keep=1))
    recorder.directory.ownership.acquire(Claim.of_this_process())
    recorder.open(0, None)
    metrics, events = recorder.metrics, recorder.events
    assert metrics is not None
    metrics.write({"step": 1})
    events.write("start")
    disk.rename(away)
    disk.mkdir()
    device[0] = 2
    metrics.write({"step": 2})
    recorder.bring_to_disk()
    events.write("checkpoint")
    assert not [*disk.iterdir()]
    disk.rmdir()
    away.rename(disk)
    device[0] = 1
    metrics.write({"step": 3})
    recorder.bring_to_disk()
    events.write("end")
    assert _steps(recorder.directory.metrics) == [1, 2, 3]
    names = [line["event"] for line in read_lines(recorder.directory.events)]
    assert names == ["start", "checkpoint", "end"]
    recorder.close()
    recorder.directory.ownership.release()


def test_metrics_that_cannot_be_written_do_not_stop_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hvdtrain")
    recorder = RunRecorder(RunDirectory(tmp_path), CheckpointConfig(keep=1))
    recorder.open(0, None)
    assert recorder.metrics is not None
    recorder.metrics.write({"step": 1})
    recorder.directory.metrics.unlink()
    recorder.directory.metrics.mkdir()
    recorder.bring_to_disk()
    assert "metrics.jsonl cannot be written (Is a directory)" in caplog.text
    recorder.directory.metrics.rmdir()
    recorder.bring_to_disk()
    assert "metrics.jsonl can be written again" in caplog.text
    assert _steps(recorder.directory.metrics) == [1]
    recorder.close()


def test_log_of_a_rank_continues_after_its_directory_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "rank_00000.jsonl"
    log.to_file(path.parent, 0, "host")
    try:
        logging.getLogger("hvdtrain").info("first")
        path.unlink()
        path.parent.rmdir()
        logging.getLogger("hvdtrain").info("second")
        assert [line["message"] for line in read_lines(path)] == ["second"]
    finally:
        log.close()


def test_lines_are_dropped_while_the_log_cannot_be_made(tmp_path: Path) -> None:
    path, target = tmp_path / "logs", tmp_path / "target"
    target.mkdir()
    log.to_file(path, 0, "host")
    try:
        (path / "rank_00000.jsonl").unlink()
        path.rmdir()
        path.write_text("no directory")
        for message in ("dropped", "dropped too"):
            logging.getLogger("hvdtrain").info(message)
        path.unlink()
        logging.getLogger("hvdtrain").info("kept")
        assert [line["message"] for line in read_lines(path / "rank_00000.jsonl")] == ["kept"]
    finally:
        log.close()
    path.rename(target / "logs")
    path.write_text("no directory")
    with pytest.raises(OSError, match="logs"):
        log.to_file(path, 0, "host")
    log.close()


def test_file_that_another_host_has_removed_is_not_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fstat(descriptor: int) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))  # as NFS does

    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fstat)
        found = is_open_at(0, tmp_path / "file")
    assert not found


def test_lock_on_a_removed_file_is_taken_again(tmp_path: Path) -> None:
    own, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    own.open()
    own.attempt()
    (tmp_path / "lock").unlink()
    own.open()
    own.attempt()
    other.open()
    other.attempt()
    assert own.held and not other.held
    own.close()
    other.close()


def test_run_is_not_made_again_on_another_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its disk is unmounted, and the path names the mount point."""
    run, away, device = tmp_path / "runs" / "a", tmp_path / "away", [1]
    monkeypatch.setattr(ownership, "_device", lambda _: device[0])
    owner = Ownership(run, pace=TokenPace(beat=0.1))
    owner.acquire(Claim.of_this_process())
    try:
        device[0] = 2
        assert owner.held(60), "a disk that is mounted again may have another number"
        poll(lambda: owner._device == 2, 60, "a heartbeat there")
        device[0] = 3
        run.parent.rename(away)
        poll(lambda: owner.failures > 1, 60, "a failed heartbeat")
        assert not run.exists() and not owner.held()
        away.rename(run.parent)
        poll(lambda: owner.held(1.0), 60, "the next heartbeat")
        run.parent.rename(away)  # a purge: the disk is the same
        poll((run / ".owner").exists, 60, "a directory that is made again")
    finally:
        owner.release()
