"""preempt.notice: preemption notices from cloud metadata, a file or a command."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.runtime import notices, signals
from tests.support import runs
from tests.support.job import poll
from tests.support.metadata import MACHINE, metadata


@pytest.mark.parametrize("text", ["", "ec2", "file:", "command: ", "http://", "ftp://a/b", "aws:1"])
def test_unknown_notice_source_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"preempt\.notice is aws, gcp, azure, file:PATH"):
        notices.parse_source(text)


@pytest.mark.parametrize("text", ["aws", "gcp"])
def test_cloud_metadata_requests_follow_documented_protocol(text: str) -> None:
    with metadata() as said:
        source = notices.parse_source(text, said.address)
        assert not source()
        said.notice = True
        assert source()


def test_azure_reacts_only_to_preemption_of_this_machine() -> None:
    with metadata() as said:
        source = notices.parse_source("azure", said.address)
        assert not source()
        said.events = [("Preempt", ["vm-8"]), ("Freeze", [MACHINE])]  # it continues after a freeze
        assert not source()
        said.events.append(("Preempt", ["vm-1", MACHINE]))
        assert source()


def test_notice_requests_bypass_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with metadata() as said:
        source = notices.parse_source(f"{said.address}/notice")
        assert not source()
        said.notice = True
        assert source()


def test_file_or_command_can_give_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notice"
    file = notices.parse_source(f"file:{path}")
    command = notices.parse_source(f"command:test -e {path}")
    assert not file() and not command()
    path.touch()
    assert file() and command()
    with pytest.raises(OSError, match="127"):  # no notice: unknown
        notices.parse_source("command:no-such-program")()
    monkeypatch.setattr(notices, "_COMMAND_SECONDS", 0.5)
    child = tmp_path / "child"
    with pytest.raises(OSError, match="longer"):
        notices.parse_source(f"command:sleep 60 & echo $! > {child}; wait")()
    poll(lambda: not _lives(int(child.read_text())), 10, "the end of what the command has started")


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_watch_survives_hanging_server_and_logs_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(notices, "EVERY_SECONDS", 0.05)
    heard, told = threading.Event(), []

    def on_notice(message: str) -> None:
        told.append(message)
        if len(told) == 1:
            raise OSError("the launcher is busy")
        heard.set()

    with metadata() as said, caplog.at_level(logging.WARNING, "hvdtrain"):
        said.hangs = 1.0
        began = time.monotonic()
        notices.watch("aws", notices.parse_source("aws", said.address), on_notice)
        assert time.monotonic() - began < 0.5  # no caller waits for it
        poll(lambda: len(said.asked) > 3, 20, "another question after those without an answer")
        said.hangs, said.notice = 0.0, True
        assert heard.wait(20)
    assert told == ["notice from aws: this host is about to be reclaimed"] * 2
    lines = [line for line in caplog.messages if "timed out" in line]
    assert len(lines) == 1 and lines[0].endswith("; retrying")


def test_first_signal_after_notice_does_not_end_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(signals, "PAIR_SECONDS", -1.0)  # either of two counts
    stop = signals.StopFlag()
    stop.raise_before_signals()
    stop._handle(signal.SIGTERM, None)  # the host is shut down
    assert stop.raised and ends == []
    stop._handle(signal.SIGTERM, None)
    assert ends == [128 + signal.SIGTERM]


@pytest.mark.slow
def test_notice_stops_run_with_checkpoint(tmp_path: Path) -> None:
    with metadata() as said:
        flags = ["--task=tests.support.tasks:Paced", f"--run.root={tmp_path}", "--run.id=mine"]
        flags += [f"--preempt.notice={said.address}/notice", "--telemetry.port=0"]
        flags += ["--batch.global_size=8", "--batch.micro_size=8"]
        job = runs.start(tmp_path, flags, command=runs.forked_train(1))
        poll((tmp_path / "mine/metrics.jsonl").exists, 120, "the first step")
        said.notice = True
        done = job.wait(60)
    assert done.returncode == os.EX_TEMPFAIL, done
    last = runs.metrics(tmp_path / "mine")[-1]["step"]
    assert (tmp_path / f"mine/checkpoints/step_{last:08}/complete").exists()
