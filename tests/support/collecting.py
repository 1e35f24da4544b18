"""A task that calls hvdtrain.comm wherever it may."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hvdtrain import comm
from hvdtrain.tasks import Datasets
from tests.support.tasks import Paced


class Collecting(Paced):
    """Paced, with the same losses: they are multiplied by a 1 that all ranks compute."""

    def datasets(self) -> Datasets:
        assert comm.broadcast(torch.tensor(comm.rank()), root=comm.size() - 1) == comm.size() - 1
        return super().datasets()

    def model(self) -> nn.Module:
        comm.barrier()
        return super().model()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        weights = comm.all_gather(next(p for p in model.parameters() if p.dim() == 2).detach())
        assert len(weights) == comm.size() and (weights == weights[0]).all(), "ranks differ"
        mode = torch.tensor([float(model.training), 1 - model.training])
        assert comm.reduce_scatter(mode.repeat(comm.size())).sum() == comm.size()
        one = comm.all_reduce(mode, "mean").sum()
        return {"loss": super().loss(model, batch)["loss"] * one}
