"""Heartbeats of processes and the driver's end-of-generation message, as UDP datagrams.

    watchdog -> driver   BEAT number, its clock in ns, the rank's port; four times a second
    watchdog -> driver   UNACKNOWLEDGED, in place of BEAT and with the same content: no
                         acknowledgements arrive, and the driver was notified over TCP
    driver   -> watchdog ACK number, the same clock: the heartbeat has arrived
    either   -> driver   MUTE number, its clock in ns, the rank's port; no more heartbeats follow,
                         because the rank or its watchdog has ended
    driver   -> rank     OVER number, generation; again in response to each heartbeat

The driver listens on the UDP port with the same number as the TCP port of its HTTP server. A
datagram ends with 16 bytes of HMAC-SHA256 keyed with the job's secret. The driver accepts it only
if its clock is later than the clock of the last one. Heartbeats only speed up the detection of
failures: without them, the agent of the rank's host falls silent and Gloo's timeout passes. A
watchdog whose heartbeats are not acknowledged notifies the driver over TCP that its rank is alive,
repeatedly until they are. Heartbeats of such a watchdog may stop at any time, so silence is not
evidence.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from enum import IntEnum
from functools import cache
from typing import NamedTuple, Protocol

from hvdtrain.elastic.failure_detector import BEAT_SECONDS, THIS_HOST, FailureDetector, Silence
from hvdtrain.elastic.rendezvous import DriverAddress
from hvdtrain.runtime import environment
from hvdtrain.runtime.machine import source_towards

_LOOK_SECONDS = 0.05
_UNACKNOWLEDGED_BEATS = 2  # in a row: datagrams get lost one by one, too
# Seconds from the end of one TCP message to the next. If a heartbeat arrives just before the first
# message, that message proves nothing: the second must arrive before the driver gives the rank up
# (1 s). Later messages may be rare: without UDP a thousand ranks send them until they end.
_NOTIFY_SECONDS, _LONGEST_NOTIFY_SECONDS = 0.5, 4.0
_SECRET = "HOROVOD_RENDEZVOUS_SECRET"
_BUFFER_BYTES = 4 << 20
_BODY = struct.Struct("!BIQH")
_DIGEST_BYTES = 16
_MUTE_TIMES, _MUTE_SECONDS = 3, 0.05  # datagrams get lost


def job_secret() -> bytes:
    """Return the secret that the ranks of this process's elastic job share."""
    return os.environ.get(_SECRET, "").encode()


class Kind(IntEnum):
    """See the top of this file."""

    BEAT = 1
    MUTE = 2
    OVER = 3
    ACK = 4
    UNACKNOWLEDGED = 5


class Message(NamedTuple):
    """A datagram's content.

    `value`: the sender's clock in ns, or a generation; `port`: where the rank listens, or 0.
    """

    kind: Kind
    number: int
    value: int
    port: int = 0


@cache
def _begun(secret: bytes) -> hmac.HMAC:
    return hmac.new(secret, digestmod="sha256")


def _digest(secret: bytes, body: bytes) -> bytes:
    digest = _begun(secret).copy()  # to begin with a key takes longer than all the rest
    digest.update(body)
    return digest.digest()[:_DIGEST_BYTES]


def encode(message: Message, secret: bytes) -> bytes:
    body = _BODY.pack(*message)
    return body + _digest(secret, body)


def decode(data: bytes, secret: bytes) -> Message | None:
    """Return the message; None if the datagram is not from this job."""
    body, digest = data[: _BODY.size], data[_BODY.size :]
    if len(body) < _BODY.size or not hmac.compare_digest(digest, _digest(secret, body)):
        return None
    kind, number, value, port = _BODY.unpack(body)
    try:
        return Message(Kind(kind), number, value, port)
    except ValueError:
        return None


