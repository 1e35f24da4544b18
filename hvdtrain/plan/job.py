"""What is trained: the seconds and the bytes of a step, as one rank has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hvdtrain.data.config import BatchConfig
from hvdtrain.errors import UserError, require
from hvdtrain.exchange.buckets import BUCKET_BYTES, SMALLEST_BUCKET_BYTES, gradient_buckets


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Args:
        elements: of all its parameters.
        ready: fraction of the backward pass after which all of them are there, in [0, 1].
        matrices: (rows, columns) of those that PowerSGD may send as two thin ones; None: the
            shapes are not known.
    """

    elements: int
    ready: float
    matrices: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        require(self.elements >= 1, f"a bucket has 1 element or more, not {self.elements}")
        require(0 <= self.ready <= 1, f"a bucket is ready in [0, 1], not {self.ready}")


@dataclass(frozen=True)
class StrategyCost:
    """Seconds of a rank's own arithmetic in a step, beside those of a dense exchange.

    Args:
        before: until its gradients are sent, beside the backward pass.
        after: from what has arrived to gradients.
    """

    before: float = 0.0
    after: float = 0.0


@dataclass(frozen=True)
class Job:
    """One rank's work.

    Args:
        forward_seconds, backward_seconds: of a micro-batch, its data included.
        optimizer_seconds: of a step over all parameters.
        other_seconds: of a step: the record, metrics and the like.
        micro_batches: of a step, over all ranks together.
        micro_size: samples of a micro-batch.
        buckets: in the order in which they are sent.
        costs: strategy -> its arithmetic; a strategy that is missing is not known.
        element_bytes: of a parameter and of its gradient.
        optimizer_bytes: of its state, whole.
        activation_bytes: that a micro-batch keeps for its backward pass; None: not known.
        blocks: that the model consists of, which ranks can share; 0: not known.
        block_bytes: of what a block gives to the next one, of a micro-batch.
        outside_bytes: of parameters that lie in no block; 0: none do, or it is not known.
        control_bytes: all-reduced beside the last backward pass: losses and what ranks agree on.
    """

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float
    micro_batches: int
    micro_size: int
    buckets: tuple[Bucket, ...]
    costs: Mapping[str, StrategyCost] = field(default_factory=lambda: {"dense": StrategyCost()})
    element_bytes: int = 4
    optimizer_bytes: float = 0.0
    activation_bytes: float | None = None
    blocks: int = 0
    block_bytes: float = 0.0
    outside_bytes: float = 0.0
    control_bytes: int = 1024

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, "a step has 1 micro-batch or more")
        require(bool(self.buckets), "a model without a parameter has nothing to exchange")
        require("dense" in self.costs, "every job can be exchanged dense")
        require(
            "powersgd" not in self.costs or all(b.matrices is not None for b in self.buckets),
            "powersgd is known only where the shapes of the parameters are",
        )

    @property
    def parameters(self) -> int:
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def parameter_bytes(self) -> int:
        return self.parameters * self.element_bytes

    @property
    def samples(self) -> int:
        """Of a step, over all ranks."""
        return self.micro_batches * self.micro_size


def require_micro_size(batch: BatchConfig) -> None:
    """A job's micro-batches all have batch.micro_size samples.

    Raises:
        UserError: theirs have not.
    """
    if batch.max_tokens or batch.per_rank_size:
        raise UserError(
            "hvdtrain plan takes micro-batches of batch.micro_size samples: give "
            "batch.global_size and batch.micro_size, not batch.max_tokens or batch.per_rank_size"
        )


def buckets_of(parameters: Sequence[Tensor], ready: Mapping[Tensor, float]) -> tuple[Bucket, ...]:
    """The buckets of a run with these parameters, in the model's order.

    Args:
        ready: fraction of the backward pass after which a parameter's gradient is there.
    """
    found = []
    for group in gradient_buckets(parameters):
        matrices = tuple((len(p), p.numel() // len(p)) for p in group if p.dim() >= 2)
        last = max(ready[p] for p in group)
        found.append(Bucket(sum(p.numel() for p in group), min(1.0, last), matrices))
    return tuple(found)


def evenly_ready(parameters: Sequence[Tensor]) -> tuple[Bucket, ...]:
    """As `buckets_of`, of gradients that come last first, each in proportion to its size."""
    ready: dict[Tensor, float] = {}
    done, whole = 0, sum(p.numel() for p in parameters)
    for parameter in reversed(parameters):
        done += parameter.numel()
        ready[parameter] = done / whole
    return buckets_of(parameters, ready)


def even_buckets(elements: int, element_bytes: int = 4) -> tuple[Bucket, ...]:
    """Buckets of a model of which the size alone is known.

    They are as large as a run's would be, and are ready one after the other, each in proportion to
    its size.
    """
    total = elements * element_bytes
    limit = min(BUCKET_BYTES, max(SMALLEST_BUCKET_BYTES, total // 4)) // element_bytes
    found: list[Bucket] = []
    done = 0
    while done < elements:
        size = min(limit if found else max(1, limit // 8), elements - done)
        done += size
        found.append(Bucket(size, done / elements))
    return tuple(found)
