"""Scrape an exporter: `python -m tests.soak.bench.scraper HOST:PORT COUNT`."""

from __future__ import annotations

import sys
import time
import urllib.request


def read(address: str) -> bytes:
    """Return an exporter's response."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return bytes(answer.read())


def main(address: str, count: str) -> None:
    """Scrape an exporter COUNT times; print nothing."""
    for _ in range(int(count)):
        read(address)
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
