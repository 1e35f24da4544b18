"""HTTP server of the elastic driver, which speaks the protocol of rendezvous.py: one event loop.

Horovod's own server starts a thread per request; here a request that waits costs no thread. A rank
sends two requests per generation, for its ranks and for the addresses of the others: both wait for
all other ranks.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from horovod.runner.common.util import secret as signatures
from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.agent.connections import DriverConnections, ServerThread
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.runtime.environment import answer_seconds
from hvdtrain.runtime.queued_output import say
from hvdtrain.untrusted import printable

_HEAD_SECONDS, _BODY_SECONDS = 3.0, 30.0  # to receive a request
_JOIN_SECONDS = 2.0  # how long a request is held; its sender waits for 5 s, and repeats it
# A rank that waits for addresses is sent a space after each of these intervals; it waits for 10 s.
_ALIVE_SECONDS = 5.0
_HEAD_BYTES = 1 << 14
_BODY_BYTES = 64 << 20
_BACKLOG = 4096
_COLUMNS = 256  # sent at the same time
_NONCE_BYTES = 8  # at the start of a row: distinguishes a repeated request from the next exchange
_REFUSED_SECONDS = 60.0  # between two messages about refused requests
_STOP_SECONDS = 5.0

_REPORTS = ("failed", "replace", "leave", "stuck")  # methods of the driver

_Answer = tuple[int, bytes]
_NOT_YET: _Answer = (HTTPStatus.NOT_FOUND, b"")
_GIVEN_UP: _Answer = (HTTPStatus.CONFLICT, b"")
_BAD: _Answer = (HTTPStatus.BAD_REQUEST, b"")


class RequestServer(ServerThread):
    """Serves the ranks of one driver.

    Args:
        secret: with which the ranks sign their requests.

    Attributes:
        port: TCP port, of all addresses of this host.
    """

    def __init__(self, secret: str) -> None:
        super().__init__("requests")
        self.secret = secret
        self._driver: ElasticDriver | None = None
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}  # process -> its held requests
        # By generation and scope.
        self._exchanges: dict[tuple[int, str], _AddressExchange] = {}
        self._generation = 0  # other threads set it
        self._refused, self._refused_at = 0, -_REFUSED_SECONDS
        self._columns = asyncio.Semaphore(_COLUMNS)
        self._connections = DriverConnections(2, say)
        self._stopped = asyncio.Event()
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]

    # --- called by the driver's threads --------------------------------------------------------

    def start(self, driver: ElasticDriver) -> int:
        """Serve requests; return the port."""
        self._driver = driver
        self._thread.start()
        return self.port

    def init(self, plan: Sequence[SlotInfo], generation: int) -> None:
        """Give up all exchanges; from now on those of this generation take place.

        It does not wait for the loop, which may wait for the driver's lock.
        """
        self._generation = generation
        self._call(self._give_up_others, generation)

    def answer(self, numbers: Iterable[int]) -> None:
        """Answer the held requests of these processes."""
        self._call(self._answer, tuple(numbers))

    def stop(self) -> None:
        self._call(self._stopped.set)
        self._thread.join(_STOP_SECONDS)

    # --- the loop's thread ---------------------------------------------------------------------

    async def _serve(self) -> None:
        serving = self._connections.serve(self._socket, self._answer_one, head_bytes=_HEAD_BYTES)
        server, stopped = map(self._loop.create_task, (serving, self._stopped.wait()))
        await asyncio.wait({server, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if server.done():
            await server  # it raises the error by which it has ended

    def _give_up_others(self, generation: int) -> None:
        for key in [key for key in self._exchanges if key[0] != generation]:
            self._exchanges.pop(key).give_up()

    def _answer(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for held in self._waiting.pop(number, ()):
                if not held.done():
                    held.set_result(None)

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            answer = await self._request(reader, writer)
            if answer is not None:
                _send(writer, *answer)
        except (OSError, EOFError, ValueError):
            pass  # it went away, or speaks something else
        finally:
            writer.close()

    @contextmanager
    def _within(self, seconds: float, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Close the connection if the block takes longer; `wait_for` would create a task."""
        timer = self._loop.call_later(seconds, writer.transport.abort)
        try:
            yield
        finally:
            timer.cancel()

    async def _request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Answer | None:
        """Return the answer to a request, or None if it was sent."""
        try:
            with self._within(_HEAD_SECONDS, writer):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _BAD
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        fields = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        signature = fields.get(signatures.SIGNATURE_HEADER.lower())
        if not signatures.is_signed(self.secret, method, path, signature):
            return self._refuse(writer, first, "is not signed with the secret of this job")
        self._connections.proven()
        length = int(fields.get("content-length") or 0)
        if not 0 <= length <= _BODY_BYTES:
            return _BAD
        body = b""
        if length:
            with self._within(_BODY_SECONDS, writer):
                body = await reader.readexactly(length)
        if not signatures.is_signed_body(signature, body):
            return self._refuse(writer, first, "has another body than the one that was signed")
        assert self._driver is not None
        words = path.split("/")[1:]
        try:
            if method == "GET" and len(words) == 2 and words[0] == "news":
                return _found(self._driver.news(int(words[1])))
            if method != "POST" or len(words) not in (2, 4):
                return _BAD
            if len(words) == 4:
                rank, size, generation = map(int, words[1:])
                exchange = self._enter(words[0], rank, size, generation, body)
                if exchange is None:
                    return _GIVEN_UP
                del body  # of 240 kB each, if 10,000 ranks wait
                await self._send_column(writer, exchange, rank)
                return None
            return await self._report(words[0], int(words[1]), json.loads(body))
        except (KeyError, TypeError, ValueError):  # another version of hvdtrain
            return _BAD

    async def _report(self, what: str, number: int, body: dict[str, Any]) -> _Answer:
        """Answer a POST request.

        Raises:
            TypeError, KeyError, ValueError: it is wrong.
        """
        assert self._driver is not None
        if what == "join":
            if not self._driver.request(number, body):
                held = self._loop.create_future()
                others = self._waiting.setdefault(number, set())
                others.add(held)
                await asyncio.wait({held}, timeout=_JOIN_SECONDS)
                others.discard(held)
            return _found(self._driver.join(number, body))
        if what not in _REPORTS:
            return _BAD
        getattr(self._driver, what)(number, **body)
        return _found({})

    def _enter(
        self, scope: str, rank: int, size: int, generation: int, row: bytes
    ) -> _AddressExchange | None:
        """Add a rank's row to an exchange; return None if the generation is not the current one.

        A row is a nonce and a value for each other rank in order, all of one length.

        Raises:
            ValueError: it is wrong.
        """
        if not 0 <= rank < size or size == 1:
            raise ValueError(f"rank {rank} of {size}")
        if generation != self._generation:
            return None
        exchange = self._exchanges.get((generation, scope))
        # All ranks have their columns when the next exchange begins: the gather of the ranks'
        # places follows each exchange.
        if exchange is None or exchange.size != size or exchange.differs(rank, row):
            if exchange is not None:
                exchange.give_up()
            exchange = self._exchanges[generation, scope] = _AddressExchange(size)
        exchange.add(rank, row)
        return exchange

    async def _send_column(
        self, writer: asyncio.StreamWriter, exchange: _AddressExchange, rank: int
    ) -> None:
        """Wait until all ranks of a scope have sent their rows; send this rank's column.

        The request is held until its sender gives up, because a rank that repeats it sends its
        whole row again. Spaces before the status line, which Horovod's client skips, keep the
        connection alive.
        """
        deadline = self._loop.time() + answer_seconds(exchange.size)
        while not exchange.over.is_set():
            try:
                await asyncio.wait_for(exchange.over.wait(), _ALIVE_SECONDS)
            except asyncio.TimeoutError:
                if self._loop.time() >= deadline:
                    break
                writer.write(b" ")
        if exchange.given_up or not exchange.over.is_set():
            _send(writer, *(_GIVEN_UP if exchange.given_up else _NOT_YET))
            return
        async with self._columns:
            _send(writer, HTTPStatus.OK, exchange.column(rank))
            with self._within(_BODY_SECONDS, writer):
                await writer.drain()

    def _refuse(self, writer: asyncio.StreamWriter, request: str, why: str) -> _Answer:
        self._refused += 1
        if time.monotonic() - self._refused_at >= _REFUSED_SECONDS:
            self._refused_at = time.monotonic()
            sender = writer.get_extra_info("peername")[0]
            say(f"refused a request of {sender}: '{printable(request[:80])}' {why}; "
                f"{self._refused} refused so far")  # fmt: skip
        return HTTPStatus.FORBIDDEN, b""