class HeartbeatSender:
    """A process's end of the heartbeats: its watchdog sends, the rank listens on another socket.

    Args:
        driver: where heartbeats are sent; they follow it.
        number: of the process.
        rank_port: where the rank listens; None: on this socket.

    Attributes:
        port: where the rank listens.

    Raises:
        OSError: the driver's address is not an address.
    """

    def __init__(self, driver: DriverAddress, number: int, rank_port: int | None = None) -> None:
        self.number = number
        self._secret = job_secret()
        self._driver = driver
        found = socket.getaddrinfo(*driver.place, type=socket.SOCK_DGRAM)
        family, kind, protocol = found[0][:3]
        # Not connected: a driver with several addresses may answer from another one.
        self._socket = socket.socket(family, kind, protocol)
        self._socket.bind(("", 0))
        self.port: int = rank_port or self._socket.getsockname()[1]
        self._generation = -1
        self._lock = threading.Lock()
        self._notified = False  # driver notified over TCP since the last acknowledged heartbeat
        self._notify_at, self._pause = 0.0, _NOTIFY_SECONDS

    def beat_forever(self, notify: Callable[[], object]) -> None:
        """Send heartbeats; runs in the watchdog.

        Args:
            notify: notifies the driver over TCP that the rank is alive; called in a thread of its
                own, every few seconds while heartbeats are not acknowledged. Raises OSError if
                the driver could not be notified.
        """
        unacknowledged, notifying = 0, threading.Thread()
        while True:
            self._send(Kind.UNACKNOWLEDGED if self._notified else Kind.BEAT)
            if self._acknowledged(time.monotonic() + BEAT_SECONDS):
                unacknowledged, self._notified = 0, False
                self._notify_at, self._pause = 0.0, _NOTIFY_SECONDS
                continue
            unacknowledged += 1
            due = unacknowledged >= _UNACKNOWLEDGED_BEATS and time.monotonic() >= self._notify_at
            if due and not notifying.is_alive():
                notifying = threading.Thread(target=self._notify, args=(notify,), daemon=True)
                notifying.start()

    def _acknowledged(self, deadline: float) -> bool:
        """Read until the deadline; return whether a heartbeat was acknowledged meanwhile."""
        acknowledged = False
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with suppress(OSError):
                message = decode(self._socket.recv(256), self._secret)
                acknowledged |= message is not None and message[:2] == (Kind.ACK, self.number)
        return acknowledged

    def _notify(self, notify: Callable[[], object]) -> None:
        pause = self._pause
        with suppress(OSError):
            notify()
            self._notified = True
            self._pause = min(2 * pause, _LONGEST_NOTIFY_SECONDS)
        self._notify_at = time.monotonic() + pause

    def join(self, generation: int) -> None:
        """Enter a generation; OVER messages for other generations are ignored."""
        with self._lock:
            self._generation = generation

    def listen(self, on_over: Callable[[], None]) -> None:
        """Start a thread that calls `on_over` when this process's generation is over."""
        threading.Thread(target=self._listen, args=(on_over,), daemon=True).start()

    def mute_after(self, watchdog: int) -> None:
        """Start a thread that sends MUTE when the watchdog with this pid ends."""
        descriptor = os.pidfd_open(watchdog)
        threading.Thread(target=self._mute_after, args=(descriptor,), daemon=True).start()

    def _mute_after(self, descriptor: int) -> None:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        os.close(descriptor)
        self.mute()

    def mute(self) -> None:
        """Announce that no more heartbeats follow: other means detect this process's failure."""
        for _ in range(_MUTE_TIMES):
            self._send(Kind.MUTE)
            time.sleep(_MUTE_SECONDS)

    def _listen(self, on_over: Callable[[], None]) -> None:
        while True:
            message = decode(self._socket.recv(256), self._secret)
            if message is None or message.kind != Kind.OVER or message.number != self.number:
                continue
            with self._lock:
                if message.value == self._generation:
                    on_over()

    def _send(self, kind: Kind) -> None:
        with suppress(OSError):
            message = Message(kind, self.number, time.monotonic_ns(), self.port)
            self._socket.sendto(encode(message, self._secret), self._driver.place)


class Listener(Protocol):
    """The driver's callbacks for verdicts of `HeartbeatReceiver`, called from its thread."""

    def on_silence(self, silence: Silence) -> bool:
        """Handle a silent process; return whether to give it up. If not, it is reported again."""

    def on_return(self, silence: Silence) -> None:
        """Handle the return of a process that was given up."""

    def on_lost_datagrams(self, silence: Silence) -> None:
        """Handle a process that is alive but whose datagrams do not arrive."""

    def on_common_silence(self, seconds: float) -> None:
        """Handle a silence of all processes, which are not given up; 0: it has ended."""


