"""Local SGD and DiLoCo: ranks step on their own, and their states are averaged periodically.

Stich, "Local SGD converges fast and communicates little", arXiv:1805.09767; Douillard et al.,
"DiLoCo: distributed low-communication training of language models", arXiv:2311.08105.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import EXIT_USER, UnsupportedTaskError
from hvdtrain.exchange.base import Exchange, TrainedParameters, buckets
from hvdtrain.optim.trainable import SPARSE
from hvdtrain.runtime.collectives import AgreedError, begin_sum, completed, sum_
from hvdtrain.runtime.horovod import hvd
from hvdtrain.runtime.state_part import Scope, StatePart

# Nothing is computed meanwhile, so only the memory of its copy limits a bucket.
_BUCKET_BYTES = 64 << 20
_DIGESTS = 1 << 16  # so that sums of squares over a million ranks are exact


@dataclass(frozen=True)
class Nesterov:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on start minus average of a period.

    Args:
        lr: its learning rate.
        momentum: in (0, 1).
    """

    lr: float
    momentum: float


class LocalSgd(Exchange):
    """See Exchange. A rank steps with the mean gradient of its own micro-batches.

    `average` replaces parameters by their mean over the ranks, weighted with the number of each
    rank's micro-batches since the last average. A step with plain SGD followed by an average
    therefore equals a step of `dense`. With an outer optimizer, its result from start and mean
    replaces the parameters.

    The inner optimizer's state (momenta, second moments) is averaged too. If each rank kept its
    own, as in DiLoCo's paper, a rank that joins would have none, and a checkpoint would fit only
    one number of ranks. With averaging, all ranks are replicas after each average, which all other
    code relies on. Convergence is also proven for averaging (Local Adam; Iacob et al.,
    arXiv:2505.22549, compare both). The cost is bytes: with AdamW three times the bytes of the
    parameters.

    The states are averaged every `every` steps, and after a step with which the run or the
    generation ends. In between, a step that fails may change some of the state, and Snapshot holds
    the state to restore.

    Buffers are not changed: BatchNorm's statistics are averaged in each step, see BatchStatistics.

    Args:
        optimizer: the inner one, over parameters of `model`.
        model: gives the parameters their names.
        micro_batches: in one step, over all ranks together.
        every: steps from one average to the next.
        outer: None: parameters become their mean.

    Attributes:
        diverged: a step was begun since the last average: each rank has its own parameters and
            optimizer state.
    """

    same_gradients = False

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        micro_batches: int,
        every: int,
        outer: Nesterov | None = None,
    ) -> None:
        super().__init__(TrainedParameters(optimizer, model))
        self.every = every
        self.diverged = False
        self._optimizer = optimizer
        self._micro_batches = micro_batches
        self._outer = outer
        kept = self.parameters if outer else []
        self._start = [p.detach().clone() for p in kept]  # values at the last average
        self._momentum = {p: torch.zeros_like(p, requires_grad=False) for p in kept}
        self._passes = 0  # of this step
        # Since the last average: steps, backward passes, and changed parameters.
        self._steps = self._all_passes = 0
        self._moved: set[nn.Parameter] = set()

    def begin(self, passes: int) -> None:
        if not self.diverged:
            for start, parameter in zip(self._start, self.parameters, strict=bool(self._start)):
                start.copy_(parameter.detach())
            self._steps = self._all_passes = 0
            self._moved.clear()
        self.diverged = True
        self._passes = passes

    @torch.no_grad()
    def reduce(self) -> None:
        """Turn gradients, sums divided by all ranks' micro-batches, into this rank's mean."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout != torch.strided:
                name = self.trained.names[parameter]
                raise UnsupportedTaskError(f"the model's parameter {name} {SPARSE}")
            if self._passes:
                parameter.grad.mul_(self._micro_batches / self._passes)

    def agreed_norm(self, own: Tensor) -> Tensor:
        """Return the root mean square of all ranks' norms: non-finite on all ranks if on any.

        Raises:
            AgreedError: a script has deleted gradients on some ranks only.
        """
        missing = [self.trained.names[p] for p in self.parameters if p.grad is None]
        digest = float(zlib.crc32(repr(missing).encode()) % _DIGESTS)
        values = own.new_tensor([0.0, digest, digest * digest], dtype=torch.float64)
        values[0] = own.detach().double().square()
        square, total, squares = sum_(values, "local_sgd.norm").tolist()
        if squares * hvd.size() != total * total:  # exact: they are integers
            raise AgreedError(
                "a script has set p.grad = None on some ranks only, which cannot be averaged: "
                "freeze parameters in the same step on all ranks, for example by the step's index",
                EXIT_USER,
                rank=0,
            )
        return torch.tensor(math.sqrt(square / hvd.size()), dtype=torch.float64)

    def commit(self, applied: bool) -> None:
        if not applied:
            return
        self._steps += 1
        self._all_passes += self._passes
        # Others are frozen, or a script has deleted their gradients on all ranks.
        self._moved.update(p for p in self.parameters if p.grad is not None)

    def must_average(self, step: int, pauses: bool) -> bool:
        return pauses or step % self.every == 0

    def due(self, step: int, every: int) -> bool:
        """Postpone an action that was due between two averages to the second one."""
        if self.diverged:
            return False
        before = (step - 1) // self.every * self.every
        return step // every > before // every

    @torch.no_grad()
    def average(self) -> None:
        """Make parameters and optimizer state identical on every rank.

        Raises:
            RankLostError: another rank is gone; some tensors may be averaged, and others
                not.
        """
        moved = [p for p in self.parameters if p in self._moved]  # others stay bitwise unchanged
        if hvd.size() > 1 and moved:
            began = time.perf_counter()
            weight = self._all_passes / (self._steps * self._micro_batches)
            groups = buckets([*moved, *self._state_of(moved)], _BUCKET_BYTES)
            for number, group in enumerate(groups):
                self.bytes += _average(group, weight, f"local_sgd.{number}")
            self.inflight_seconds += time.perf_counter() - began
        if self._outer is not None:
            self._step_outer(self._outer)
        self.diverged = False

    def _state_of(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """State of the inner optimizer, except step counts, which are identical on all ranks."""
        entries = [entry for p in parameters for entry in sorted(self._optimizer.state[p].items())]
        return [value for name, value in entries if name != "step" and isinstance(value, Tensor)]

    def _step_outer(self, outer: Nesterov) -> None:
        for parameter, start in zip(self.parameters, self._start, strict=True):
            if parameter not in self._moved:
                continue
            gradient = start - parameter
            momentum = self._momentum[parameter].mul_(outer.momentum).add_(gradient)
            step = gradient.add_(momentum, alpha=outer.momentum)
            parameter.copy_(start.add(step, alpha=-outer.lr))

    def state_parts(self) -> Sequence[StatePart]:
        names = self.trained.names
        return [_Momentum({names[p]: t for p, t in self._momentum.items()})] if self._outer else []

    def abort(self) -> None:
        """Mark the state as common; the caller has restored the last state that all ranks had."""
        self.diverged = False
        super().abort()


class _Momentum:
    """The replicated part "outer": the outer optimizer's momentum, by parameter name."""

    name = "outer"
    scope: Scope = "replicated"

    def __init__(self, momentum: dict[str, Tensor]) -> None:
        self._momentum = momentum

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}/momentum": tensor for name, tensor in self._momentum.items()}

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        for name, own in self.tensors().items():
            own.zero_() if not saved else own.copy_(saved[0][name])


def _average(tensors: Sequence[Tensor], weight: float, name: str) -> int:
    """Replace each tensor by its sum over the ranks, weighted per rank; return the bytes sent.

    Tensors are sent one bucket after another: buckets that Horovod fuses by timing would be added
    in another order.
    """
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in tensors]).mul_(weight)
    completed(begin_sum(flat, name))
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
    return flat.nbytes
