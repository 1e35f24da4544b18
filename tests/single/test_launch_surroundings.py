"""A launch whose reader, start directory or run directory is disturbed while it trains."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.agent.agent import DRIVER_NAME
from hvdtrain.runtime import queued_output
from tests.support import warm
from tests.support.job import poll, running_children
from tests.support.runs import environment, metrics

LAUNCH = [sys.executable, "-m", "hvdtrain.cli", "launch", "--slots", "2"]
TRAIN = [
    *("--task", "tests.support.tasks:Paced", "--train.duration", "100000"),
    *("--telemetry.port", "0"),
]
SECONDS = 90


@contextmanager
def stopped_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that takes no more bytes: (end to read from, end to write to)."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, bytes(4096))
    except BlockingIOError:
        os.set_blocking(writer, True)
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


class Launch:
    """`hvdtrain launch` of 2 ranks on this host.

    Args:
        output: descriptor for its output.
        start: working directory.
    """

    def __init__(self, root: Path, output: int, start: Path | None = None) -> None:
        self.run = root / "a"
        train = [warm.prefix(2), sys.executable, "-m", "hvdtrain.train", *TRAIN]
        argv = [*LAUNCH, "--", *train, "--run.root", str(root), "--run.id", "a"]
        self._process = psutil.Popen(
            argv,
            env=environment({"HVDTRAIN_TEST_PACE": "0.02"}),
            cwd=start,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def wait_for_step(self, size: int = 2, after: int = 3) -> int:
        """Wait for a step of `size` ranks after another step; return its number."""

        def last() -> dict[str, float]:
            lines = metrics(self.run)
            return lines[-1] if lines else {"world_size": 0, "step": 0}

        what = f"a step of {size} ranks after step {after}"
        poll(lambda: last()["world_size"] == size and last()["step"] > after, SECONDS, what)
        assert self._process.poll() is None
        return int(last()["step"])

    def named(self, name: str) -> list[psutil.Process]:
        return running_children(lambda one: one.name() == name, self._process.pid)

    def replace_rank(self) -> None:
        """Kill a rank, and wait until another one trains in its place."""
        step = self.wait_for_step()
        self.named("hvdtrain-guard")[-1].children()[0].kill()
        self.wait_for_step(2, self.wait_for_step(1, step))

    def kill(self) -> None:
        """Kill all its processes."""
        every = [self._process, *self._process.children(recursive=True)]
        for kill in (psutil.Process.suspend, psutil.Process.kill):
            for one in every:
                with suppress(psutil.NoSuchProcess):
                    kill(one)
        self._process.wait()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    with ExitStack() as stack:

        def start(*arguments: Any) -> Launch:
            started = Launch(tmp_path, *arguments)
            stack.callback(started.kill)
            return started

        yield start


@pytest.mark.parametrize("reader", ["gone", "stopped", "full"])
def test_rank_is_replaced_although_no_output_can_be_written(
    reader: str, launch: Callable[..., Launch]
) -> None:
    with ExitStack() as stack:
        if reader == "stopped":
            output = stack.enter_context(stopped_pipe())[1]
        elif reader == "gone":
            readable, output = os.pipe()
            os.close(readable)
        else:
            output = os.open("/dev/full", os.O_WRONLY)
        launch(output).replace_rank()


@pytest.mark.parametrize("change", ["start directory deleted", "run readable by the group"])
def test_driver_and_rank_are_replaced_after_a_change(
    change: str, launch: Callable[..., Launch], tmp_path: Path
) -> None:
    start = tmp_path / "start"
    start.mkdir()
    with open(tmp_path / "output", "wb") as output:
        job = launch(output.fileno(), start)
    job.wait_for_step()
    if change == "start directory deleted":
        start.rmdir()
    else:
        subprocess.run(["chmod", "-R", "g+rX", str(job.run)], check=True)
    (driver,) = job.named(DRIVER_NAME)
    driver.kill()
    poll(lambda: driver not in (found := job.named(DRIVER_NAME)) and found, SECONDS, "a driver")
    job.replace_rank()


def test_full_queue_drops_output_and_later_says_how_much() -> None:
    script = "import sys, time\nfrom hvdtrain.runtime.queued_output import queued\n"
    script += "with queued():\n  for _ in range(400): sys.stdout.write('x' * 99_999 + chr(10))\n"
    script += "  sys.stdin.read()\n  sys.stdout.write('last\\n')\n"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout
        first = process.stdout.readline()
        process.stdin.close()
        lines = [first, *process.stdout]
    whole = sum(len(line) == 100_000 for line in lines)
    assert queued_output._MOST_BYTES / 100_000 - 1 < whole < 400
    assert lines[-1] == b"last\n" or b"dropped" in lines[-1], lines[-1]
    assert sum(int(x.split()[1]) for x in lines if b"dropped" in x) == (400 - whole) * 100_000
    assert process.returncode == 0


def test_process_ends_although_nobody_reads_its_output() -> None:
    script = "from hvdtrain.runtime.queued_output import queued, say\n"
    script += "with queued(): say('one')\nsay('two')\n"
    with stopped_pipe() as (_, output):
        done = subprocess.run([sys.executable, "-c", script], stderr=output, timeout=SECONDS)
    assert done.returncode == 0


def test_output_after_a_failed_write_reports_what_is_missing() -> None:
    written: list[bytes] = []
    full = [True]

    def write(content: bytes) -> int:
        if full[0]:
            raise OSError(28, "No space left on device")
        written.append(content)
        return len(content)

    destination = queued_output.Destination(write)
    put_and_wait(destination.put, b"first\n")
    full[0] = False
    put_and_wait(destination.put, b"second\n")
    notice, second = b"".join(written).splitlines()
    assert b"6 bytes of output were dropped" in notice and second == b"second"


def put_and_wait(put: Callable[[bytes], None], content: bytes) -> None:
    put(content)
    assert queued_output.flush()
