"""A TCP relay to a server, which can refuse connections, or accept them and not answer."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

_READ = 1 << 16


class Relay:
    """Relay from a free port of this host to a server on this host.

    Attributes:
        port: of the relay.
        silent: connections are accepted, and nothing is passed on.
        held: connections accepted while `silent`.
    """

    def __init__(self, server: int) -> None:
        self._server = server
        self._open: list[socket.socket] = []
        self.silent, self.held = False, 0
        self.port = 0
        self.answer()

    def answer(self) -> None:
        """Pass on new connections, after `refuse` on the same port."""
        self.silent = False
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=100)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Close all connections and refuse new ones."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                self._open.append(client)
                if self.silent:
                    self.held += 1
                    continue
                server = socket.create_connection(("127.0.0.1", self._server))
                self._open.append(server)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_READ):
                if not self.silent:
                    to.sendall(data)
            to.shutdown(socket.SHUT_WR)