class HeartbeatReceiver:
    """The driver's end of the heartbeats: receives them and reports silent processes.

    Args:
        secret: of the job.

    Attributes:
        detector: classifies the processes.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.detector = FailureDetector(environment.answer_seconds(1))
        self._clocks: dict[int, int] = {}
        self._addresses: dict[int, tuple[str, int]] = {}  # where each rank listens
        self._hosts: dict[str, str] = {}  # address -> the same, or THIS_HOST
        self._over: dict[int, int] = {}  # process -> its generation, which is over
        self._common_silence = False

    def listen(self, listener: Listener, port: int) -> int:
        """Start a thread that calls the listener; return the UDP port.

        Args:
            port: UDP port to listen on; 0 = any.

        Raises:
            OSError: the port is taken.
        """
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._socket.bind(("", port))
        self._socket.setblocking(False)
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        return int(self._socket.getsockname()[1])

    def announce_over(self, numbers: Iterable[int], generation: int) -> None:
        """Send OVER to processes now, and in response to each heartbeat until `begin`."""
        for number in numbers:
            self._over[number] = generation
            if (rank := self._addresses.get(number)) is not None:
                self._send(Message(Kind.OVER, number, generation), rank)

    def begin(self, ranks: Collection[int]) -> None:
        """Begin a generation of these processes."""
        self._over = {}
        self.detector.begin(ranks, environment.answer_seconds(len(ranks)))

    def answered(self, number: int) -> None:
        """Record a request of a process over TCP."""
        self.detector.answered(number, time.monotonic())

    def drop(self, number: int) -> None:
        """Forget a process that has ended."""
        self.detector.drop(number)
        self._clocks.pop(number, None)
        self._addresses.pop(number, None)

    def _listen(self, listener: Listener) -> None:
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        looked = time.monotonic()
        while True:
            readable.poll(_LOOK_SECONDS * 1e3)
            # Of a thousand processes many have arrived meanwhile: one wait serves for all of them.
            while (now := time.monotonic()) - looked < _LOOK_SECONDS:
                try:
                    data, address = self._socket.recvfrom(256)
                except OSError:  # there is no further one
                    break
                message = decode(data, self._secret)
                if message is not None:
                    back = self._take(message, address, now)
                    if back is not None:
                        listener.on_return(back)
            if now - looked >= _LOOK_SECONDS:
                self._look(listener, now)
                looked = time.monotonic()  # a look at many processes may take longer than the pause

    def _take(self, message: Message, address: tuple[str, int], now: float) -> Silence | None:
        """Process a datagram; return the silence of a process that was given up and is back."""
        kind, number, clock, port = message
        if kind not in (Kind.BEAT, Kind.UNACKNOWLEDGED, Kind.MUTE) or clock <= self._clocks.get(
            number, -1
        ):
            return None
        self._clocks[number], self._addresses[number] = clock, (address[0], port)
        if kind != Kind.MUTE:
            self._send(Message(Kind.ACK, number, clock), address)
        if (generation := self._over.get(number)) is not None:
            self._send(Message(Kind.OVER, number, generation), self._addresses[number])
        if kind == Kind.MUTE:
            self.detector.mute(number, self._host(address[0]), now)
            return None
        return self.detector.beat(
            number, self._host(address[0]), now, acknowledged=kind == Kind.BEAT
        )

    def _host(self, address: str) -> str:
        if address not in self._hosts:
            own = source_towards(address) == address
            self._hosts[address] = THIS_HOST if own else address
        return self._hosts[address]

    def _look(self, listener: Listener, now: float) -> None:
        verdicts = self.detector.look(now)
        for silence in verdicts.lost_datagrams:
            listener.on_lost_datagrams(silence)
        for silence in verdicts.silent:
            if listener.on_silence(silence):
                self.detector.give_up(silence.number)
        if bool(verdicts.common_silence) != self._common_silence:
            self._common_silence = bool(verdicts.common_silence)
            listener.on_common_silence(verdicts.common_silence)

    def _send(self, message: Message, address: tuple[str, int]) -> None:
        with suppress(OSError):
            self._socket.sendto(encode(message, self._secret), address)
