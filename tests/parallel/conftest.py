"""Every rank of a launcher runs these tests; without a launcher they run with one rank.

`make test` starts each rank through .ci/as-rank, so that only rank 0 prints to the screen.
"""

from __future__ import annotations

import pytest

from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Topology


@pytest.fixture(scope="session")
def topology() -> Topology:
    """Start Horovod once per process."""
    return initialize()


@pytest.fixture(autouse=True)
def _together(topology: Topology, request: pytest.FixtureRequest) -> None:
    """Keep ranks in the same test: in different tests they would wait for each other forever."""
    from hvdtrain.runtime.collectives import broadcast_json

    assert broadcast_json(request.node.name, "test") == request.node.name
