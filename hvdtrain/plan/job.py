"""Description of a training job: the seconds and bytes of a step on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hvdtrain.data.config import BatchConfig
from hvdtrain.errors import UserError, require
from hvdtrain.exchange.base import BUCKET_BYTES, SMALLEST_BUCKET_LIMIT, gradient_buckets


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that are sent together.

    Args:
        elements: number of elements of all its parameters.
        ready: fraction of the backward pass after which all gradients are ready, in [0, 1].
        matrices: (rows, columns) of the gradients that PowerSGD may send as two thin matrices;
            None: the shapes are unknown.
    """

    elements: int
    ready: float
    matrices: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        require(self.elements >= 1, f"a bucket has at least 1 element, not {self.elements}")
        require(0 <= self.ready <= 1, f"a bucket is ready in [0, 1], not {self.ready}")


@dataclass(frozen=True)
class StrategyCost:
    """Seconds of a rank's own arithmetic per step, in addition to a dense exchange.

    Args:
        before: until its gradients are sent, concurrent with the backward pass.
        after: from the received data to gradients.
    """

    before: float = 0.0
    after: float = 0.0


@dataclass(frozen=True)
class JobProfile:
    """Work of one rank.

    Args:
        forward_seconds, backward_seconds: per micro-batch, loading its data included.
        optimizer_seconds: per step, over all parameters.
        other_seconds: per step: the record, metrics and similar work.
        micro_batches: per step, over all ranks.
        micro_size: samples per micro-batch.
        buckets: in the order in which they are sent.
        costs: strategy -> its arithmetic; a missing strategy is unknown.
        element_bytes: bytes per element of parameters and gradients.
        optimizer_bytes: bytes of the whole optimizer state.
        activation_bytes: saved by a micro-batch for its backward pass; None: unknown.
        blocks: number of model blocks that ranks can split; 0: unknown.
        block_bytes: output of a block for one micro-batch.
        outside_bytes: bytes of parameters in no block; 0: there are none, or it is unknown.
        control_bytes: all-reduced during the last backward pass: losses and agreements of ranks.
    """

    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    other_seconds: float
    micro_batches: int
    micro_size: int
    buckets: tuple[GradientBucket, ...]
    costs: Mapping[str, StrategyCost] = field(default_factory=lambda: {"dense": StrategyCost()})
    element_bytes: int = 4
    optimizer_bytes: float = 0.0
    activation_bytes: float | None = None
    blocks: int = 0
    block_bytes: float = 0.0
    outside_bytes: float = 0.0
    control_bytes: int = 1024

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, "a step has at least 1 micro-batch")
        require(bool(self.buckets), "a model without parameters has nothing to exchange")
        require("dense" in self.costs, "every job can be exchanged dense")
        require(
            "powersgd" not in self.costs or all(b.matrices is not None for b in self.buckets),
            "powersgd requires the shapes of the parameters",
        )

    @property
    def parameters(self) -> int:
        return sum(bucket.elements for bucket in self.buckets)

    @property
    def parameter_bytes(self) -> int:
        return self.parameters * self.element_bytes

    @property
    def samples(self) -> int:
        """Samples per step, over all ranks."""
        return self.micro_batches * self.micro_size


def require_micro_size(batch: BatchConfig) -> None:
    """Require that all micro-batches of a job have batch.micro_size samples.

    Raises:
        UserError: the configuration allows other sizes.
    """
    if batch.max_tokens or batch.per_rank_size or batch.micro_size == "auto":
        raise UserError(
            "hvdtrain plan requires micro-batches of batch.micro_size samples: give "
            "batch.global_size and a number for batch.micro_size, not batch.max_tokens or "
            "batch.per_rank_size"
        )


def buckets_of(
    parameters: Sequence[Tensor], ready: Mapping[Tensor, float]
) -> tuple[GradientBucket, ...]:
    """The buckets of a run with these parameters, in the model's order.

    Args:
        ready: fraction of the backward pass after which a parameter's gradient is ready.
    """
    found = []
    for group in gradient_buckets(parameters):
        matrices = tuple((len(p), p.numel() // len(p)) for p in group if p.dim() >= 2)
        last = max(ready[p] for p in group)
        found.append(GradientBucket(sum(p.numel() for p in group), min(1.0, last), matrices))
    return tuple(found)


def evenly_ready(parameters: Sequence[Tensor]) -> tuple[GradientBucket, ...]:
    """Like `buckets_of`, for gradients ready in reverse order, each in proportion to its size."""
    ready: dict[Tensor, float] = {}
    done, whole = 0, sum(p.numel() for p in parameters)
    for parameter in reversed(parameters):
        done += parameter.numel()
        ready[parameter] = done / whole
    return buckets_of(parameters, ready)


def even_buckets(elements: int) -> tuple[GradientBucket, ...]:
    """Buckets of a model of which only the size is known.

    They are as large as the buckets of a run, and become ready one after the other, each in
    proportion to its size.
    """
    # At 4 bytes per element, a quarter of all bytes has `elements` bytes.
    limit = min(BUCKET_BYTES, max(SMALLEST_BUCKET_LIMIT, elements)) // 4
    found: list[GradientBucket] = []
    done = 0
    while done < elements:
        size = min(limit if found else max(1, limit // 8), elements - done)
        done += size
        found.append(GradientBucket(size, done / elements))
    return tuple(found)


# --- assumptions in place of properties that were not measured ---------------


# Share of a forward and a backward pass: two of three matrix products.
BACKWARD_SHARE = 2 / 3


def free_wires() -> dict[str, StrategyCost]:
    """Costs of the exchanges that are nearly free: they convert each gradient once."""
    return {name: StrategyCost() for name in ("dense", "float16", "bfloat16")}
