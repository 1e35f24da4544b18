"""Scrapes an exporter: `python -m tests.soak.bench.scraper HOST:PORT COUNT`."""

from __future__ import annotations

import sys
import time
import urllib.request


def read(address: str) -> bytes:
    """What an exporter answers."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return bytes(answer.read())


def main(address: str, count: str) -> None:
    """Scrapes an exporter so many times; prints nothing."""
    for _ in range(int(count)):
        read(address)
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
