"""Ranks that `own_loop` compares: the same training as a task, as an own loop, and with Horovod.

python -m hvdtrain.train --task tests.soak.bench.own_loop_ranks:Mlp --key value
python own_loop_ranks.py loop --key value
python own_loop_ranks.py horovod RUN
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.tasks import Datasets

MICRO_SIZE, MICRO_BATCHES = 16, 4
WIDTH = 768


def data() -> TensorDataset:
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.GELU(), *hidden, nn.Linear(WIDTH, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


class Mlp:
    """The task."""

    def datasets(self) -> Datasets:
        return Datasets(data())

    def model(self) -> nn.Module:
        return network()

    def loss(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": mse_loss(model(batch[0]), batch[1])}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model)

    def schedule(self, step: int) -> None:
        """Leave the learning rate to the optimizer."""


def loop() -> None:
    import hvdtrain

    model = network()
    with hvdtrain.training(model, adamw(model), data()) as training:
        for step in training:
            with step:
                for x, y in step:
                    step.backward(mse_loss(model(x), y))


def with_horovod(run: Path) -> None:
    import horovod.torch as hvd

    hvd.init()
    dataset, model = data(), network()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, hvd.size(), hvd.rank())
    loader = DataLoader(dataset, batch_size=MICRO_SIZE, sampler=sampler)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    passes = MICRO_BATCHES // hvd.size()
    optimizer = hvd.DistributedOptimizer(
        adamw(model), named_parameters=model.named_parameters(), backward_passes_per_step=passes
    )
    run.mkdir(parents=True, exist_ok=True)
    with (run / f"{'metrics' if hvd.rank() == 0 else 'other'}.jsonl").open(
        "w", buffering=1
    ) as file:
        for epoch in range(sys.maxsize):
            sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(loader, start=1):
                loss = mse_loss(model(x), y) / passes
                loss.backward()
                if number % passes == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    file.write(json.dumps({"time": time.time(), "loss": loss.item()}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop() if sys.argv[1] == "loop" else with_horovod(Path(sys.argv[2]))
