"""Marks the tests that start whole runs, and deals tests to the workers of pytest-xdist."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import runs

_STARTERS = (runs.start, runs.run, runs.train)
# Files whose tests look at one run, which one worker shall do once.
_NAMES = "generate", "huggingface_runs", "replica_runs", "run_resume", "top", "world_sizes"
_TOGETHER = tuple(f"/test_{name}.py" for name in _NAMES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-fast` leaves whole runs out."""
    for item in items:
        module = getattr(item, "module", None)
        if any(value in _STARTERS for value in vars(module).values() if callable(value)):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test by itself goes to a worker that is free; those of some files go together."""
    # --dist loadgroup would do, but pytest 9 does not show xdist's groups to its scheduler.
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(_TOGETHER) else nodeid

    return Scheduling(config, log)
