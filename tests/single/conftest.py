"""Marks the tests that start whole runs, and those that share one."""

from __future__ import annotations

import pytest

from tests.support import runs

_STARTERS = (runs.start, runs.run, runs.train)
# Fixtures with runs that the tests of a file look at.
_SHARED_RUNS = {"job", "root", "whole"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-fast` leaves whole runs out; one worker of pytest-xdist does a shared one."""
    for item in items:
        module = getattr(item, "module", None)
        if any(value in _STARTERS for value in vars(module).values() if callable(value)):
            item.add_marker(pytest.mark.slow)
        if _SHARED_RUNS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
