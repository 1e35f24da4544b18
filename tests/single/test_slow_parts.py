"""Ranks that wait for a rank whose part of the start-up, such as reading a checkpoint, is slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.job import Finished
from tests.support.runs import start

# Horovod ends a run after 3 s without a rank; rank 1 has nothing to do in its part. The watchdogs
# must not end a rank (elastic.hang_seconds 0), and their CPU time does not count as the rank's
# work.
RANKS = """
import logging, os, sys, threading, time
from functools import partial
from hvdtrain.elastic import watchdog
from hvdtrain.elastic.watchdog import KeptWatchdog
from hvdtrain.runtime import collectives
from hvdtrain.runtime.heartbeat import HEARTBEAT
from hvdtrain.runtime.init import initialize

collectives._SAY_SECONDS = 1.0
logging.basicConfig(level=logging.INFO)
kept = KeptWatchdog(partial(watchdog.start, HEARTBEAT, 0.0, "", 0))
rank = initialize().rank

def hang():
    threading.Event().wait(40)

def work():  # slowly, and without a heartbeat: 15 % of a core
    for _ in range(60):
        end = time.thread_time() + 0.015
        while time.thread_time() < end:
            pass
        time.sleep(0.085)

def read():  # slowly, and without a heartbeat: 1.5 MB/s
    with open(sys.argv[1], "rb", buffering=0) as file:
        while file.read(150_000):
            time.sleep(0.1)

def advance():
    for _ in range(12):
        HEARTBEAT.advance()
        time.sleep(0.5)

def wait_while_judged():  # longer than Horovod waits; its watchdog would let it wait longer
    HEARTBEAT.judged = True
    time.sleep(6)

began = time.monotonic()
try:
    collectives.on_all_ranks("checkpoint", PART if rank == 0 else int)
    print(f"rank {rank} continues", flush=True)
except collectives.RankLostError:
    print(f"rank {rank} waited {time.monotonic() - began:.0f} s", flush=True)
    time.sleep(1)  # its line is forwarded before the launcher detects an end
    os._exit(1)
"""


def _ranks(directory: Path, part: str) -> Finished:
    script, data = directory / "ranks.py", directory / "data"
    script.write_text(RANKS.replace("PART", part))
    data.write_bytes(bytes(60 * 150_000))
    seconds = {"CHECK": "1", "SHUTDOWN": "3"}
    env = {f"HOROVOD_STALL_{name}_TIME_SECONDS": value for name, value in seconds.items()}
    command = [warm.python(2), str(script)]
    return start(directory / "output", [str(data)], "gloo:2", env, command).wait(90)


def test_wait_for_a_hanging_rank_is_bounded(tmp_path: Path) -> None:
    done = _ranks(tmp_path, "hang")
    waited = re.search(r"rank 1 waited (\d+) s", done.stdout)
    assert waited and 3 <= int(waited[1]) <= 20, done
    assert done.returncode != 0 and done.seconds < 35, done
    assert "checkpoint: no progress; other ranks may wait for this one" in done.stderr, done


@pytest.mark.soak
def test_ranks_wait_for_a_rank_that_computes_slowly(tmp_path: Path) -> None:
    done = _ranks(tmp_path, "work")
    assert done.stdout.count("continues") == 2, done
    assert "checkpoint: waiting for other ranks" in done.stderr, done
    assert "checkpoint: still working" in done.stderr, done


def test_ranks_wait_for_a_rank_that_reads_slowly(tmp_path: Path) -> None:
    assert _ranks(tmp_path, "read").stdout.count("continues") == 2


def test_ranks_wait_for_a_rank_that_only_reports_progress(tmp_path: Path) -> None:
    assert _ranks(tmp_path, "advance").stdout.count("continues") == 2


def test_ranks_wait_for_an_idle_rank_if_its_watchdog_permits(tmp_path: Path) -> None:
    assert _ranks(tmp_path, "wait_while_judged").stdout.count("continues") == 2
