"""Count the requests to the request server of a process, and print them when it ends.

Python imports this file if its directory is in PYTHONPATH.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import sys
from collections import Counter

_counts: Counter[str] = Counter()
_read = asyncio.StreamReader.readuntil


async def _counted(reader: asyncio.StreamReader, separator: bytes = b"\n") -> bytes:
    head = await _read(reader, separator)
    if separator == b"\r\n\r\n":
        method, path, *_ = head.decode().split()
        _counts[f"{method} {path.split('/')[1]}"] += 1
    return head


def _print() -> None:
    if _counts:
        sys.stdout.write(f"requests by scope: {json.dumps(_counts)}\n")


asyncio.StreamReader.readuntil = _counted  # type: ignore[method-assign]
atexit.register(_print)
