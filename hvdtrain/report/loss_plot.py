"""Training loss over time for several exchanges; see `hvdtrain bench exchange`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from hvdtrain.report.draw import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, canvas, legend

# One per side: the second six are dashed.
_LINES = tuple(product(("-", "--"), (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)))


def loss_svg(sides: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a standalone SVG.

    Args:
        sides: name -> (seconds, loss) of each step.
    """
    with canvas(3.5, above=0.5) as (axes, svg):
        for (side, points), (style, colour) in zip(sides.items(), _LINES, strict=False):
            seconds, losses = zip(*points, strict=True)
            axes.plot(seconds, losses, style, color=colour, label=side)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("training loss, mean of 10 steps")
        legend(axes, min(len(sides), 6))
    return svg[0]
