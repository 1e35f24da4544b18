"""Count the requests to each HTTP server of a process, and print them when it ends.

Python imports this file if its directory is in PYTHONPATH.
"""

from __future__ import annotations

import atexit
import http.server
import json
import sys
from collections import Counter

_counts: Counter[str] = Counter()
_parse_request = http.server.BaseHTTPRequestHandler.parse_request


def _counted(handler: http.server.BaseHTTPRequestHandler) -> bool:
    parsed = _parse_request(handler)
    if parsed:
        _counts[f"{handler.command} {handler.path.split('/')[1]}"] += 1
    return parsed


def _print() -> None:
    if _counts:
        sys.stdout.write(f"requests by scope: {json.dumps(_counts)}\n")


http.server.BaseHTTPRequestHandler.parse_request = _counted  # type: ignore[method-assign]
atexit.register(_print)
