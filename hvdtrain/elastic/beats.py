"""Signs of life of the processes, and the driver's word that a generation is over: UDP datagrams.

    watchdog -> driver   BEAT number, its clock in ns; four times a second
    either   -> driver   MUTE number, its clock in ns; no beats will come, because the rank has
                         ended, or because its watchdog has
    driver   -> rank     OVER number, generation; again in answer to each beat

The driver listens on the port, in UDP, that its HTTP server has in TCP. A datagram ends with
16 bytes of HMAC-SHA256 keyed with the job's secret, and counts only where its clock is later
than the last one's. All of it only makes faster what happens without it too: where datagrams
do not get through, ssh ends over the dead link and Gloo's timeout passes.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from hvdtrain.elastic.failure_detector import Arrivals
from hvdtrain.runtime import environment

BEAT_SECONDS = 0.25
_LOOK_SECONDS = 0.05
# A driver that did not get to look for so long (suspended, starved) has heard nobody.
_LATE_SECONDS = 0.25
_LEAST_SECONDS = 1.0  # that a process may be silent, whatever was seen
_SECRET = "HOROVOD_RENDEZVOUS_SECRET"
_BUFFER_BYTES = 4 << 20
_BODY = struct.Struct("!BIQ")
_DIGEST_BYTES = 16
_MUTE_TIMES, _MUTE_SECONDS = 3, 0.05  # datagrams get lost


class Kind(IntEnum):
    """See the top of this file."""

    BEAT = 1
    MUTE = 2
    OVER = 3


class Message(NamedTuple):
    """`figure`: the sender's clock in ns, or a generation."""

    kind: Kind
    number: int
    figure: int


@dataclass(frozen=True)
class Silence:
    """A process was not heard any more.

    Args:
        number: of the process.
        seconds: for so long.
        bound: that it might have been without being taken for gone.
        phi: see failure_detector.py.
    """

    number: int
    seconds: float
    bound: float
    phi: float


def encode(message: Message, secret: bytes) -> bytes:
    body = _BODY.pack(*message)
    return body + hmac.digest(secret, body, "sha256")[:_DIGEST_BYTES]


def decode(data: bytes, secret: bytes) -> Message | None:
    """None: it is none of ours."""
    body, digest = data[: _BODY.size], data[_BODY.size :]
    right = hmac.digest(secret, body, "sha256")[:_DIGEST_BYTES]
    if len(body) < _BODY.size or not hmac.compare_digest(digest, right):
        return None
    kind, number, figure = _BODY.unpack(body)
    try:
        return Message(Kind(kind), number, figure)
    except ValueError:
        return None


class Line:
    """A process's end: its watchdog sends, the rank itself listens, on one socket.

    Args:
        address, port: of the driver.
        number: the process's.
        descriptor: of the socket, where there is one already.

    Raises:
        OSError: `address` is none.
    """

    def __init__(self, address: str, port: int, number: int, descriptor: int | None = None) -> None:
        self.number = number
        self._secret = os.environ.get(_SECRET, "").encode()
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, driver = found[0]
        self._driver: Any = driver
        # Not connected: a driver with several addresses may answer from another one.
        self._socket = socket.socket(family, kind, protocol, fileno=descriptor)
        self.descriptor = self._socket.fileno()
        self._generation = -1
        self._lock = threading.Lock()

    def beat_for_ever(self) -> None:
        while True:
            self._send(Kind.BEAT)
            time.sleep(BEAT_SECONDS)

    def join(self, generation: int) -> None:
        """This process is in this generation now; it ignores what is said of others."""
        with self._lock:
            self._generation = generation

    def listen(self, on_over: Callable[[], None]) -> None:
        """Starts a thread that calls `on_over` when this process's generation is over, in it."""
        threading.Thread(target=self._listen, args=(on_over,), daemon=True).start()

    def mute_after(self, watchdog: int) -> None:
        """Starts a thread that tells the driver when the watchdog of this pid ends."""
        descriptor = os.pidfd_open(watchdog)
        threading.Thread(target=self._mute_after, args=(descriptor,), daemon=True).start()

    def _mute_after(self, descriptor: int) -> None:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        os.close(descriptor)
        self.mute()

    def mute(self) -> None:
        """No beats will come: what became of this process is seen by other means."""
        for _ in range(_MUTE_TIMES):
            self._send(Kind.MUTE)
            time.sleep(_MUTE_SECONDS)

    def _listen(self, on_over: Callable[[], None]) -> None:
        while True:
            message = decode(self._socket.recv(256), self._secret)
            if message is None or message.kind != Kind.OVER or message.number != self.number:
                continue
            with self._lock:
                if message.figure == self._generation:
                    on_over()

    def _send(self, kind: Kind) -> None:
        with suppress(OSError):
            message = Message(kind, self.number, time.monotonic_ns())
            self._socket.sendto(encode(message, self._secret), self._driver)


