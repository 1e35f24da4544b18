"""What a driver's two servers share: their thread, and limits.

Limits of open files, and of connections that have proved nothing yet.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, cast

from hvdtrain.agent.protocol import HANDSHAKE_SECONDS

_MOST_FILES = 1 << 17
_HEAD_BYTES = 1 << 16
_RETRY_SECONDS = 1.0  # if no connection can be accepted
_CLOSE_SECONDS = 0.01  # until another one is closed
# Errors of accept that concern all connections; the others concern only the new one.
_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_file_limit() -> tuple[int, int]:
    """Raise the soft limit on open files; return it and the hard limit as they were before."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = before
    with suppress(OSError, ValueError):
        # Not to any hard limit: some programs close all descriptors up to the soft one.
        most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return before


class ServerThread:
    """A server whose event loop has a thread of its own, not started yet."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def _serve(self) -> None:
        """Serve until the end."""
        raise NotImplementedError

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the server's thread."""
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class DriverConnections:
    """The connections of a driver's server, and those whose peers have not proved anything yet.

    A peer proves that it has the job's secret. The limit of the unproven ones, from their first
    packet on, is a share of the open files of this process; beyond it the oldest one makes room.

    asyncio's own servers do not count TLS handshakes, and try to accept a connection as often as
    their backlog is long when no file is left.
    """

    def __init__(self, share: int, say: Callable[[str], None]) -> None:
        self._most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // share)
        self._say = say
        self._said: set[str] = set()
        self._all: set[asyncio.Task[None]] = set()
        self._unproven: dict[asyncio.Task[None], None] = {}  # oldest first

    def proven(self) -> None:
        """Record that the peer of the connection that this task handles has the secret."""
        self._unproven.pop(cast("asyncio.Task[None]", asyncio.current_task()), None)

    async def serve(
        self,
        listener: socket.socket,
        handler: Handler,
        tls: ssl.SSLContext | None = None,
        head_bytes: int = _HEAD_BYTES,
    ) -> None:
        """Accept connections, and let `handler` serve and close each, until this is cancelled.

        Args:
            head_bytes: limit of StreamReader.readuntil.
        """
        loop = asyncio.get_running_loop()
        with listener:
            listener.setblocking(False)
            while True:
                try:
                    connection, peer = await loop.sock_accept(listener)
                except OSError as error:
                    self._report_error(error)
                    full = error.errno in _SHORT_OF and not self._make_room(1)
                    await asyncio.sleep(_RETRY_SECONDS if full else _CLOSE_SECONDS)
                    continue
                if self._make_room(self._most):
                    self._say_once(
                        "limit",
                        f"more than {self._most} connections do not show the secret of this job, "
                        f"the newest one from {peer[0]}: the oldest ones are closed",
                    )
                task = loop.create_task(self._handle(connection, handler, tls, head_bytes))
                self._unproven[task] = None
                self._all.add(task)
                task.add_done_callback(self._ended)
                await asyncio.sleep(0)  # others have their turn during a flood of connections

    async def _handle(
        self,
        connection: socket.socket,
        handler: Handler,
        tls: ssl.SSLContext | None,
        head_bytes: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(head_bytes, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        limit = HANDSHAKE_SECONDS if tls is not None else None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=limit
            )
        except OSError:  # no TLS, or gone
            connection.close()
            return
        try:
            await handler(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
        except asyncio.CancelledError:
            cast(asyncio.WriteTransport, transport).abort()
            raise

    def _make_room(self, most: int) -> bool:
        """Close the oldest of `most` or more unproven connections; return whether it did."""
        if len(self._unproven) < most:
            return False
        oldest = next(iter(self._unproven))
        del self._unproven[oldest]
        return oldest.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._all.discard(task)
        self._unproven.pop(task, None)

    def _report_error(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            text = (
                f"{error.strerror}: the driver may have {allowed} and needs about 8 for each rank, "
                "so connections wait; raise the hard limit (ulimit -Hn, limits.conf)"
            )
        else:
            text = f"a connection cannot be accepted: {error.strerror}"
        self._say_once(str(error.errno), text)

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(text)
