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
_FINE = 2.0**-44  # what is finer than this is cut off


@dataclass(frozen=True)
class Flags:
    """What this rank brings to a step beside its micro-batches.

    Args:
        stop: this rank is asked to stop.
        membership_changed: this rank has heard that processes join or leave.
        step: steps done before this one.
        synchronise: whatever the ranks agree on, they have one state after this step; not sent.
    """

    stop: bool
    membership_changed: bool
    step: int
    synchronise: bool = False


@dataclass(frozen=True)
class Sizes:
    """How many there are of each in a control vector; alike on all ranks.

    Args:
        values: the loss and the metrics.
        parameters: that are exchanged.
        statistics: numbers of BatchNorm's running statistics.
        exact: values and statistics are summed without rounding, see Totals.
    """

    values: int
    parameters: int
    statistics: int
    exact: bool = False


@dataclass(frozen=True)
class Agreed:
    """The sums over all ranks.

    Args:
        stops, changes: ranks whose flag is raised.
        steps: of all ranks' `step`.
        used: what all ranks used.
        sums: of the loss and the metrics, 3 rows as `accumulate.rows_of` makes them.
        frozen: of each parameter, how many ranks have frozen it.
        statistics: what their micro-batches changed; on the device.
    """

    stops: float
    changes: float
    steps: float
    used: Used
    sums: list[list[float]]
    frozen: list[float]
    statistics: Tensor


class ControlVector:
    """The vector of one step, float64.

    It is sent before the last backward pass, so that it travels while that computes.

    Args:
        used: what this rank's micro-batches hold.

    Attributes:
        values, statistics: to be added to before it is sent; 3 rows of values, see
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
        """Begins the exchange; `values` and `statistics` are complete.

        Args:
            frozen: of each parameter; empty where none is known to be.
        """
        if any(frozen):
            self._frozen.copy_(torch.tensor(frozen))
        if not self._alone:
            self._handle = begin_sum(self._vector, "control")

    def receive(self) -> Agreed:
        """Waits for it.

        Raises:
            RankLostError: another rank is gone.
        """
        if self._handle is not None:
            completed(self._handle)
        values = self.values.value()
        known = torch.cat([self._vector[: sum(self._lengths[:2])], values.flatten()])
        rest = iter(known.tolist())  # one wait for the device
        stops, changes, steps, *held = islice(rest, self._lengths[0])
        used = Used(*map(int, held))
        frozen = [*islice(rest, self._lengths[1])]
        sums = [[*islice(rest, values.shape[1])] for _ in range(3)]
        return Agreed(stops, changes, steps, used, sums, frozen, self.statistics.value())


def means(names: Sequence[str], sums: Sequence[Sequence[float]], batches: int) -> dict[str, float]:
    """Of each value over all micro-batches.

    Args:
        names: of the values.
        sums: the 3 rows of `accumulate.rows_of`, over all ranks.
        batches: how many micro-batches that were.

    Raises:
        AgreedError: some were given as (sum, weight), others as a mean; every rank raises it.
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
        # Means of a step have no weight: these sums are means already.
        found[name] = total / weight if weight else total
    return found


class Totals:
    """Sums of float64 numbers, element by element.

    Args:
        parts: float64, zeros, (1, ...) or (2, ...). With one part they are rounded as usual, and
            the last bits depend on the order of the additions. With two, each number is added as
            a multiple of 2**-10 and the rest of it as a multiple of 2**-44: both sums are exact,
            so neither the order nor the number of the ranks shows.

    Attributes:
        parts: as given; sums over ranks are sums of these.
    """

    def __init__(self, parts: Tensor) -> None:
        self.parts = parts

    @staticmethod
    def number_of_parts(exact: bool) -> int:
        return 2 if exact else 1

    def add(self, numbers: Tensor) -> None:
        """Adds `numbers`, of the shape of a part; may have another floating-point dtype."""
        if len(self.parts) == 1:
            self.parts[0].add_(numbers)
            return
        numbers = numbers.double()
        coarse = _rounded(numbers, _COARSE)
        self.parts[0].add_(coarse)
        # An infinite number has no rest.
        self.parts[1].add_(_rounded((numbers - coarse).nan_to_num_(0.0), _FINE))

    def value(self) -> Tensor:
        """The sums."""
        return self.parts.sum(dim=0)


def _rounded(numbers: Tensor, unit: float) -> Tensor:
    return (numbers / unit).round_().mul_(unit)
