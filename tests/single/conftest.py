"""Marks the tests that start whole runs: `make test-fast` leaves them out."""

from __future__ import annotations

import pytest

from tests.support import runs

_STARTERS = (runs.start, runs.run, runs.train)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        module = getattr(item, "module", None)
        if any(value in _STARTERS for value in vars(module).values() if callable(value)):
            item.add_marker(pytest.mark.slow)
