"""Numbers that ranks sum in each step in addition to gradients.

ControlVector sends them in one small all-reduce. Totals sums over micro-batches and ranks, without
rounding if requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from hvdtrain.data.buckets import Used
from hvdtrain.errors import EXIT_USER
from hvdtrain.runtime.collectives import AgreedError, begin_sum, completed
from hvdtrain.runtime.context import RankContext

# A float64 sum of multiples of one power of two is exact as long as it has at most 53 bits.
_COARSE = 2.0**-10  # so sums up to 2**43 are exact
_FINE = 2.0**-44  # smaller remainders are rounded off


@dataclass(frozen=True)
class Flags:
    """Input of this rank to a step in addition to its micro-batches.

    Args:
        stop: this rank received a request to stop.
        membership_changed: this rank was notified that processes join or leave.
        step: steps done before this one.
    """

    stop: bool
    membership_changed: bool
    step: int


@dataclass(frozen=True)
class Sizes:
    """Lengths of the sections of a control vector, identical on all ranks.

    Args:
        values: the loss and the metrics.
        parameters: exchanged parameters.
        statistics: elements of BatchNorm's running statistics.
        exact: values and statistics are summed without rounding, see Totals.
    """

    values: int
    parameters: int
    statistics: int
    exact: bool = False


@dataclass(frozen=True)
class Agreed:
    """Sums over all ranks.

    Args:
        stops, changes: number of ranks that raised the flag.
        steps: sum of the ranks' `step`.
        used: contents of all ranks' micro-batches.
        sums: of the loss and the metrics, 3 rows as returned by `accumulate.rows_of`.
        frozen: for each parameter, how many ranks have frozen it.
        statistics: summed changes of the running statistics; on the device.
    """

    stops: float
    changes: float
    steps: float
    used: Used
    sums: list[list[float]]
    frozen: list[float]
    statistics: Tensor


class ControlVector:
    """Float64 vector of one step, summed over all ranks.

    It is sent before the last backward pass and overlaps with it.

    Args:
        used: contents of this rank's micro-batches.

    Attributes:
        values, statistics: add to these before `send`; `values` has 3 rows, see
            `accumulate.rows_of`.
    """

    def __init__(self, flags: Flags, used: Used, sizes: Sizes, context: RankContext) -> None:
        head = torch.tensor(
            [flags.stop, flags.membership_changed, flags.step, *used], dtype=torch.float64
        )
        parts = Totals.number_of_parts(sizes.exact)
        numbers = 3 * sizes.values + sizes.statistics
        self._lengths = [len(head), sizes.parameters, parts * numbers]
        self._vector = torch.zeros(sum(self._lengths), dtype=torch.float64, device=context.device)
        own, self._frozen, totals = self._vector.split(self._lengths)
        own.copy_(head)
        totals = totals.view(parts, numbers)
        self.values = Totals(totals[:, : 3 * sizes.values].view(parts, 3, sizes.values))
        self.statistics = Totals(totals[:, 3 * sizes.values :])
        self._alone = context.mesh.world.size == 1
        self._handle: int | None = None

    def send(self, frozen: Sequence[bool] = ()) -> None:
        """Begin the all-reduce; `values` and `statistics` must be complete.

        Args:
            frozen: whether each parameter is frozen; empty if unknown.
        """
        if any(frozen):
            self._frozen.copy_(torch.tensor(frozen))
        if not self._alone:
            self._handle = begin_sum(self._vector, "control")

    def receive(self) -> Agreed:
        """Wait for the all-reduce and return the sums.

        Raises:
            RankLostError: another rank is gone.
        """
        if self._handle is not None:
            completed(self._handle)
        values = self.values.value()
        known = torch.cat([self._vector[: sum(self._lengths[:2])], values.flatten()])
        rest = iter(known.tolist())  # a single synchronization with the device
        stops, changes, steps, *held = islice(rest, self._lengths[0])
        used = Used(*map(int, held))
        frozen = [*islice(rest, self._lengths[1])]
        sums = [[*islice(rest, values.shape[1])] for _ in range(3)]
        return Agreed(stops, changes, steps, used, sums, frozen, self.statistics.value())


def means(names: Sequence[str], sums: Sequence[Sequence[float]], batches: int) -> dict[str, float]:
    """Mean of each value over all micro-batches.

    Args:
        names: names of the values.
        sums: the 3 rows of `accumulate.rows_of`, summed over all ranks.
        batches: number of micro-batches.

    Raises:
        AgreedError: some micro-batches gave a value as (sum, weight), others as a mean; raised on
            every rank.
    """
    found = {}
    for name, total, weight, pairs in zip(names, *sums, strict=True):
        if 0 < pairs < batches:
            raise AgreedError(
                f"the task's loss() returned {name!r} as (sum, weight) for {pairs:.0f} and as a "
                f"mean for {batches - pairs:.0f} of {batches} micro-batches whose average is "
                "taken: return it in the same form for each",
                EXIT_USER,
                rank=0,
            )
        # In training, means have no weight: their sums are means already.
        found[name] = total / weight if weight else total
    return found


class Totals:
    """Elementwise sums of float64 numbers.

    Args:
        parts: float64 zeros, (1, ...) or (2, ...). With one part, sums are rounded as usual, and
            the last bits depend on the order of the additions. With two, each number is added as a
            multiple of 2**-10, and its remainder as a multiple of 2**-44: both sums are exact, so
            the result does not depend on the order or the number of the ranks.

    Attributes:
        parts: as given; to sum over ranks, sum these.
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts

    @staticmethod
    def number_of_parts(exact: bool) -> int:
        return 2 if exact else 1

    def add(self, numbers: Tensor) -> None:
        """Add `numbers`, which have the shape of a part and any floating-point dtype."""
        if len(self.parts) == 1:
            self.parts[0].add_(numbers)
            return
        numbers = numbers.double()
        coarse = _rounded(numbers, _COARSE)
        self.parts[0].add_(coarse)
        # An infinite number has no remainder.
        self.parts[1].add_(_rounded((numbers - coarse).nan_to_num_(0.0), _FINE))

    def value(self) -> Tensor:
        """Return the sums."""
        return self.parts.sum(dim=0)


def _rounded(numbers: Tensor, unit: float) -> Tensor:
    return (numbers / unit).round_().mul_(unit)
