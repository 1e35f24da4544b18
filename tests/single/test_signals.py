"""Signals that ask a process to end: which ones, pairs, and what a script or nohup has set."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from hvdtrain.runtime import signals
from hvdtrain.runtime.allocation import BORROWED
from hvdtrain.supervise.supervisor import Stop, StopRequests
from tests.support.runs import environment

FLAG = """
import os, signal, sys, time
from hvdtrain.runtime.signals import StopFlag
number = int(sys.argv[1])
stop = StopFlag()
{before}
stop.install()
os.kill(os.getpid(), number)
os.kill(os.getpid(), number)
print("raised" if stop.raised else "not raised", flush=True)
time.sleep(1.1)
os.kill(os.getpid(), number)
print("survived")
"""


def _flag(number: int, before: str = "") -> tuple[int, list[str]]:
    """Send a pair to a process with a StopFlag, and a third signal; return code and output."""
    code = FLAG.format(before=before)
    done = subprocess.run(
        [sys.executable, "-c", code, str(int(number))],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_pair_of_signals_asks_a_rank_once_and_a_third_ends_it(name: str) -> None:
    number = signal.Signals[name]
    assert _flag(number) == (128 + number, ["raised"])


def test_rank_keeps_signals_that_nohup_or_its_script_has_set() -> None:
    ignored = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    assert _flag(signal.SIGHUP, ignored) == (0, ["not raised", "survived"])
    own = "signal.signal(signal.SIGUSR2, lambda *_: print('own'))"
    assert _flag(signal.SIGUSR2, own) == (0, ["own", "own", "not raised", "own", "survived"])
    dumps = "import faulthandler; faulthandler.register(signal.SIGUSR2, open('/dev/null', 'w'))"
    assert _flag(signal.SIGUSR2, dumps) == (0, ["not raised", "survived"])


def test_signals_do_not_stop_a_rank_on_a_lent_host() -> None:
    lent = f"os.environ[{BORROWED!r}] = '0'"
    assert _flag(signal.SIGTERM, lent) == (0, ["not raised", "survived"])


def test_launcher_does_not_handle_sighup_under_nohup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {signal.SIGHUP, signal.SIGUSR2} < {*signals.requests()}
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    assert signal.SIGHUP not in signals.requests() and signal.SIGINT in signals.requests()


def test_pair_of_signals_asks_a_supervisor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("hvdtrain.supervise.supervisor.time.monotonic", lambda: now)
    requests = StopRequests()
    assert not requests
    for number in (signal.SIGTERM, signal.SIGUSR1):
        requests._note(number, None)
    requests.tick()
    assert requests
    now += 1.5
    requests._note(signal.SIGUSR1, None)
    with pytest.raises(Stop) as stop:
        requests.tick()
    assert stop.value.code == 128 + signal.SIGUSR1


def test_interrupt_ends_a_supervisor_at_once() -> None:
    requests = StopRequests()
    requests._note(signal.SIGINT, None)
    with pytest.raises(Stop) as stop:
        requests.tick()
    assert stop.value.code == 130
