"""The watchdog of a real process: which ranks it kills, and which it tolerates."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvdtrain.elastic import watchdog
from hvdtrain.runtime.work import _work_of_thread
from tests.support.job import poll

pytestmark = pytest.mark.slow

StartRank = Callable[..., subprocess.Popen[str]]

# A rank whose watchdog considers it hung after 2 s; it prints a line before each action.
RANK = """
import os, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import Thread
from hvdtrain.elastic import watchdog
from hvdtrain.elastic.watchdog import KeptWatchdog
from hvdtrain.runtime.heartbeat import HEARTBEAT, Activity

def work():
    HEARTBEAT.beat(Activity.WORKING)
    print("works", flush=True)

def hash_until(end):  # without the interpreter's lock
    while time.monotonic() < end:
        sha256(bytes(1 << 22))

kept = KeptWatchdog(partial(watchdog.start, HEARTBEAT, HANG_SECONDS, "", 0))
kept.write_to(Path(sys.argv[1]))
"""
SPIN = "import time; end = time.monotonic() + 5\\nwhile time.monotonic() < end: pass"
# Waits 0.1 s for each read of a checkpoint, in total longer than a rank may be busy without
# progress.
SLOW_DISK = """
import io
from hvdtrain.checkpoint import tensor_file

class SlowFile(io.FileIO):
    def readinto(self, buffer):
        time.sleep(0.1)
        return super().readinto(buffer[:64])

tensor_file.open = lambda path, mode, buffering: SlowFile(path)
work()
with ThreadPoolExecutor(1) as pool:
    pool.submit(tensor_file.read_file, Path(sys.argv[1]).with_name("file")).result()
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[StartRank]:
    """Start a process that runs `RANK` and these lines; it is killed at the end."""
    started = []

    def start(lines: str, hang_seconds: float = 2.0) -> subprocess.Popen[str]:
        code = RANK.replace("HANG_SECONDS", str(hang_seconds)) + lines
        command = [sys.executable, "-c", code, str(tmp_path / "stacks")]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
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


def test_rank_waiting_for_a_busy_child_is_not_killed(
    rank: StartRank,
) -> None:
    # Through a shell, as compilers are started: a grandchild does the work.
    busy = rank(f'work()\nsubprocess.run(["sh", "-c", f"{{sys.executable}} -c \'{SPIN}\'; true"])')
    assert busy.wait(20) == 0


