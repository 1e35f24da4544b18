"""A small HTTP server whose connections are bounded in number and time (see connections.py).

Any number of slow clients occupies only a few connections and does not block fast clients.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from hvdtrain.telemetry.connections import REQUEST_SECONDS, Connections

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
TRUST = "hvdtrain.trust"  # in a request's environ: function to call once the client is authorized


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
        self.connections = Connections()
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
