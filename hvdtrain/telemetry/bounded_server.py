"""A small HTTP server whose connections are bounded in number and time: see `BoundedConnections`.

Any number of slow clients occupies only a few connections and does not block fast clients.
"""

from __future__ import annotations

import errno
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from socketserver import ThreadingMixIn
from threading import Condition
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

MOST = 32
# Measured from the accept: limit until the client has authenticated and sent its request, including
# a TLS handshake; and limit until it has its answer (Prometheus waits at most 10 s by default).
UNAUTHORIZED_SECONDS = 5.0
REQUEST_SECONDS = 10.0
_ROOM_SECONDS = 1.0  # for a thread to close a connection that was shut down
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
TRUST = "hvdtrain.trust"  # in a request's environ: function to call once the client is authorized


@dataclass
class _Connection:
    host: str
    began: float
    deadline: float
    trusted: bool = False
    cut: bool = False


class BoundedConnections:
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
                self._evict_one()
                self._changed.wait_for(lambda: len(self._open) < MOST, _ROOM_SECONDS)
            if len(self._open) >= MOST:
                return False
            self._open[client] = _Connection(host, now, now + UNAUTHORIZED_SECONDS)
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

    def _evict_one(self) -> None:
        uncut = {client: c for client, c in self._open.items() if not c.cut}
        unauthorized = {client: c for client, c in uncut.items() if not c.trusted}
        candidates = unauthorized or uncut
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


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS

    def get_environ(self) -> dict[str, Any]:
        assert isinstance(self.server, BoundedServer)
        return {
            **super().get_environ(),
            TRUST: partial(self.server.connections.trust, self.connection),
        }

    def log_message(self, format: str, *args: Any) -> None:
        pass


class BoundedServer(ThreadingMixIn, WSGIServer):
    """One thread per request; `serve_forever` runs in a thread of the owner."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        self.connections = BoundedConnections()
        super().__init__(*args)

    def server_bind(self) -> None:
        # Replaces HTTPServer's: it asks DNS for this host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.admit(request, client_address[0]):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.connections.closed(request)

    def service_actions(self) -> None:
        self.connections.cut_late()

    def end(self) -> None:
        """Stop accepting requests, and close the open ones; call it from another thread."""
        self.shutdown()
        self.server_close()
        self.connections.cut_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client disconnected, or does not use TLS


class _ServerV6(BoundedServer):
    address_family = socket.AF_INET6


def listen(host: str, port: int) -> BoundedServer:
    """A server at this address; if the port is in use, on a free port.

    Raises:
        OSError, OverflowError: the address cannot be listened on.
    """
    if port > 65535:
        raise OverflowError("a port is at most 65535")
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    kind = _ServerV6 if family == socket.AF_INET6 else BoundedServer
    try:
        return kind((host, port), _Handler)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return kind((host, 0), _Handler)
