"""A process exits after its run, even if user code left threads or processes behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import runs

pytestmark = pytest.mark.slow

FORKED = """
import faulthandler, os, signal, sys, time
from hvdtrain.elastic.watchdog import KeptWatchdog
from hvdtrain.runtime.signals import StopFlag, handle, leave_on_sigterm
import subprocess
kept = KeptWatchdog(lambda: subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE))
kept.write_to({stacks!r})
{install}
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
{before}
os.kill(child, signal.{signal})
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os.kill(kept._process.pid, signal.SIGKILL)
"""
LEFT = """
import multiprocessing, threading, time
from hvdtrain.train import end_process
context = multiprocessing.get_context("fork")
{left}
end_process(3, seconds=1.0)
"""


@pytest.mark.parametrize(
    ("install", "number", "before"),
    [
        ("StopFlag().install()", signal.SIGTERM, ""),
        ("stop = StopFlag(); stop.install(); stop.ignore()", signal.SIGTERM, ""),
        ("leave_on_sigterm()", signal.SIGTERM, ""),
        ("handle(signal.SIGINT, print)", signal.SIGINT, ""),
        ("", signal.SIGQUIT, "time.sleep(1)"),
    ],
)
def test_forked_child_is_ended_by_signals_its_rank_handles(
    install: str, number: signal.Signals, before: str, tmp_path: Path
) -> None:
    stacks = str(tmp_path / "stacks")
    code = FORKED.format(stacks=stacks, install=install, signal=number.name, before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == [str(-number)], done


# torch's handler raises an error in the main thread when a data worker ends by itself.
ABORTED = """
import os, signal, time
from hvdtrain.errors import UserError
from hvdtrain.runtime.failure import abort_all_ranks
from hvdtrain.runtime.mesh import Topology

def ended(number, frame):
    raise RuntimeError("DataLoader worker exited unexpectedly")

signal.signal(signal.SIGCHLD, ended)
if os.fork() == 0:
    time.sleep(0.1)
    os._exit(1)
abort_all_ranks(UserError("the reason"), Topology(0, 1, 0, 1, ("host",)))
"""


def test_end_by_an_error_is_not_disturbed_by_a_worker_that_ends() -> None:
    argv = [sys.executable, "-c", ABORTED]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done
    assert done.stderr.splitlines()[-1] == "hvdtrain: error: rank 0 on host: the reason"


def test_run_ends_despite_forked_processes_left_by_its_dataset(tmp_path: Path) -> None:
    flags = ["--task", "tests.support.tasks:Forking", "--run.root", str(tmp_path)]
    done = runs.run(tmp_path, [*flags, "--telemetry.port", "0"], timeout=40)
    assert done.returncode == 0, done
    assert "its process still waits" not in done.stderr, done


@pytest.mark.parametrize(
    ("left", "named"),
    [
        ("threading.Thread(target=time.sleep, args=(60,), name='mine').start()", "thread 'mine' ("),
        (
            "context.Process(target=time.sleep, args=(60,), name='mine').start()",
            "process 'mine' (pid ",
        ),
        ("import atexit; atexit.register(lambda: time.sleep(60))", "line "),
    ],
)
def test_finished_process_exits_and_names_what_blocks_its_exit(left: str, named: str) -> None:
    code = LEFT.format(left=left)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 3, done
    assert "the run is done, but its process still waits after 1 s for " in done.stderr, done
    assert named in done.stderr, done
