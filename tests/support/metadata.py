"""Clouds' metadata services on this machine, as documented.

python -m tests.support.metadata HOST PORT FILE: there is a notice once FILE exists.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN = "a-token"
MACHINE = "vm-7"


@dataclass
class Metadata:
    """Responses of the server.

    Args:
        address: its address, without a / at the end.
        notice: AWS: there is an action; Google: preempted; others: /notice returns 200.
        events: Azure's events: (kind, machines).
        hangs: seconds before each response.
        asked: requested paths, in order.
    """

    address: str = ""
    notice: bool = False
    events: list[tuple[str, list[str]]] = field(default_factory=list)
    hangs: float = 0.0
    asked: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path == "/notice":
            return (200, "go") if self.notice else (404, "")
        if path == "/latest/api/token":
            lifetime = headers.get("x-aws-ec2-metadata-token-ttl-seconds")
            return (200, TOKEN) if method == "PUT" and lifetime else (400, "")
        if path == "/latest/meta-data/spot/instance-action":
            if headers.get("x-aws-ec2-metadata-token") != TOKEN:
                return 401, ""
            action = {"action": "terminate", "time": "2026-01-01T00:00:00Z"}
            return (200, json.dumps(action)) if self.notice else (404, "")
        if path == "/computeMetadata/v1/instance/preempted":
            known = headers.get("metadata-flavor") == "Google"
            return (200, str(self.notice).upper()) if known else (403, "")
        if headers.get("metadata") != "true":
            return 400, ""
        if path == "/metadata/scheduledevents?api-version=2020-07-01":
            events = [{"EventType": kind, "Resources": names} for kind, names in self.events]
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": events})
        if path.startswith("/metadata/instance/compute/name?api-version="):
            return 200, MACHINE
        return 404, ""


@contextmanager
def metadata(host: str = "127.0.0.1", port: int = 0) -> Iterator[Metadata]:
    said = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said.asked.append(self.path)
            time.sleep(said.hangs)
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text = said.answer(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    said.address = f"http://{host}:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield said
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    with metadata(sys.argv[1], int(sys.argv[2])) as service:
        print("listening", flush=True)
        while True:
            service.notice = Path(sys.argv[3]).exists()
            time.sleep(0.1)
