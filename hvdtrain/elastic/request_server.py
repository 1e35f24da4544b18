"""HTTP server of the driver under `hvdtrain launch` without hosts: one thread, with an event loop.

It speaks the protocol of rendezvous.py, like Horovod's server under horovodrun. That server starts
a thread per request; here a request that waits costs no thread. A rank sends about ten requests per
generation, and half of them wait for all other ranks.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from horovod.runner.common.util import secret as signatures
from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic.rendezvous import Driver, handle_get, handle_report
from hvdtrain.untrusted import printable

_HEAD_SECONDS, _BODY_SECONDS = 3.0, 30.0  # to receive a request
# How long a request is held. Its sender repeats it, which thousands of ranks must not do often: a
# rank sends its whole row again. They wait for 5 and 10 s.
_JOIN_SECONDS, _EXCHANGE_SECONDS = 2.0, 5.0
_HEAD_BYTES = 1 << 14
_BODY_BYTES = 64 << 20
_BACKLOG = 4096
_NONCE_BYTES = 8  # at the start of a row: distinguishes a repeated request from the next exchange
_REFUSED_SECONDS = 60.0  # between two messages about refused requests
_STOP_SECONDS = 5.0

_Answer = tuple[int, bytes]
_NOT_YET: _Answer = (HTTPStatus.NOT_FOUND, b"")
_GIVEN_UP: _Answer = (HTTPStatus.CONFLICT, b"")
_BAD: _Answer = (HTTPStatus.BAD_REQUEST, b"")


class RequestServer:
    """Serves the ranks of one driver.

    Args:
        secret: with which the ranks sign their requests.

    Attributes:
        port: TCP port, of all addresses of this host.
    """

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self._driver: Driver | None = None
        self._waiting: dict[int, set[asyncio.Future[None]]] = {}  # process -> its held requests
        # By generation and scope.
        self._exchanges: dict[tuple[int, str], _AddressExchange] = {}
        self._generation = 0  # other threads set it
        self._refused, self._refused_at = 0, -_REFUSED_SECONDS
        self._loop = asyncio.new_event_loop()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="requests", daemon=True)
        self._ready = threading.Event()
        self.port = 0

    # --- called by the driver's threads --------------------------------------------------------

    def start(self, driver: Driver) -> int:
        """Serve requests; return the port."""
        self._driver = driver
        self._thread.start()
        self._ready.wait()
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
        self._call(self._stop)
        self._thread.join(_STOP_SECONDS)

    def _call(self, function: Any, *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_all())
        finally:
            self._loop.close()

    async def _serve_all(self) -> None:
        server = await asyncio.start_server(
            self._serve, "0.0.0.0", 0, limit=_HEAD_BYTES, backlog=_BACKLOG
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._stopped

    def _stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _give_up_others(self, generation: int) -> None:
        for key in [key for key in self._exchanges if key[0] != generation]:
            self._exchanges.pop(key).give_up()

    def _answer(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for held in self._waiting.pop(number, ()):
                if not held.done():
                    held.set_result(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            status, value = await self._request(reader, writer)
            head = f"HTTP/1.0 {status} {HTTPStatus(status).phrase}\r\n"
            writer.write(f"{head}Content-Length: {len(value)}\r\n\r\n".encode() + value)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError):
            pass  # it went away, or speaks something else
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Answer:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_SECONDS)
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
        length = int(fields.get("content-length") or 0)
        if not 0 <= length <= _BODY_BYTES:
            return _BAD
        body = b""
        if length:
            body = await asyncio.wait_for(reader.readexactly(length), _BODY_SECONDS)
        if not signatures.is_signed_body(signature, body):
            return self._refuse(writer, first, "has another body than the one that was signed")
        assert self._driver is not None
        words = path.split("/")[1:]
        if method == "GET" and len(words) == 2:
            found = handle_get(self._driver, *words)
            return _NOT_YET if found is None else (HTTPStatus.OK, found)
        if method != "POST" or len(words) not in (2, 4):
            return _BAD
        try:
            if len(words) == 4:
                rank, size, generation = map(int, words[1:])
                return await self._exchange(words[0], rank, size, generation, body)
            return await self._report(words[0], int(words[1]), json.loads(body))
        except (KeyError, TypeError, ValueError):  # another version of hvdtrain
            return _BAD

    async def _report(self, what: str, number: int, body: dict[str, Any]) -> _Answer:
        assert self._driver is not None
        if what == "join":
            if not self._driver.request(number, body):
                held = self._loop.create_future()
                others = self._waiting.setdefault(number, set())
                others.add(held)
                await asyncio.wait({held}, timeout=_JOIN_SECONDS)
                others.discard(held)
            found = self._driver.join(number, 0.0, body)
        else:
            found = handle_report(self._driver, what, number, body)
        return _NOT_YET if found is None else (HTTPStatus.OK, json.dumps(found).encode())

    async def _exchange(
        self, scope: str, rank: int, size: int, generation: int, row: bytes
    ) -> _Answer:
        """Wait until all ranks of a scope have sent their rows; return this rank's column.

        A row is a nonce and a value for each other rank in order, all of one length.
        """
        if not 0 <= rank < size:
            return _BAD
        if generation != self._generation:
            return _GIVEN_UP
        exchange = self._exchanges.get((generation, scope))
        # All ranks have their columns when the next exchange begins: contexts end with a barrier.
        if exchange is None or exchange.size != size or exchange.differs(rank, row):
            if exchange is not None:
                exchange.give_up()
            exchange = self._exchanges[generation, scope] = _AddressExchange(size)
        exchange.add(rank, row)
        if not exchange.over.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(exchange.over.wait(), _EXCHANGE_SECONDS)
        if exchange.given_up:
            return _GIVEN_UP
        return (HTTPStatus.OK, exchange.column(rank)) if exchange.over.is_set() else _NOT_YET

    def _refuse(self, writer: asyncio.StreamWriter, request: str, why: str) -> _Answer:
        self._refused += 1
        if time.monotonic() - self._refused_at >= _REFUSED_SECONDS:
            self._refused_at = time.monotonic()
            sender = writer.get_extra_info("peername")[0]
            print(f"hvdtrain: refused a request of {sender}: {printable(request[:80])} {why}; "
                  f"{self._refused} refused so far", file=sys.stderr, flush=True)  # fmt: skip
        return HTTPStatus.FORBIDDEN, b""


class _AddressExchange:
    """Rows of the ranks of one context.

    Attributes:
        over: set when all rows are there, or the exchange is given up.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.given_up = False
        self.over = asyncio.Event()
        self._rows: dict[int, bytes] = {}

    def differs(self, rank: int, row: bytes) -> bool:
        """Whether a row is not of this exchange, which is complete."""
        return len(self._rows) == self.size and self._rows[rank] != row

    def add(self, rank: int, row: bytes) -> None:
        self._rows[rank] = row
        if len(self._rows) == self.size:
            self.over.set()

    def give_up(self) -> None:
        if not self.over.is_set():
            self.given_up = True
            self.over.set()

    def column(self, rank: int) -> bytes:
        """Return the values that the other ranks, in order, have for this rank."""
        length = (len(self._rows[rank]) - _NONCE_BYTES) // (self.size - 1)
        parts = []
        for other in range(self.size):
            if other != rank:
                begin = _NONCE_BYTES + (rank - (rank > other)) * length
                parts.append(self._rows[other][begin : begin + length])
        return b"".join(parts)
