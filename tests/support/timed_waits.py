"""Count the waits of a rank along the axes of a model that torch splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hvdtrain import comm
from hvdtrain.parallel.fsdp import Sharding, apply_shard
from hvdtrain.parallel.tensor import apply_tensor


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    found: Counter[str] = Counter()

    @contextmanager
    def waiting(axis: str) -> Iterator[None]:
        found[axis] += 1
        yield

    with patch.object(comm.COLLECTIVES, "waiting", waiting):
        yield found


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def count_waits() -> dict[str, int]:
    """Count the waits of a forward and a backward pass: FSDP's in forward and afterwards, and
    DTensor's."""
    found = {}
    model, mesh = _model(), init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    apply_shard(model, [*model], mesh, Sharding())
    with _counted() as waits:
        loss = model(torch.ones(2, 4)).sum()
        found["shard, forward"] = waits["shard"]
        loss.backward()
        found["shard, backward"] = waits["shard"] - found["shard, forward"]
    model = _model()
    apply_tensor(model, mesh, {"0": "column", "1": "row"})
    with _counted() as waits:
        model(torch.ones(2, 4)).sum().backward()
        found["tensor"] = waits["tensor"]
    return found
