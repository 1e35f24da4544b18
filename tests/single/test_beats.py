"""Heartbeats over real sockets, in real time."""

from __future__ import annotations

import hmac
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from hvdtrain.elastic import heartbeats as beats
from hvdtrain.elastic.failure_detector import BEAT_SECONDS, Silence
from hvdtrain.elastic.heartbeats import HeartbeatReceiver, HeartbeatSender, Kind, Message
from hvdtrain.elastic.rendezvous import DriverAddress

pytestmark = [pytest.mark.alone, pytest.mark.slow]
SECRET = b"secret"


class Ear:
    """A driver's receiver that records the heartbeats of each rank."""

    def __init__(self, *ranks: int, block: float = 0.0) -> None:
        self.beats = HeartbeatReceiver(SECRET)
        self.silent: list[int] = []
        self.returned: list[int] = []
        self.unheard: list[int] = []
        self.deaf: list[bool] = []
        self._block = block
        self.beats.begin(ranks)
        self.port = self.beats.listen(self, 0)

    def on_silence(self, silence: Silence) -> bool:
        self.silent.append(silence.number)
        time.sleep(self._block)
        return True

    def on_return(self, silence: Silence) -> None:
        self.returned.append(silence.number)

    def on_lost_datagrams(self, silence: Silence) -> None:
        self.unheard.append(silence.number)

    def on_common_silence(self, seconds: float) -> None:
        self.deaf.append(seconds > 0)


def test_datagram_ends_with_the_hmac_of_its_content() -> None:
    for secret in (SECRET, b"another", SECRET):
        data = beats.encode(Message(Kind.ACK, 7, 1), secret)
        assert data[-16:] == hmac.digest(secret, data[:-16], "sha256")[:16]


def test_heartbeats_arrive_although_looks_take_longer_than_they_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beats, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(HeartbeatReceiver, "_look", lambda *_: time.sleep(0.01))
    ear = Ear(7)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.settimeout(0.02)
        acknowledged = set[Message | None]()
        for clock in range(500):
            data = beats.encode(Message(Kind.BEAT, 7, clock), SECRET)
            sender.sendto(data, ("127.0.0.1", ear.port))
            with suppress(TimeoutError):
                acknowledged.add(beats.decode(sender.recv(256), SECRET))
            if len(acknowledged) > 20:
                return
    raise AssertionError(f"{len(acknowledged)} heartbeats arrived")


