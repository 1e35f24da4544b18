"""Interface of a gradient exchange, and what its implementations share.

Where a gradient is compressed depends on the implementation, which build.py selects:

- dense.py: in the last backward pass, when a bucket is complete, each gradient is cast to the wire
  dtype (wire.py; float16 is scaled first, float32 stays as it is), and Horovod sums the bucket.
  `reduce` sends gradients that no pass has reached, as zeros, waits for the sums and casts back.
- topk.py, powersgd.py: a bucket (bucketed.py) compresses and sends its gradients in `Bucket.send`,
  in the last backward pass, and decompresses them in `Bucket.receive`, in `reduce`. powersgd sends
  a second time in `Bucket.send_second_round`, also in `reduce`.
- exact.py, adasum.py: buckets as in topk.py, without compression. exact converts all gradients of a
  bucket to fixed point at once, for each micro-batch.
- spanning.py: sums the gradients of a model that spans ranks over its replicas, uncompressed, in
  `reduce`; along `shard`, FSDP has summed them in the backward pass.
- local_sgd.py: reduces no gradients; it averages parameters and optimizer state periodically.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.optim.optimizer import parameter_names
from hvdtrain.optim.trainable import SPARSE
from hvdtrain.runtime.state_part import StatePart

T = TypeVar("T", bound=Tensor)
# Result of a hook for a gradient that autograd is about to accumulate: None leaves it as it is,
# (tensor,) replaces it, and (None,) lets autograd accumulate nothing.
HookResult = tuple[Tensor | None, ...] | None

# Maximum size of a bucket. Large enough that its transfer takes longer than its negotiation.
BUCKET_BYTES = 8 << 20
# Lower bound of that limit, for small models: a message below it costs its latency.
SMALLEST_BUCKET_LIMIT = 1 << 20


class Exchange:
    """Replace each rank's gradients by the gradients of the global batch, over the data axis.

    A step consists of `begin(passes)`, that many backward passes, `reduce()`, the removal of
    gradients (`TrainedParameters.drop`), `agreed_norm(...)`, the optimizer step, and
    `commit(...)`; TrainStep (engine/step.py) is the caller. During the last backward pass most
    implementations compress and send gradients from hooks (GradientHooks), as listed at the top of
    this file. Every rank participates in each step, even if it has no backward pass or if a pass
    did not reach some parameters: these gradients are sent as zeros.

    `reduce` returns neither the norm nor the frozen parameters: both depend on the control vector
    (engine/step.py), whose all-reduce overlaps with the exchange. It carries the loss weights that
    scale the gradients, and the parameters that the ranks have frozen or reached.

    If a rank is lost, the waiting call raises RankLostError. An elastic run then shuts Horovod
    down, calls `abort()` (or drops the exchange, if a model spans ranks) and joins the next
    generation, which repeats the step.

    Args:
        trained: the parameters whose gradients are exchanged.

    Attributes:
        same_gradients: after `reduce` all ranks have the same gradients.
        inflight_seconds: from the start of the first bucket to the end of the last one, summed over
            the steps so far; an upper bound of the communication time.
        bytes: size of the gradients exchanged in these steps, in their wire format.
    """

    same_gradients = True

    def __init__(self, trained: TrainedParameters) -> None:
        self.trained = trained
        self.inflight_seconds = 0.0
        self.bytes = 0

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The exchanged parameters, in the model's order."""
        return self.trained.in_order

    def begin(self, passes: int) -> None:
        """Begin a step with this number of backward passes on this rank; may be 0."""

    def reached(self) -> Collection[nn.Parameter] | None:
        """Return the parameters to which this rank's passes of this step gave a gradient.

        None: unknown, or a parameter without a gradient may have one from an earlier step, in a
        residual: all parameters count as reached.
        """
        return None

    def memory(self) -> Mapping[nn.Parameter, Tensor]:
        """Return the tensors that replace `parameter.grad` between the passes of a step."""
        return {}

    def reduce(self) -> None:
        """Wait until every `parameter.grad` is the gradient of the global batch.

        Raises:
            RankLostError: another rank is gone.
        """
        raise NotImplementedError

    def agreed_norm(self, own: Tensor) -> Tensor:
        """Return the norm by which all ranks make the same decision whether to apply the step.

        Only local SGD, whose ranks keep different gradients, communicates here.

        Args:
            own: norm of the gradients on this rank.

        Raises:
            RankLostError: another rank is gone.
        """
        return own

    def commit(self, applied: bool) -> None:
        """Complete a step, after the update or after it was skipped (gradient not finite)."""

    def must_average(self, step: int, pauses: bool) -> bool:
        """Whether the ranks' states differ, and `average` is due now, as it is with local SGD.

        Args:
            step: steps done so far.
            pauses: the run or the generation ends with this step.
        """
        return False

    def average(self) -> None:
        """Make the ranks' states equal again.

        Raises:
            RankLostError: another rank is gone.
        """

    def due(self, step: int, every: int) -> bool:
        """Whether an action on the state that is taken every `every` steps is due after this step.

        Checkpoints have an interval of their own (engine/callbacks/checkpoint.py).
        """
        return step % every == 0

    def abort(self) -> None:
        """Discard what a failed step has left, so that the next step can begin.

        Call it after `hvd.shutdown()`, which ends every pending collective.
        """
        for parameter in self.parameters:
            parameter.grad = None

    def state_parts(self) -> Sequence[StatePart]:
        """Return the state that the exchange keeps from step to step."""
        return ()


