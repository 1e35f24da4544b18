"""The connections of a publicly reachable server, bounded in number and in time."""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition

MOST = 32
# Measured from the accept: limit until the client has authenticated and sent its request, including
# a TLS handshake; and limit until it has its answer (Prometheus waits at most 10 s by default).
STRANGER_SECONDS = 5.0
REQUEST_SECONDS = 10.0
_ROOM_SECONDS = 1.0  # for a thread to close a connection that was shut down


@dataclass
class _Connection:
    host: str
    began: float
    deadline: float
    trusted: bool = False
    cut: bool = False


class Connections:
    """The open connections. Each is served and closed by its own thread.

    If there are `MOST`, a new connection replaces an old one: the oldest unauthenticated connection
    of the host that has the most of them. Slow clients therefore neither exhaust this process's
    file descriptors nor block a fast client.
    """

    def __init__(self) -> None:
        self._open: dict[socket.socket, _Connection] = {}  # oldest first
        self._changed = Condition()

    def admit(self, client: socket.socket, host: str) -> bool:
        """Register a connection, if necessary in place of another one; return False if refused."""
        now = time.monotonic()
        with self._changed:
            if len(self._open) >= MOST:
                self._cut_least_wanted()
                self._changed.wait_for(lambda: len(self._open) < MOST, _ROOM_SECONDS)
            if len(self._open) >= MOST:
                return False
            self._open[client] = _Connection(host, now, now + STRANGER_SECONDS)
        return True

    def trust(self, client: socket.socket) -> None:
        """Extend the deadline of a client whose request was authorized."""
        with self._changed:
            if client in self._open:
                connection = self._open[client]
                connection.trusted = True
                connection.deadline = connection.began + REQUEST_SECONDS

    def closed(self, client: socket.socket) -> None:
        with self._changed:
            self._open.pop(client, None)
            self._changed.notify_all()

    def cut_late(self) -> None:
        """Shut down the connections whose deadline has passed; must be called periodically."""
        now = time.monotonic()
        with self._changed:
            for client, connection in self._open.items():
                if now > connection.deadline:
                    self._cut(client, connection)

    def cut_all(self) -> None:
        with self._changed:
            for client, connection in self._open.items():
                self._cut(client, connection)

    def _cut_least_wanted(self) -> None:
        uncut = {client: c for client, c in self._open.items() if not c.cut}
        strangers = {client: c for client, c in uncut.items() if not c.trusted}
        candidates = strangers or uncut
        if candidates:
            ((host, _),) = Counter(c.host for c in candidates.values()).most_common(1)
            client = next(client for client, c in candidates.items() if c.host == host)
            self._cut(client, candidates[client])

    @staticmethod
    def _cut(client: socket.socket, connection: _Connection) -> None:
        """Shut down a connection, which wakes up its thread; the thread closes it."""
        connection.cut = True
        with suppress(OSError):
            # Not SSLSocket's: the thread may be in the middle of a handshake.
            socket.socket.shutdown(client, socket.SHUT_RDWR)
