"""The connections of a server that anybody may reach: bounded in number and in time."""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition

MOST = 32
# From the accept on: until the client has said who it is and what it wants, a TLS handshake
# included, and until it has its answer (Prometheus waits no longer than 10 s by default).
STRANGER_SECONDS = 5.0
REQUEST_SECONDS = 10.0
_ROOM_SECONDS = 1.0  # for a thread to close a connection that was cut


@dataclass
class _Connection:
    host: str
    began: float
    deadline: float
    trusted: bool = False
    cut: bool = False


class Connections:
    """Those that are open. Each is served by a thread of its own, which closes it.

    Where there are `MOST`, the newest takes the place of one that takes long: of the host that
    has the most strangers, the oldest. So many slow clients neither use up this process's file
    descriptors nor keep out a quick one.
    """

    def __init__(self) -> None:
        self._open: dict[socket.socket, _Connection] = {}  # the oldest first
        self._changed = Condition()

    def admit(self, client: socket.socket, host: str) -> bool:
        """Whether there is room for it, which is made if need be."""
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
        """It has asked for something that it may have."""
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
        """Cuts those whose time is over; to be called again and again."""
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
        """Its thread wakes up, whatever it waits for, and closes it."""
        connection.cut = True
        with suppress(OSError):
            # Not SSLSocket's: the thread may be in the middle of a handshake.
            socket.socket.shutdown(client, socket.SHUT_RDWR)