class TrainedParameters:
    """Parameters of an optimizer, in the model's order: backward reaches them in reverse order.

    A task or a script may freeze parameters before or during a run (`requires_grad_(False)`) and
    unfreeze them again.
    Their gradients are still sent, as zeros, so that no rank waits for another and sums are rounded
    as before the freezing. Then `drop` removes them, and those of parameters that no pass of any
    rank has reached, as torch has None there. The optimizer skips these parameters: no momentum, no
    weight decay.

    Args:
        optimizer: over parameters of `model`.
        model: gives the parameters their names and their order.

    Attributes:
        in_order: the parameters.
        names: parameter -> its name.
        all_names: names of the parameters of all ranks, identical on all ranks. If a model spans
            ranks, spanning.py adds the names that are not on this rank.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.names = parameter_names(optimizer, model)
        self.in_order = [p for p in model.parameters() if p in self.names]
        self.all_names = [self.names[p] for p in self.in_order]
        # The optimizer does not have these: they were frozen when the model was created.
        self._unknown = [(n, p) for n, p in model.named_parameters() if p not in self.names]

    def frozen(self) -> list[bool]:
        """Return which of `all_names` the task has frozen on this rank.

        Raises:
            UnsupportedTaskError: a parameter was unfrozen that the optimizer does not have.
        """
        for name, parameter in self._unknown:
            if parameter.requires_grad:
                raise UnsupportedTaskError(
                    f"the model's parameter {name} was frozen when the run began, and the "
                    "optimizer does not have it: give it to the optimizer when that is created. A "
                    "frozen parameter may be in an optimizer; the built-in ones lack those that "
                    "are frozen when a task's model() returns"
                )
        frozen = {self.names[p] for p in self.in_order if not p.requires_grad}
        return [name in frozen for name in self.all_names]

    def drop(self, unused: Sequence[bool]) -> None:
        """Remove gradients of frozen and of unreached parameters; `unused`: equal on all ranks."""
        dropped = {name for name, drop in zip(self.all_names, unused, strict=True) if drop}
        for parameter in self.in_order if dropped else ():
            if self.names[parameter] in dropped:
                parameter.grad = None


@contextmanager
def trainable(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Make all parameters trainable inside the context: hooks need that of frozen ones, too."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def gradient_buckets(parameters: Sequence[T], widening: int = 1) -> list[list[T]]:
    """Return buckets whose gradients are sent while backward still computes others.

    Buckets are fixed groups of parameters in the order in which backward reaches them, so that
    Horovod reduces the same buffers in every run: with more than two ranks a ring all-reduce adds
    in an order that depends on the position in the buffer, and buffers fused by timing would make
    the last bit of a run depend on timing.

    A small model also has several buckets. The first one is small, so that it is sent early: until
    then the network is idle.

    Args:
        widening: bytes sent per byte of gradient.
    """
    total = sum(p.numel() * p.element_size() for p in parameters)
    limit = min(BUCKET_BYTES, max(SMALLEST_BUCKET_LIMIT, total // 4)) // widening
    return buckets(parameters, limit, first=limit // 8)


def buckets(
    parameters: Sequence[T], limit: int = BUCKET_BYTES, first: int | None = None
) -> list[list[T]]:
    """Group parameters, last first, into buckets of one dtype and at most `limit` bytes.

    A parameter larger than `limit` has its own bucket.

    Args:
        first: the first bucket is closed once it has this many bytes; None: it has the same limit
            as the others.
    """
    groups: list[list[T]] = []
    size = 0
    for parameter in reversed(parameters):
        full = first is not None and len(groups) == 1 and size >= first
        grown = size + parameter.numel() * parameter.element_size()
        if not groups or full or grown > limit or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            grown -= size
        groups[-1].append(parameter)
        size = grown
    return groups


class GradientHooks:
    """Hooks that count each parameter's gradients, up to the step's number of backward passes.

    bucketed.py sends a bucket in `complete`. Horovod's own hooks do so for dense.py.

    Args:
        groups: the buckets.
        on_gradient: called with a parameter, its gradient of one pass, and whether that is the
            step's last pass, before autograd adds the gradient to `parameter.grad`; the gradient is
            None if a pass gives none.
        complete: called with a bucket's number when all its gradients of the last pass have
            arrived.

    Attributes:
        reached: parameters to which a pass of this step gave a gradient.
        first_complete_at: time.perf_counter() when the step's first bucket was complete; None
            before.
    """

    def __init__(
        self,
        parameters: TrainedParameters,
        groups: Sequence[Sequence[nn.Parameter]],
        on_gradient: Callable[[nn.Parameter, Tensor | None, bool], HookResult],
        complete: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        self._on_gradient = on_gradient
        self._complete = complete
        self._bucket_of = {p: number for number, bucket in enumerate(groups) for p in bucket}
        self._bucket_sizes = [len(bucket) for bucket in groups]
        self._missing: list[int] = []  # parameters of each bucket that are not ready yet
        self._counts: dict[Tensor, int] = {}
        self._passes = 0
        self.reached: set[nn.Parameter] = set()
        self.first_complete_at: float | None = None
        # These hooks run before other hooks at the same node, and also if nothing is accumulated.
        # torch keeps neither nodes nor hooks alive.
        with trainable(parameters.in_order):
            self._nodes = [get_gradient_edge(p).node for p in parameters.in_order]
        self._hooks = [
            node.register_prehook(partial(self._count, parameter))
            for node, parameter in zip(self._nodes, parameters.in_order, strict=True)
        ]

    def begin(self, passes: int) -> None:
        """Begin a step of at least one backward pass."""
        self._passes = passes
        self._counts.clear()
        self.reached.clear()
        self._missing = list(self._bucket_sizes)
        self.first_complete_at = None

    def unreached(self) -> list[nn.Parameter]:
        """Parameters that some pass has not reached so far."""
        return [p for p in self._parameters.in_order if self._counts.get(p, 0) < self._passes]

    def incomplete(self) -> list[int]:
        """Numbers of the incomplete buckets."""
        return [number for number, missing in enumerate(self._missing) if missing]

    def stop(self) -> None:
        """Remove the hooks and stop counting."""
        while self._hooks:
            self._hooks.pop().remove()

    def _count(self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> HookResult:
        gradient = gradients[0]
        if gradient is not None and gradient.layout != torch.strided:
            name = self._parameters.names[parameter]
            raise UnsupportedTaskError(f"the model's parameter {name} {SPARSE}")
        if gradient is not None:
            self.reached.add(parameter)
        self._counts[parameter] = reached = self._counts.get(parameter, 0) + 1
        if reached > self._passes:
            name = self._parameters.names[parameter]
            raise UnsupportedTaskError(
                f"the model's parameter {name} received its gradient more than once in a backward "
                "pass, as reentrant checkpointing of a layer that is used twice does: give "
                "torch.utils.checkpoint use_reentrant=False"
            )
        last = reached == self._passes
        result = self._on_gradient(parameter, gradient, last)
        if last:
            bucket = self._bucket_of[parameter]
            self._missing[bucket] -= 1
            if self._missing[bucket] == 0:
                if self.first_complete_at is None:
                    self.first_complete_at = time.perf_counter()
                self._complete(bucket)
        return result
