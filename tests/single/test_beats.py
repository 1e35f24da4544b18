"""Signs of life over real sockets, with real seconds."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable

import pytest

from hvdtrain.elastic import beats
from hvdtrain.elastic.beats import BEAT_SECONDS, Beats, Kind, Line, Message, Silence

pytestmark = pytest.mark.alone
SECRET = b"secret"


class Ear:
    """A driver's end that notes what it hears of whom."""

    def __init__(self, block: float = 0.0) -> None:
        self.beats = Beats(0, SECRET)
        self.silent: list[int] = []
        self.returned: list[int] = []
        self._block = block
        self.beats.listen(self._on_silence, lambda silence: self.returned.append(silence.number))

    def _on_silence(self, silence: Silence) -> bool:
        self.silent.append(silence.number)
        time.sleep(self._block)
        return True


class Beating:
    """A process that beats until it is told to stop."""

    def __init__(self, ear: Ear, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", SECRET.decode())
        self.line = Line("127.0.0.1", ear.beats.port, number)
        self.on = threading.Event()
        self.on.set()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.on.wait()
            self.line._send(Kind.BEAT)
            time.sleep(BEAT_SECONDS)


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ear, int], Beating]:
    return lambda ear, number: Beating(ear, number, monkeypatch)


def _until(condition: Callable[[], bool], seconds: float) -> float:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + seconds
        time.sleep(0.01)
    return time.monotonic() - began


def test_a_process_that_fell_silent_is_noticed_late_or_one_that_lives_is_taken_for_it(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear()
    processes = [beating(ear, number) for number in range(3)]
    time.sleep(3)
    assert not ear.silent
    processes[1].on.clear()
    assert 0.5 < _until(lambda: bool(ear.silent), 3) < 1.6
    processes[1].on.set()
    _until(lambda: bool(ear.returned), 2)
    assert ear.silent == ear.returned == [1]
    # It lives: what was too long once is not any more.
    processes[1].on.clear()
    assert _until(lambda: len(ear.silent) > 1, 4) > 1.7


def test_a_driver_that_did_not_listen_takes_all_for_silent(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear(block=2.5)
    processes = [beating(ear, number) for number in range(4)]
    time.sleep(2.5)
    processes[0].on.clear()
    _until(lambda: bool(ear.silent), 3)
    time.sleep(4)
    assert ear.silent == [0]


def test_a_driver_that_hears_nothing_from_the_start_says_something() -> None:
    ear = Ear()
    time.sleep(2)
    assert not ear.silent, "where datagrams do not get through all is as without them"


def test_a_forged_or_repeated_datagram_counts(beating: Callable[[Ear, int], Beating]) -> None:
    genuine = beats.encode(Message(Kind.BEAT, 1, 5), SECRET)
    assert beats.decode(genuine, SECRET) == Message(Kind.BEAT, 1, 5)
    for forged in (genuine[:-1], genuine[:-1] + b"x", b"", b"x" * 29, b"\x09" + genuine[1:]):
        assert beats.decode(forged, SECRET) is None
    assert beats.decode(genuine, b"other") is None
    ear = Ear()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
        for _ in range(20):
            anybody.sendto(genuine, ("127.0.0.1", ear.beats.port))
    time.sleep(0.3)
    (heard,) = ear.beats._heard.values()
    assert heard.arrivals.bound(1, 3) is None, "the same datagram counted again"


def test_a_round_that_is_over_goes_on_or_ends_another(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear()
    process, over = beating(ear, 7), threading.Event()
    process.line.listen(over.set)
    process.line.join(3)
    _until(lambda: 7 in ear.beats._heard, 2)
    ear.beats.tell([7], 2)
    time.sleep(3 * BEAT_SECONDS)
    assert not over.is_set(), "round 3 was ended by the end of round 2"
    ear.beats.tell([7], 3)
    assert over.wait(0.2)
    over.clear()
    assert over.wait(3 * BEAT_SECONDS), "it was told once, and datagrams get lost"
    ear.beats.begin(2)
    time.sleep(0.1)
    over.clear()
    assert not over.wait(3 * BEAT_SECONDS)


def test_a_rank_whose_watchdog_died_is_taken_for_gone(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear()
    process = beating(ear, 0)
    time.sleep(2.5)
    with subprocess.Popen(["sleep", "60"]) as watchdog:
        process.line.mute_after(watchdog.pid)
        process.on.clear()
        watchdog.kill()
    time.sleep(2)
    assert not ear.silent
