"""Baseline for hvdtrain: a plain PyTorch training loop, alone or in DistributedDataParallel.

It trains the same model on the same samples with the same optimizer, on the same device and in the
same precision (fp16 without a loss scale). It has no checkpoints, no metrics and no elastic world
size, and does not use Horovod.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hvdtrain.config import Config
from hvdtrain.data.loader import has_own_order, to_device
from hvdtrain.data.order import build_order, specification_of
from hvdtrain.errors import UserError
from hvdtrain.optim.optimizer import build_optimizer, learning_rate, set_learning_rate
from hvdtrain.optim.precision import BF16_PARAMS, MasterWeights, build_precision, to_bfloat16
from hvdtrain.runtime.collectives import on_all_ranks
from hvdtrain.runtime.device import choose_device, seed_all
from hvdtrain.tasks import Task, optional

# Communication hooks of DistributedDataParallel that correspond to `exchange.wire`.
_WIRE_HOOKS = {
    "float16": default_hooks.fp16_compress_hook,
    "bfloat16": default_hooks.bf16_compress_hook,
}


class _WithLoss(nn.Module):
    """Model and loss in one forward pass, as DistributedDataParallel requires."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Any) -> tuple[Tensor, Any]:
        """Return (loss, None) for a mean, else (sum, weight)."""
        loss = self.task.loss(self.model, batch)["loss"]
        return loss if isinstance(loss, tuple) else (loss, None)


class PlainLoop:
    """The plain training loop.

    Args:
        task, dataset, config: as in hvdtrain.
        device: on which hvdtrain would train.
        rank, world_size: this process's share of the micro-batches, the number of which must be a
            multiple of world_size.
        exchange: average gradients over the ranks with DistributedDataParallel, in the format of
            `exchange.wire`; torch.distributed is already initialized.

    Raises:
        UserError: the dataset has no index.
    """

    def __init__(
        self,
        task: Task,
        dataset: Dataset[Any],
        config: Config,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
        exchange: bool = False,
    ) -> None:
        seed_all(config.seed)
        self.device, self.precision = device, build_precision(config.precision, device)
        self.model = task.model()
        if self.precision.name == BF16_PARAMS:
            to_bfloat16(self.model)
        self.model = self.model.to(device)
        groups = optional(task, "param_groups")
        self.optimizer = build_optimizer(
            config.optim, self.model, groups(self.model) if groups else None
        )
        if self.precision.name == BF16_PARAMS:
            self.optimizer = MasterWeights(self.optimizer)
        self.forward: nn.Module = _WithLoss(task, self.model)
        if exchange:
            self.forward = DistributedDataParallel(self.forward)
            hook = _WIRE_HOOKS.get(config.exchange.wire)
            if hook is not None:
                self.forward.register_comm_hook(None, hook)
        self.config = config
        self.passes = config.batch.micro_batches // world_size
        self.step = 0
        self.losses: list[float] = []
        if has_own_order(dataset):
            raise UserError(
                "hvdtrain bench: the plain PyTorch loop requires a dataset with an index"
            )
        specification = specification_of(dataset, config.loader)
        order = build_order(specification, config.seed, config.batch.global_size)
        samples = order.samples(0, config.train.steps * config.batch.global_size)
        micro_batches = samples.reshape(-1, config.batch.micro_samples)[rank::world_size]
        pinned = device.type == "cuda"
        loader = DataLoader(dataset, batch_sampler=micro_batches.tolist(), pin_memory=pinned)
        self.batches = iter(loader)

    def run(self, steps: int) -> float:
        """Train; return the seconds until the device has finished."""
        start = time.perf_counter()
        for _ in range(steps):
            self.losses.append(self._one_step())
        finish(self.device)
        return time.perf_counter() - start

    def _one_step(self) -> float:
        optim = self.config.optim
        rate = learning_rate(self.config.schedule, optim.lr, self.step, self.config.train.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.zero_grad()
        total, weights = torch.zeros((), device=self.device), []
        for i in range(self.passes):
            last = i == self.passes - 1
            with nullcontext() if last else self._no_exchange():
                batch = to_device(next(self.batches), self.device)
                with self.precision.autocast(self.device):
                    loss, weight = self.forward(batch)
                loss = loss / self.passes
                loss.backward()
            total += loss.detach()
            if weight is not None:
                weights.append(weight)
        if weights:
            total *= self._divide_by(weights)
        if optim.clip_norm > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip_norm)
        self.optimizer.step()
        self.step += 1
        return float(total)

    def _divide_by(self, weights: Sequence[Any]) -> float:
        """Scale gradients of sums to gradients of their mean; return the factor."""
        own = [torch.as_tensor(w, device=self.device).detach().double() for w in weights]
        total = torch.stack(own).sum()
        batches = len(weights)
        if isinstance(self.forward, DistributedDataParallel):  # gradients are already averages
            dist.all_reduce(total)
            batches *= dist.get_world_size()
        scale = batches / float(total) if total else 1.0
        # Private: one kernel for all gradients, as in a run. If it disappears, the comparison with
        # plain PyTorch fails; tests/single/test_torch_private.py detects it.
        torch._foreach_mul_([p.grad for p in self.model.parameters() if p.grad is not None], scale)
        return scale

    def _no_exchange(self) -> AbstractContextManager[None]:
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return nullcontext()


def finish(device: torch.device) -> None:
    """Wait until the device has done its work: calls return when CUDA kernels are launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def join_ranks(wanted: str = "cpu") -> torch.device:
    """Join torch.distributed with Horovod as the rendezvous, then shut Horovod down.

    For ranks that horovodrun started, on one or several hosts.

    Args:
        wanted: `runtime.device`.

    Returns:
        The device of this rank; torch.distributed exchanges over NCCL on GPUs.

    Raises:
        AgreedError: a rank has no device.
    """
    from hvdtrain.parallel.world import join
    from hvdtrain.runtime.init import initialize, shut_down

    topology = initialize()
    device = on_all_ranks("device", lambda: choose_device(topology, wanted))
    join(range(topology.world_size), topology, device)
    shut_down()
    return device