@dataclass
class _Heard:
    """What the driver knows of a process from its beats."""

    address: tuple[str, int]
    clock: int
    arrivals: Arrivals
    silent: bool = False  # so that it was taken for gone


class Beats:
    """The driver's end: hears all processes, says which of them fell silent.

    Args:
        port: where it listens; 0 = any.
        secret: the job's.

    Attributes:
        port: where it listens.
        longest, phi: the longest delay of a beat that was no alarm, in seconds, and its phi.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, secret: bytes) -> None:
        self._secret = secret
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind(("", port))
        self._socket.settimeout(_LOOK_SECONDS)
        self.port: int = self._socket.getsockname()[1]
        self._heard: dict[int, _Heard] = {}
        self._over: dict[int, int] = {}  # process: its generation, which is over
        self._least, self._most = _LEAST_SECONDS, environment.answer_seconds(1)
        self.longest, self.phi = 0.0, 0.0

    def listen(
        self, on_silence: Callable[[Silence], bool], on_return: Callable[[Silence], None]
    ) -> None:
        """Starts a thread that calls these when a process falls silent, and is heard again.

        Args:
            on_silence: returns whether it took the process for gone; else it is asked again.
        """
        threading.Thread(target=self._listen, args=(on_silence, on_return), daemon=True).start()

    def tell(self, numbers: Iterable[int], generation: int) -> None:
        """Tells processes that their generation is over, at each of their beats until `begin`."""
        for number in numbers:
            self._over[number] = generation
            if (heard := self._heard.get(number)) is not None:
                self._send_over(number, generation, heard.address)

    def begin(self, ranks: int) -> None:
        """A generation of so many ranks begins."""
        self._over = {}
        self._most = environment.answer_seconds(ranks)

    def drop(self, number: int) -> None:
        """A process has ended."""
        self._heard.pop(number, None)

    def _listen(
        self, on_silence: Callable[[Silence], bool], on_return: Callable[[Silence], None]
    ) -> None:
        looked = time.monotonic()
        while True:
            data, address = b"", ("", 0)
            with suppress(OSError):
                data, address = self._socket.recvfrom(256)
            now = time.monotonic()
            late = now - looked - _LOOK_SECONDS
            if late > _LATE_SECONDS:
                for heard in list(self._heard.values()):
                    heard.arrivals.forgive(late)
                looked = now
            message = decode(data, self._secret)
            if message is not None:
                back = self._take(message, address, now)
                if back is not None:
                    on_return(back)
            if now - looked >= _LOOK_SECONDS:
                looked = now
                for silence, heard in self._silent(now):
                    heard.silent = on_silence(silence)

    def _take(self, message: Message, address: tuple[str, int], now: float) -> Silence | None:
        """Returns how long a process was silent that was taken for gone and is heard again."""
        heard = self._heard.get(message.number)
        if message.kind == Kind.OVER or (heard and message.figure <= heard.clock):
            return None
        if (generation := self._over.get(message.number)) is not None:
            self._send_over(message.number, generation, address)
        if heard is None or message.kind == Kind.MUTE:
            self._heard[message.number] = _Heard(address, message.figure, Arrivals(now))
            return None
        silence, back = heard.arrivals.silence(now), None
        if heard.silent:
            # It lives: from here on all may be as late as this.
            back = Silence(message.number, silence, self._least, heard.arrivals.phi(now))
            self._least = min(self._most, max(self._least, 2 * silence))
        elif silence > self.longest:
            self.longest, self.phi = silence, heard.arrivals.phi(now)
        heard.address, heard.clock, heard.silent = address, message.figure, False
        heard.arrivals.heard(now)
        return back

    def _silent(self, now: float) -> list[tuple[Silence, _Heard]]:
        """Those that are silent for longer than their bound, and not yet taken for gone."""
        found = []
        for number, heard in list(self._heard.items()):
            seconds = heard.arrivals.silence(now)
            if heard.silent or seconds <= self._least:
                continue  # nearly all: no more arithmetic
            bound = heard.arrivals.bound(self._least, self._most)
            if bound is not None and seconds > bound:
                phi = heard.arrivals.phi(now)
                found.append((Silence(number, seconds, bound, phi), heard))
        return found

    def _send_over(self, number: int, generation: int, address: tuple[str, int]) -> None:
        with suppress(OSError):
            self._socket.sendto(
                encode(Message(Kind.OVER, number, generation), self._secret), address
            )
