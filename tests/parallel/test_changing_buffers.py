"""Agreement of the ranks on the buffers that forward passes change."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain.engine.accumulate import SavedBuffers
from hvdtrain.engine.changing_buffers import ChangingBuffers
from hvdtrain.runtime.mesh import Topology


class Seen(nn.Module):
    """Keeps its last input as an attribute, which does not exist before the first pass."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach()
        self.count += 1 + x[0, 0]
        return x * self.weight


def test_attribute_of_ranks_that_have_trained_is_ignored_on_a_new_rank(topology: Topology) -> None:
    model = Seen()
    if topology.rank == 0:  # the others have just joined
        model(torch.ones(3, 2))
    model.count.zero_()
    saved = SavedBuffers(model)
    changing = ChangingBuffers(model, saved.by_place, saved.add)
    agreements = 0
    for step in range(3):
        saved.keep()
        changing.begin()
        model(torch.full((3, 2), float(10 * step + topology.rank)))
        changing.end()
        if step == 0 or changing.news:
            agreements += 1
            changing.agree(topology)
        changing.share(1, topology)
    assert agreements == 1
    assert model.count == 3 + 30 + 3, "of rank 1"
    assert model.last[0, 0] == 20 + topology.rank
