"""Marks the tests that start ranks, and deals tests to the workers of pytest-xdist."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import runs
from tests.support.torch_ranks import on_torch_ranks

_MPI_FOLDER = "OMPI_MCA_orte_tmpdir_base"
_STARTERS = (runs, runs.start, runs.run, runs.train, on_torch_ranks)


@pytest.fixture(scope="session", autouse=True)
def _folder_of_mpirun() -> Iterator[None]:
    """Each mpirun removes /tmp/ompi.HOST.UID if it is empty, while that of another worker starts.

    That one then ends with 1, sometimes without a word.
    """
    with tempfile.TemporaryDirectory(prefix="mpi", dir="/tmp") as folder:
        os.environ[_MPI_FOLDER] = folder
        yield
        del os.environ[_MPI_FOLDER]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test-fast` leaves out what starts ranks; the others run that first."""
    for item in items:
        module = getattr(item, "module", None)
        if any(value is starter for value in vars(module).values() for starter in _STARTERS):
            item.add_marker(pytest.mark.slow)
    # Whoever of the workers is done first has short ones left to take from the others.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test by itself goes to a worker that is free.

    Those of a file that share something go together: each worker would do its run anew.
    """
    # --dist loadgroup would do, but pytest 9 does not show xdist's groups to its scheduler.
    from xdist.scheduler import LoadScopeScheduling

    @functools.cache
    def shares(file: str) -> bool:
        return 'scope="module"' in (config.rootpath / file).read_text()

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if shares(file) else nodeid

    return Scheduling(config, log)
