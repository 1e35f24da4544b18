"""Marks and fixtures of tests that start ranks."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from tests.support import runs
from tests.support.torch_ranks import on_torch_ranks

_MPI_DIRECTORY = "OMPI_MCA_orte_tmpdir_base"
_STARTERS = (runs, runs.start, runs.run, runs.train, on_torch_ranks)


@pytest.fixture(scope="session", autouse=True)
def _directory_of_mpirun() -> Iterator[None]:
    """Give each worker its own directory for mpirun.

    Each mpirun removes /tmp/ompi.HOST.UID if it is empty, even while another worker's mpirun
    starts, which then exits with 1, sometimes without a message.
    """
    with tempfile.TemporaryDirectory(prefix="mpi", dir="/tmp") as directory:
        os.environ[_MPI_DIRECTORY] = directory
        yield
        del os.environ[_MPI_DIRECTORY]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Return the files of a self-signed certificate for 127.0.0.1 and of its key."""
    directory = tmp_path_factory.mktemp("tls")
    files = str(directory / "cert.pem"), str(directory / "key.pem")
    command = shlex.split(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=node1"
        f" -addext subjectAltName=IP:127.0.0.1 -out {files[0]} -keyout {files[1]}"
    )
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return files


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start ranks, which `make test-fast` omits, and run them first otherwise."""
    for item in items:
        module = getattr(item, "module", None)
        if any(value is starter for value in vars(module).values() for starter in _STARTERS):
            item.add_marker(pytest.mark.slow)
    # The worker that finishes first then has short tests left to take over.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
