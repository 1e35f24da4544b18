"""metrics.jsonl has each step exactly once, even after a crash or a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from hvdtrain.file_thread import wait_for_writes
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.run_files.ownership import Ownership
from tests.support.job import poll

# Possible content after the lines of steps 1 to 3 when the run resumes from step 3.
ENDS = {
    "nothing": b"",
    "later steps": b'{"step": 4}\n{"step": 5}\n',
    "torn": b'{"step": 4, "lo',
    "zeros": b"\0" * 40,
    "no text": b'{"step": 4, "\xff\xfe',
    "no record": b"[]\n17\n{}\n",
}


def _line(step: int) -> bytes:
    return json.dumps({"step": step, "loss": 1.5}).encode() + b"\n"


def _goes_on(path: Path, after: int) -> list[int]:
    file = MetricsFile(path, after)
    file.write({"step": after + 1, "loss": 0.5})
    file.sync()
    file.close()
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("end", ENDS)
def test_resume_discards_only_later_or_incomplete_lines(tmp_path: Path, end: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(_line, (1, 2, 3))) + ENDS[end])
    assert _goes_on(path, after=3) == [1, 2, 3, 4]


def test_missing_final_newline_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(_line, (1, 2, 3)))[:-1])
    assert _goes_on(path, after=3) == [1, 2, 3, 4]


def test_new_run_starts_with_empty_file(tmp_path: Path) -> None:
    assert _goes_on(tmp_path / "metrics.jsonl", after=0) == [1]
    assert _goes_on(tmp_path / "metrics.jsonl", after=0) == [1]


# A limit on file sizes stops a write in the middle, like a full disk.
_FULL_FOR_A_WHILE = """
import resource, signal, sys
from pathlib import Path
from hvdtrain.file_thread import wait_for_writes
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.run_files.ownership import Ownership

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
file = MetricsFile(Path(sys.argv[1]), after=0)
back = int(sys.argv[2])  # from step 15; the file ends in line 10
for step in [*range(1, 16), *range(back + 1, 31)]:
    if step == back + 1 and file.last_step == 15:
        file.roll_back(back)
        assert (file.last_step, file.superseded_steps) == (back, 15 - back)
    if step == 10:
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))
    if step == 21:
        try:
            file.sync()
        except OSError:
            print("not synced")
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    file.write({"step": step, "loss": 0.5})
    wait_for_writes(50)
file.sync()
file.close()
"""


@pytest.mark.parametrize("back", [15, 12, 9])
def test_temporarily_full_disk_leaves_no_gap_or_torn_line(tmp_path: Path, back: int) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", _FULL_FOR_A_WHILE, str(path), str(back)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "not synced\n"
    assert done.stderr.count("cannot be written") == 1
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == list(range(1, 31))
    left = tmp_path / "left_metrics.jsonl"
    moved = (
        [json.loads(line)["step"] for line in left.read_text().splitlines()] if back < 15 else []
    )
    assert moved == list(range(back + 1, 16))


def test_line_reaches_the_file_without_a_later_step(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", after=0)
    file.write({"step": 1})
    poll(lambda: (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n', 60, "the line")


def test_steps_do_not_wait_for_a_file_that_accepts_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    os.mkfifo(path)
    Thread(target=path.write_bytes, args=(b"",), daemon=True).start()  # ends the first reading
    file, steps = MetricsFile(path, after=0), range(1, 1001)

    def write() -> None:
        for step in steps:  # more than a pipe holds
            file.write({"step": step, "text": 100 * "x"})

    writer = Thread(target=write, daemon=True)
    writer.start()
    writer.join(60)
    assert not writer.is_alive()
    with path.open() as reader:
        assert [json.loads(reader.readline())["step"] for _ in steps] == list(steps)
    file.close()


def test_close_reports_nothing_if_no_line_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", after=0)
    file.write({"step": 1})
    wait_for_writes(50)
    monkeypatch.setattr(Ownership, "held", lambda *_: False)  # it is unknown who owns the run
    file.close()
    assert file.failures == 0
