"""Negotiation of the next tensors to reduce in patched Horovod (patch 0014)."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from hvdtrain.bench.processes import MARK, launch
from tests.support import warm

pytestmark = pytest.mark.slow
CYCLE_SECONDS = 0.5


@pytest.mark.parametrize("launcher", ["gloo", "mpi"])
def test_all_reduce_starts_without_waiting_for_cycle_end(launcher: str) -> None:
    rank = [warm.python(2), "-m", "hvdtrain.bench.allreduce_worker", "horovod", "4096"]
    settings = {"HOROVOD_CYCLE_TIME": str(1000 * CYCLE_SECONDS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        launch(launcher, 2, rank),
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout[done.stdout.index(MARK) :])
    assert measured["seconds"]["4096"] < CYCLE_SECONDS / 5
