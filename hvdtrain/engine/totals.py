"""Numbers that are added up over micro-batches and ranks, on demand without rounding."""

from __future__ import annotations

from torch import Tensor

# A float64 sum of multiples of one power of two is exact as long as it has at most 53 bits.
_COARSE = 2.0**-10  # so sums up to 2**43 are exact
_FINE = 2.0**-44  # what is finer than this is cut off


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