def _found(answer: dict[str, Any] | None) -> _Answer:
    return _NOT_YET if answer is None else (HTTPStatus.OK, json.dumps(answer).encode())


def _send(writer: asyncio.StreamWriter, status: int, value: bytes) -> None:
    head = f"HTTP/1.0 {status} {HTTPStatus(status).phrase}\r\n"
    writer.write(f"{head}Content-Length: {len(value)}\r\n\r\n".encode())
    writer.write(value)


class _AddressExchange:
    """Rows of the ranks of one context.

    The values of a row have the same address and differ in a sequence number. Bytes that differ
    within a row, usually 2 or 3 of 24, are stored for each pair of ranks, all others once.

    Attributes:
        over: set when all rows are there, or the exchange is given up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.given_up = False
        self.over = asyncio.Event()
        self._nonces: dict[int, bytes] = {}
        self._length = 0  # of a value
        self._first = bytearray()  # value of each row
        # Position in a value -> its byte for each pair of ranks, row after row.
        self._of_pairs: dict[int, bytearray] = {}

    def differs(self, rank: int, row: bytes) -> bool:
        """Whether a row is not of this exchange, which is complete."""
        return len(self._nonces) == self.size and self._nonces[rank] != row[:_NONCE_BYTES]

    def add(self, rank: int, row: bytes) -> None:
        """Store a row.

        Raises:
            ValueError: its length differs from the other rows'.
        """
        length, left = divmod(len(row) - _NONCE_BYTES, self.size - 1)
        if not self._nonces:
            self._length, self._first = length, bytearray(self.size * length)
        if length != self._length or left:
            raise ValueError(f"a row of {len(row)} bytes")
        if self._nonces.get(rank) == row[:_NONCE_BYTES]:
            return  # repeated
        values = row[_NONCE_BYTES:]
        self._first[rank * length : (rank + 1) * length] = values[:length]
        expected = bytearray(values[:length] * (self.size - 1))
        for position in self._of_pairs:
            expected[position::length] = values[position::length]
        if expected != values:  # in the first rows
            for position in range(length):
                if expected[position::length] != values[position::length]:
                    rows = (bytes([byte]) * self.size for byte in self._first[position::length])
                    self._of_pairs[position] = bytearray(b"".join(rows))
        for position, pairs in self._of_pairs.items():
            of_row = values[position::length]
            with_own = of_row[:rank] + b"\0" + of_row[rank:]
            pairs[rank * self.size : (rank + 1) * self.size] = with_own
        self._nonces[rank] = row[:_NONCE_BYTES]
        if len(self._nonces) == self.size:
            self.over.set()

    def give_up(self) -> None:
        if not self.over.is_set():
            self.given_up = True
            self.over.set()

    def column(self, rank: int) -> bytes:
        """Return the values that the other ranks, in order, have for this rank."""
        found, length = self._first[:], self._length
        for position, pairs in self._of_pairs.items():
            found[position::length] = pairs[rank :: self.size]
        del found[rank * length : (rank + 1) * length]
        return bytes(found)
