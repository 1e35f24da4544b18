"""Ranks that `small_steps` compares: the same training of a small model by several libraries.

python -m hvdtrain.train --task tests.soak.bench.small_steps_ranks:Medium --key value
python small_steps_ranks.py loop medium --key value
python small_steps_ranks.py {plain,lightning,accelerate,ddp} medium METRICS

The scripts of the last line do not import hvdtrain, and write only the time of each step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    from hvdtrain.tasks import Datasets

BATCH = 32
# A plain step takes about 0.6, 1.2 and 6 ms of CPU time.
WIDTHS = {"small": (64, 1), "medium": (64, 128, 128, 1), "large": (64, 512, 512, 512, 1)}
LIGHTNING = Path(__file__).resolve().parents[3] / "build/lightning"


def data() -> TensorDataset:
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS[name]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


class Small:
    """The task of the small model."""

    name = "small"

    def datasets(self) -> Datasets:
        from hvdtrain.tasks import Datasets

        return Datasets(data())

    def model(self) -> nn.Module:
        return network(self.name)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": mse_loss(model(batch[0]), batch[1])}

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model)

    def schedule(self, step: int) -> None:
        """Leave the learning rate to the optimizer."""


class Medium(Small):
    name = "medium"


class Large(Small):
    name = "large"


TASKS = {task.name: task.__name__ for task in (Small, Medium, Large)}


def loop(name: str) -> None:
    import hvdtrain

    model = network(name)
    with hvdtrain.training(model, adamw(model), data()) as training:
        for step in training:
            with step:
                for x, y in step:
                    step.backward(mse_loss(model(x), y))


class StepTimes:
    """Writes a line at the end of each step, in one call."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def __call__(self) -> None:
        os.write(self._file, b'{"time": %.6f}\n' % time.time())


def plain(name: str, ended: Callable[[], None]) -> None:
    model = network(name)
    _train(model, adamw(model), DataLoader(data(), BATCH, shuffle=True), ended)


def accelerate(name: str, ended: Callable[[], None]) -> None:
    from accelerate import Accelerator

    accelerator, own = Accelerator(cpu=True), network(name)
    loader = DataLoader(data(), BATCH, shuffle=True)
    model, optimizer, batches = accelerator.prepare(own, adamw(own), loader)
    _train(model, optimizer, batches, ended, accelerator.backward)


def ddp(name: str, ended: Callable[[], None]) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network(name))
    dataset = data()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, BATCH // dist.get_world_size(), sampler=sampler)
    on_first = ended if dist.get_rank() == 0 else lambda: None
    _train(model, adamw(model), loader, on_first, begin_epoch=sampler.set_epoch)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Iterable[Any],
    ended: Callable[[], None],
    backward: Callable[[Tensor], None] = Tensor.backward,
    begin_epoch: Callable[[int], None] = lambda epoch: None,
) -> None:
    for epoch in count():
        begin_epoch(epoch)
        for x, y in loader:
            backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            ended()


def lightning(name: str, ended: Callable[[], None]) -> None:
    sys.path.append(str(LIGHTNING))
    from pytorch_lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(name)

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            ended()  # the step before
            return mse_loss(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(data(), BATCH, shuffle=True))


SCRIPTS = {one.__name__: one for one in (plain, lightning, accelerate, ddp)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, name_of_model, *others = sys.argv[1:]
    if kind == "loop":
        loop(name_of_model)
    else:
        SCRIPTS[kind](name_of_model, StepTimes(others[0]))
