"""An HTTP server of files with byte ranges, which counts requests and can fail."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class RangedServer(ThreadingHTTPServer):
    """Serves `files`, by path such as "/a.tar".

    Attributes:
        requested: (first byte, number of bytes) of each GET that was answered.
        failures: that many of the next GETs are answered with 503.
        ranges: whether requests for parts are honored.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.requested: list[tuple[int, int]] = []
        self.failures = 0
        self.ranges = True

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(BaseHTTPRequestHandler):
    server: RangedServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        content = self.server.files.get(self.path)
        self._answer(404 if content is None else 200, content or b"", body=False)

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        if content is None:
            return self._answer(404, b"")
        if self.server.failures:
            self.server.failures -= 1
            return self._answer(503, b"")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or not self.server.ranges:
            return self._answer(200, content)
        first, last = map(int, found.groups())
        part = content[first : last + 1]
        self.server.requested.append((first, len(part)))
        return self._answer(206, part)

    def _answer(self, status: int, content: bytes, body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(self.server.files.get(self.path))}"')
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[RangedServer]:
    server = RangedServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
