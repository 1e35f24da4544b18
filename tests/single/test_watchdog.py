"""The watchdog beside a real process: whom it kills, and whom it lets live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

# A rank whose watchdog takes it for hung after 2 s; it prints a line before each thing it does.
RANK = """
import subprocess, sys, time
from functools import partial
from pathlib import Path
from hvdtrain.elastic import watchdog
from hvdtrain.elastic.kept_watchdog import KeptWatchdog
from hvdtrain.runtime.heartbeat import OWN, Activity

def work():
    OWN.beat(Activity.WORKING)
    print("works", flush=True)

kept = KeptWatchdog(partial(watchdog.start, OWN, 2.0, "", 0, None))
kept.write_to(Path(sys.argv[1]))
"""
SPIN = "import time; end = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts a process that runs `RANK` and these lines; killed at the end."""
    started = []

    def start(lines: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RANK + lines, str(tmp_path / "stacks")]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()  # it works
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def _watchdog(rank: subprocess.Popen[str]) -> psutil.Process:
    children = psutil.Process(rank.pid).children()
    return next(c for c in children if "hvdtrain.elastic.watchdog" in c.cmdline())


def test_a_rank_that_waits_for_a_busy_child_is_killed(
    rank: Callable[[str], subprocess.Popen[str]],
) -> None:
    # Through a shell, as compilers are started: the work is done by a grandchild.
    busy = rank(f'work()\nsubprocess.run(["sh", "-c", f"{{sys.executable}} -c \'{SPIN}\'; true"])')
    assert busy.wait(20) == 0


def test_a_rank_that_waits_for_an_idle_child_lives(
    rank: Callable[[str], subprocess.Popen[str]],
) -> None:
    began = time.monotonic()
    idle = rank('work()\nsubprocess.run(["sleep", "12"], stdout=subprocess.DEVNULL)')
    assert idle.wait(20) == -signal.SIGKILL
    assert time.monotonic() - began < 11


def test_a_suspended_job_is_killed_when_it_goes_on(
    rank: Callable[[str], subprocess.Popen[str]],
) -> None:
    healthy = rank("for _ in range(4):\n    work()\n    time.sleep(1.6)")
    assert healthy.stdout is not None
    healthy.stdout.readline()
    time.sleep(1.2)  # its watchdog has seen it idle
    pids = [_watchdog(healthy).pid, healthy.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)  # its watchdog looks before the rank has done anything
    assert healthy.wait(20) == 0


def test_a_rank_is_not_watched_after_its_watchdog_died(
    rank: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    hung = rank("work()\ntime.sleep(60)")
    _watchdog(hung).kill()
    assert hung.wait(20) == -signal.SIGKILL
    assert "no progress, no work for 2 s, while WORKING" in (tmp_path / "stacks").read_text()
