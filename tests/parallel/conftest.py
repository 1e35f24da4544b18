"""Every rank of a launcher runs these tests alike; without a launcher they run with one rank.

`make test` starts each rank through .ci/as-rank, so that only rank 0 is heard.
"""

from __future__ import annotations

import pytest

from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Topology


@pytest.fixture(scope="session")
def topology() -> Topology:
    """Horovod is started once in a process."""
    return initialize()


@pytest.fixture(autouse=True)
def _together(topology: Topology, request: pytest.FixtureRequest) -> None:
    """Ranks that are in different tests would wait for each other without end."""
    from hvdtrain.runtime.collectives import broadcast_json

    assert broadcast_json(request.node.name, "test") == request.node.name
