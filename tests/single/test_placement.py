"""Ranks compare the hosts on which they run with those that their launcher announced."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from hvdtrain.launch.mpi import HOSTS_VARIABLE
from hvdtrain.process import placement
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.mesh import Topology
from tests.support.runs import TINY, start

HERE = socket.gethostname()
ELSEWHERE = "192.0.2.7"  # a documentation address (RFC 5737)


def _refused(monkeypatch: pytest.MonkeyPatch, announced: str, sizes: Sequence[int | None]) -> str:
    """Return why ranks refuse to start if all of them have this host's view."""
    monkeypatch.setattr(placement, "gather_json", lambda own, name: [own] * len(sizes))
    hosts = (HERE,) * len(sizes)
    topology = Topology(0, len(sizes), 0, len(sizes), hosts)
    try:
        placement.check_placement(topology, [(announced, size) for size in sizes])
    except AgreedError as error:
        return str(error)
    return ""


def test_ranks_that_fill_the_first_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    told = _refused(monkeypatch, f"{HERE}:2,{ELSEWHERE}:2", [4, 4, 4, 4])
    assert f"announced {HERE}:2,{ELSEWHERE}:2, but the MPI has started 4 ranks on {HERE}" in told
    assert "\n" not in told and "--controller gloo" in told


@pytest.mark.parametrize(
    ("announced", "sizes"),
    [
        ("", [2, 2]),  # by hand
        (f"{HERE}:2,{ELSEWHERE}:1", [1, 2, 2]),  # as announced, in any order
        ("no.such.name:1,other:2", [1, 2, 2]),  # names of no consequence
        (f"{HERE}:1,localhost:1", [2, 2]),  # two names of one host, and an MPI that knows it
        (f"{HERE}:1,localhost:1", [1, 1]),
        (f"{HERE}:1,127.0.0.1:1", [2, 2]),
        ("known-to-ssh-alone:1,other:1", [2, 2]),
        (f"{HERE}:2,{ELSEWHERE}:2", [2, 2]),  # started by a program of the announced job
        (f"{HERE}:1,{ELSEWHERE}:1", [None, 1]),  # a launcher that does not tell
    ],
)
def test_healthy_placements_are_accepted(
    monkeypatch: pytest.MonkeyPatch, announced: str, sizes: Sequence[int | None]
) -> None:
    assert _refused(monkeypatch, announced, sizes) == ""


@pytest.mark.slow
def test_wrong_placement_ends_all_ranks_with_one_message(tmp_path: Path) -> None:
    job = start(
        tmp_path / "output",
        [*TINY, "--run.root", str(tmp_path / "runs"), "--train.duration", "2"],
        "mpirun:2",
        {HOSTS_VARIABLE: f"{HERE}:1,{ELSEWHERE}:1"},
    )
    done = job.wait(120)
    assert done.returncode == 2, done
    assert done.stderr.count("hvdtrain: error: ") == 1, done
    assert "but the MPI has started 2 ranks on" in done.stderr, done
