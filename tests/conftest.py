"""Scheduling of tests on the workers of pytest-xdist."""

from __future__ import annotations

import functools
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assign each test to a free worker.

    Tests of a file that share a run go together, because each worker would repeat the run.
    """
    # --dist loadgroup would suffice, but pytest 9 does not show xdist's groups to its scheduler.
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def shares(file: str) -> bool:
        return 'scope="module"' in (config.rootpath / file).read_text()

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if shares(file) else nodeid

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the tests of tests/cluster evenly among those of tests/single.

    The former mostly wait, the latter mostly compute: together they use both cores.
    """
    groups: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        groups["tests/cluster/" in item.nodeid].append(item)
    place = {item: at / len(group) for group in groups.values() for at, item in enumerate(group)}
    items.sort(key=place.__getitem__)
