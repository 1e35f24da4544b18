"""Ranks of layout_speed.py: hvdtrain and a torch-only script, in turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

from hvdtrain.bench.app import AppLoop
from hvdtrain.config import Config, Settings
from hvdtrain.data.order import sample_order
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.optim.optimizer import learning_rate, set_learning_rate
from hvdtrain.parallel.world import leave
from hvdtrain.process.data import build_data
from hvdtrain.runtime.device import seed_all
from hvdtrain.tasks import Task
from tests.soak.bench.torch_scripts import SCRIPTS

_WARM_UP_STEPS = 5


class TorchLoop:
    """Train on the same micro-batches as hvdtrain, in the same order; see torch_scripts.py.

    Args:
        axis: key of SCRIPTS; torch's default group has all its ranks.

    Attributes:
        loss: loss of the last step, as far as this rank knows it.
    """

    def __init__(self, task: Task, dataset: Dataset[Any], config: Config, axis: str) -> None:
        ranks = dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=(axis,))
        seed_all(config.seed)
        model = task.model()
        if not isinstance(model, GPT):
            raise UserError("layout-speed: torch's scripts are for the GPT")
        self._script = SCRIPTS[axis](task, model, mesh)
        optim = config.optim
        decayed = [p for p in self._script.parameters if p.dim() >= 2]
        others = [p for p in self._script.parameters if p.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": optim.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            betas=optim.betas,
            eps=optim.eps,
            foreach=True,
        )
        self._config, self._step, self.loss = config, 0, 0.0
        first, every = (mesh.get_local_rank(), ranks) if axis == "shard" else (0, 1)
        self._passes = config.batch.micro_batches // every
        size, steps = len(dataset), config.train.steps  # type: ignore[arg-type]
        order = sample_order(0, steps * config.batch.global_size, size, config.seed)
        own = order.reshape(-1, config.batch.micro_samples)[first::every]
        self._batches = iter(DataLoader(dataset, batch_sampler=own.tolist()))

    def run(self, steps: int) -> None:
        """Train."""
        for _ in range(steps):
            self._one_step()

    def _one_step(self) -> None:
        config = self._config
        rate = learning_rate(config.schedule, config.optim.lr, self._step, config.train.steps)
        set_learning_rate(self._optimizer, rate)
        self._optimizer.zero_grad()
        loss = self._script.backward([next(self._batches) for _ in range(self._passes)])
        if config.optim.clip_norm > 0:
            self._script.clip(config.optim.clip_norm)
        self._optimizer.step()
        self.loss = float(loss)
        self._step += 1


def take_turns(settings: Settings, steps: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Return the step times of both, in turns of one job, and the final difference of their losses.

    Args:
        settings: one axis of `parallel` has all ranks.
    """
    config = settings.config
    config.train.duration = _WARM_UP_STEPS + rounds * steps + 1  # it never ends
    axis = next(axis for axis, degree in config.parallel.degrees.items() if degree > 1)
    task, datasets = build_data(settings)
    app = AppLoop(settings, directory, (task, datasets))
    plain = TorchLoop(task, datasets.train, config, axis)
    loops: dict[str, AppLoop | TorchLoop] = {"hvdtrain": app, "torch": plain}
    for loop in loops.values():
        loop.run(_WARM_UP_STEPS)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds):
        for name in sorted(loops, reverse=turn % 2 == 1):  # alternate which one begins
            dist.barrier()
            begin = time.perf_counter()
            loops[name].run(steps)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / steps)
    loss = torch.tensor(plain.loss, dtype=torch.float64)
    dist.all_reduce(loss)
    if axis in ("shard", "tensor"):  # only of the last stage of a pipeline
        loss /= dist.get_world_size()
    record = app._loop.progress.record
    assert record is not None
    own = float(record["loss"])
    apart = abs(own - float(loss)) / own
    leave()
    return {"seconds": seconds, "apart": apart} if app.rank == 0 else {}
