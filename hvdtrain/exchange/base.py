"""Interface of a gradient exchange, which every step uses.

Where a gradient is compressed depends on the implementation, which build.py selects:

- dense.py: Horovod casts a bucket to the wire dtype (wire.py) and sums it, in the last backward
  pass.
- topk.py, powersgd.py: a bucket (bucketed.py) compresses and sends its gradients in `Bucket.send`,
  in the last backward pass, and decompresses them in `Bucket.receive`, in `finish`.
- exact.py, adasum.py: the same structure without compression; exact converts each gradient to
  fixed point in `Bucket.arrived`.
- parts.py: sums the gradients of a model that spans ranks, uncompressed, in `finish`.
- local_sgd.py: exchanges no gradients; `synchronise` averages parameters and optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hvdtrain.runtime.state_part import StatePart


class Exchange(Protocol):
    """Replace each rank's gradients by the gradients of the global batch, over the data axis.

    A step consists of `begin(passes)`, that many backward passes, `finish()`, `rest(...)`, the
    optimizer step, and `commit(...)`. Every rank participates in each step, even if it has no
    backward pass or if a pass did not reach some parameters: these gradients count as zero.

    If `synchronised` is False after a step, each rank has its own parameters and optimizer state
    until `synchronise()`. In that case an error does not leave them as they were before the step.

    If a rank is lost, the waiting call raises HorovodInternalError. An elastic run then shuts
    Horovod down, calls `abort()` and joins the next generation, which repeats the step.

    Attributes:
        parameters: the exchanged parameters, in the model's order.
        synchronised: all ranks hold the same state.
        inflight_seconds: from the start of the first bucket to the end of the last one, summed over
            the steps so far; an upper bound of the communication time.
        bytes: size of the gradients exchanged in these steps, in their wire format.
    """

    synchronised: bool
    inflight_seconds: float
    bytes: int

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    def begin(self, passes: int) -> None:
        """Announce the number of backward passes of this step on this rank; may be 0."""

    def finish(self) -> None:
        """Wait until every gradient is the gradient of the global batch.

        Raises:
            HorovodInternalError: another rank is gone.
        """

    def frozen(self) -> list[bool]:
        """Whether the task has frozen each of `parameters` here; same length on all ranks.

        For a model whose ranks have different parameters: an entry for every parameter of the
        model, False for parameters that this rank does not hold.

        Raises:
            UnsupportedTaskError: the task unfroze a parameter that was frozen when it created the
                model.
        """
        ...

    def rest(self, frozen: Sequence[bool]) -> None:
        """Remove the gradients of frozen parameters; `frozen` must be identical on every rank."""

    def agreed_norm(self, own: Tensor) -> Tensor:
        """Norm by which all ranks make the same decision whether to apply the step.

        Args:
            own: norm of the gradients on this rank.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        ...

    def commit(self, applied: bool) -> None:
        """Complete a step, after the update or after it was skipped (gradient not finite)."""

    def synchronise(self) -> None:
        """Make the state of all ranks identical, if it is not; every rank calls it.

        Raises:
            HorovodInternalError: another rank is gone.
        """

    def state_parts(self) -> Sequence[StatePart]:
        """State that the exchange keeps from step to step."""
        ...

    def abort(self) -> None:
        """Clear the state of a failed step, so that the next one can begin."""
