"""What every exchange offers to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hvdtrain.runtime.state_part import StatePart


class Exchange(Protocol):
    """Makes the gradients of all ranks of the data axis those of the global batch.

    A step is `begin(passes)`, that many backward passes, `finish()` and `rest(...)`; the
    optimizer steps then, and `commit(...)` follows. Every rank takes part in each step, also with
    no backward pass at all and with parameters that a pass did not reach: these count as zero.

    Where `synchronised` is False after a step, each rank has parameters and optimizer state of its
    own, until `synchronise()`. After an error they are not those of before the step then.

    Attributes:
        parameters: that are exchanged, in the model's order.
        synchronised: all ranks hold the same state.
        inflight_seconds: from the first bucket handed over to the last one's end, summed over
            the steps so far; an upper bound of what communication took.
        bytes: of the gradients that were exchanged in them, as they travelled.
    """

    synchronised: bool
    inflight_seconds: float
    bytes: int

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    def begin(self, passes: int) -> None:
        """Announces the number of backward passes of this step on this rank; may be 0."""

    def finish(self) -> None:
        """Waits until every gradient is that of the global batch.

        Raises:
            HorovodInternalError: another rank is gone.
        """

    def frozen(self) -> list[bool]:
        """Of each of `parameters`, whether the task has frozen it here; as long on all ranks.

        Of a model whose ranks have different parameters: of all of them, and False elsewhere.

        Raises:
            UnsupportedTaskError: the task wants to train a parameter that was frozen when it made
                the model.
        """
        ...

    def rest(self, frozen: Sequence[bool]) -> None:
        """Takes the gradients of frozen parameters away; every rank names the same."""

    def agreed_norm(self, own: Tensor) -> Tensor:
        """The norm by which all ranks decide alike whether the step counts.

        Args:
            own: norm of the gradients as they are on this rank.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        ...

    def commit(self, applied: bool) -> None:
        """After the update, or where it was skipped as its gradient was not finite."""

    def synchronise(self) -> None:
        """Makes the state of all ranks the same, where it is not; every rank calls it.

        Raises:
            HorovodInternalError: another rank is gone.
        """

    def state_parts(self) -> Sequence[StatePart]:
        """What the exchange itself carries from step to step."""
        ...

    def abort(self) -> None:
        """Clears what a failed step has left, so that the next one can begin."""