class Beating:
    """A process that sends heartbeats until it is asked to stop."""

    def __init__(self, ear: Ear, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", SECRET.decode())
        self.line = HeartbeatSender(DriverAddress("127.0.0.1", ear.port), number)
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


def test_silent_process_is_detected_promptly_without_false_alarms(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear(0, 1, 2)
    processes = [beating(ear, number) for number in range(3)]
    time.sleep(3)
    assert not ear.silent
    processes[1].on.clear()
    assert 0.5 < _until(lambda: bool(ear.silent), 3) < 1.6
    processes[1].on.set()
    _until(lambda: bool(ear.returned), 2)
    assert ear.silent == ear.returned == [1]
    # It is alive, so a silence that was too long before is not any more.
    processes[1].on.clear()
    assert _until(lambda: len(ear.silent) > 1, 4) > 1.7


def test_driver_that_was_blocked_does_not_report_live_processes(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear(0, 1, 2, 3, block=2.5)
    processes = [beating(ear, number) for number in range(4)]
    time.sleep(2.5)
    processes[0].on.clear()
    _until(lambda: bool(ear.silent), 3)
    time.sleep(4)
    assert ear.silent == [0]


def test_no_process_is_given_up_when_all_fall_silent_at_once(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear(0, 1, 2)
    processes = [beating(ear, number) for number in range(3)]
    time.sleep(2.5)
    for process in processes:
        process.on.clear()
    time.sleep(1.6)
    assert ear.deaf == [True]
    for process in processes:
        process.on.set()
    _until(lambda: ear.deaf == [True, False], 1)
    processes[1].on.clear()
    assert _until(lambda: bool(ear.silent), 3) > 0.5
    assert ear.silent == [1]


def test_process_that_answers_over_tcp_is_not_given_up(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear(0, 1)
    processes = [beating(ear, number) for number in range(2)]
    time.sleep(2.5)
    ear.beats.answered(1)
    processes[1].on.clear()
    time.sleep(0.6)
    ear.beats.answered(1)
    _until(lambda: ear.unheard == [1], 2)
    processes[1].on.set()
    time.sleep(2.5)
    processes[1].on.clear()
    _until(lambda: ear.silent == [1], 3)  # its reports while heartbeats arrived do not count
    assert ear.unheard == [1]


def test_watchdog_reports_with_backoff_while_its_heartbeats_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_RENDEZVOUS_SECRET", SECRET.decode())
    ear, told = Ear(0), [0]
    line = HeartbeatSender(DriverAddress("127.0.0.1", ear.port), 0)
    driver, closed = line._driver, DriverAddress("127.0.0.1", 9)

    def tell() -> None:
        told[0] += 1
        if told[0] == 1:
            raise OSError("not reached")

    threading.Thread(target=line.beat_forever, args=(tell,), daemon=True).start()
    time.sleep(1)
    assert told == [0], "its beats are acknowledged"
    line._driver = closed
    assert _until(lambda: told == [2], 3) < 1.5, "it tries again if it did not reach the driver"
    time.sleep(6)
    assert 5 <= told[0] <= 7, "again, but more and more rarely"
    line._driver = driver
    time.sleep(0.6)
    before = told[0]
    line._driver = closed
    assert _until(lambda: told[0] > before, 2) < 1, "the driver is notified of a new outage at once"


def test_rank_survives_lost_acknowledgements_and_heartbeats(
    beating: Callable[[Ear, int], Beating], monkeypatch: pytest.MonkeyPatch
) -> None:
    ear = Ear(0, 1)
    beating(ear, 1)
    line = HeartbeatSender(DriverAddress("127.0.0.1", ear.port), 0)
    closed = DriverAddress("127.0.0.1", 9)

    def lose(deadline: float) -> bool:
        time.sleep(deadline - time.monotonic())
        return False

    def tell() -> None:
        ear.beats.answered(0)

    threading.Thread(target=line.beat_forever, args=(tell,), daemon=True).start()
    time.sleep(2.5)
    monkeypatch.setattr(line, "_acknowledged", lose)
    time.sleep(5)
    assert not ear.silent and not ear.unheard, "its beats arrive"
    line._driver = closed
    time.sleep(4)
    assert ear.unheard == [0] and not ear.silent


def test_driver_without_any_heartbeat_reports_no_silence() -> None:
    ear = Ear(0, 1)
    time.sleep(2)
    assert not ear.silent and not ear.deaf, "lost datagrams must not count as silence"


def test_forged_and_replayed_datagrams_are_ignored(beating: Callable[[Ear, int], Beating]) -> None:
    genuine = beats.encode(Message(Kind.BEAT, 1, 5), SECRET)
    assert beats.decode(genuine, SECRET) == Message(Kind.BEAT, 1, 5)
    for forged in (genuine[:-1], genuine[:-1] + b"x", b"", b"x" * 29, b"\x09" + genuine[1:]):
        assert beats.decode(forged, SECRET) is None
    assert beats.decode(genuine, b"other") is None
    ear = Ear()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as anybody:
        for _ in range(20):
            anybody.sendto(genuine, ("127.0.0.1", ear.port))
    time.sleep(0.3)
    (tracked,) = ear.beats.detector._tracked.values()
    assert tracked.bound(1, 3) is None, "the same datagram counted again"


def test_end_of_round_notice_is_resent_and_ends_only_its_own_round(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear()
    process, over = beating(ear, 7), threading.Event()
    process.line.listen(over.set)
    process.line.join(3)
    _until(lambda: 7 in ear.beats._addresses, 2)
    ear.beats.announce_over([7], 2)
    time.sleep(3 * BEAT_SECONDS)
    assert not over.is_set(), "round 3 was ended by the end of round 2"
    ear.beats.announce_over([7], 3)
    assert over.wait(0.2)
    over.clear()
    assert over.wait(3 * BEAT_SECONDS), "it was notified once, and datagrams get lost"
    ear.beats.begin([7, 8])
    time.sleep(0.1)
    over.clear()
    assert not over.wait(3 * BEAT_SECONDS)


def test_rank_with_a_dead_watchdog_is_not_reported_silent(
    beating: Callable[[Ear, int], Beating],
) -> None:
    ear = Ear(0, 1)
    process, witness = beating(ear, 0), beating(ear, 1)
    time.sleep(2.5)
    with subprocess.Popen(["sleep", "60"]) as watchdog:
        process.line.mute_after(watchdog.pid)
        process.on.clear()
        watchdog.kill()
    time.sleep(2)
    assert not ear.silent and witness.on.is_set()