def test_rank_waiting_for_the_reader_of_its_output_is_not_killed(
    rank: StartRank, tmp_path: Path
) -> None:
    blocked = rank('work()\nprint("x" * 1_000_000, flush=True)', hang_seconds=1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        blocked.wait(5)
    assert (tmp_path / "stacks").read_text().count("its output is not read") == 1
    assert blocked.stdout is not None
    assert blocked.stdout.read().count("x") == 1_000_000
    assert blocked.wait(20) == 0


def test_rank_waiting_for_an_idle_child_is_killed(
    rank: StartRank,
) -> None:
    began = time.monotonic()
    idle = rank('work()\nsubprocess.run(["sleep", "12"], stdout=subprocess.DEVNULL)')
    assert idle.wait(20) == -signal.SIGKILL
    assert time.monotonic() - began < 11


def test_cpu_time_counts_as_work_on_kernels_without_io_accounting(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("7 (python) R " + " ".join(["0"] * 10 + ["30", "12"]) + " 0 0")
    # No file "io", as without CONFIG_TASK_IO_ACCOUNTING.
    assert _work_of_thread(tmp_path) == 42


def test_suspended_job_is_not_killed_when_it_continues(
    rank: StartRank,
) -> None:
    healthy = rank("for _ in range(4):\n    work()\n    time.sleep(1.6)")
    assert healthy.stdout is not None
    healthy.stdout.readline()
    time.sleep(1.2)  # its watchdog has detected that it is idle
    pids = [_watchdog(healthy).pid, healthy.pid]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)  # its watchdog checks before the rank has done anything
    assert healthy.wait(20) == 0


def test_stuck_rank_is_named_with_its_position(rank: StartRank, tmp_path: Path) -> None:
    lines = (
        "def report():\n"
        "    while not HEARTBEAT.stuck_seconds: time.sleep(0.1)\n"
        "    print('stuck', flush=True)\n"
        "def wait_for_lock():\n"
        "    time.sleep(60)\n"
        "Thread(target=report, daemon=True).start()\n"
        "work()\n"
        "wait_for_lock()"
    )
    stuck = rank(lines, hang_seconds=6.0)
    assert stuck.wait(60) == -signal.SIGKILL
    assert stuck.stdout is not None and stuck.stderr is not None
    assert stuck.stdout.read() == "stuck\n"
    lines = stuck.stderr.read()
    assert lines.count("hvdtrain: warning: rank 0 on ") == 1, lines
    assert "no progress, no work for 3 s (killed after 6 s), while WORKING" in lines
    assert "it is in wait_for_lock (" in lines
    reports = (tmp_path / "stacks").read_text()
    assert reports.index("(killed after 6 s)") < reports.index("killed by its watchdog")


def test_stuck_rank_without_a_file_for_its_stacks_is_not_ended_early(
    rank: StartRank, tmp_path: Path
) -> None:
    (tmp_path / "stacks").mkdir()  # no handler of SIGQUIT
    assert rank("work()\ntime.sleep(60)", hang_seconds=4.0).wait(60) == -signal.SIGKILL


def test_position_of_the_main_thread_is_read_from_the_fault_handler(tmp_path: Path) -> None:
    began, end = threading.Event(), threading.Event()

    def other() -> None:
        began.set()
        end.wait()

    thread = threading.Thread(target=other)
    thread.start()
    began.wait()
    with open(tmp_path / "stacks", "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    end.set()
    thread.join()
    name = "test_position_of_the_main_thread_is_read_from_the_fault_handler"
    [position] = watchdog._positions((tmp_path / "stacks").read_text())
    assert position.startswith(f"{name} ({__file__}:")


def test_rank_is_watched_after_its_watchdog_dies(rank: StartRank, tmp_path: Path) -> None:
    hung = rank("work()\ntime.sleep(60)")
    _watchdog(hung).kill()
    assert hung.wait(20) == -signal.SIGKILL
    assert "no progress, no work for 2 s, while WORKING" in (tmp_path / "stacks").read_text()


def test_reason_is_logged_when_a_watchdog_dies_repeatedly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "_RESTART_SECONDS", (0.01, 60.0))
    dies = [sys.executable, "-c", "raise SystemExit('a module is missing')"]
    watchdog.KeptWatchdog(lambda: subprocess.Popen(dies, stderr=subprocess.PIPE))
    poll(lambda: "a module is missing" in caplog.text, 60, "the reason")
    assert "ended 3 times" in caplog.text and caplog.text.count("a module") == 1


def test_watchdog_survives_signals_to_the_group_of_its_rank(rank: StartRank) -> None:
    lines = (
        "from hvdtrain.runtime.signals import ASKING\n"
        "for number in ASKING: kept._process.send_signal(number)\n"  # while it starts
        "kept._process.stdin.close()\n"
        "assert kept._process.wait() == 0"
    )
    assert rank(lines).wait(20) == 0


def test_rank_waiting_for_its_computing_threads_is_not_killed(rank: StartRank) -> None:
    lines = "with ThreadPoolExecutor(2) as pool: pool.submit(hash_until, time.monotonic() + 5)"
    assert rank(f"work()\n{lines}").wait(20) == 0


def test_slow_read_of_a_checkpoint_counts_as_progress(rank: StartRank, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(130 * 64))  # 13 s; busy without progress: 10 s
    assert rank(SLOW_DISK, hang_seconds=1.0).wait(30) == 0


def test_horovod_polling_threads_do_not_count_as_work(rank: StartRank, tmp_path: Path) -> None:
    start = (
        "from hvdtrain.runtime.init import initialize\n"
        "initialize()\n"
        "from hvdtrain.runtime.work import HOROVOD, threads_named\n"
        "names = [p.read_text().strip() for p in Path('/proc/self/task').glob('*/comm')]\n"
        "assert HOROVOD in names and Path('/proc/self/comm').read_text().strip() != HOROVOD\n"
        "with threads_named(HOROVOD):\n"
        "    Thread(target=hash_until, args=[time.monotonic() + 60], name=HOROVOD).start()\n"
        "work()\n"
        "time.sleep(60)"
    )
    assert rank(start).wait(30) == -signal.SIGKILL
    assert "no progress, no work for 2 s, while WORKING" in (tmp_path / "stacks").read_text()


def test_process_lives_while_its_threads_end() -> None:
    """SIGKILL ends the threads of a rank one by one, and one may wait for a dead disk."""
    code = "import threading\nwhile True: threading.Thread(target=int).start()"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert all(watchdog._lives(child.pid) for _ in range(20_000))
    finally:
        child.kill()
        child.wait()
    assert not watchdog._lives(child.pid)
