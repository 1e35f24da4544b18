"""Bus bandwidth over the size of an all-reduce; see `hvdtrain bench allreduce`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from matplotlib.ticker import NullFormatter

from hvdtrain.report import units
from hvdtrain.report.draw import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, canvas, legend

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, GREY)
# One per side: the second six are dashed.
_LINES = tuple(product(("-", "--"), (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)))


def bandwidth_svg(sides: Mapping[str, Mapping[int, float]]) -> str:
    """Return a standalone SVG.

    Args:
        sides: name -> bytes -> GB/s.
    """
    with canvas(3.5, above=0.5) as (axes, svg):
        for (side, by_size), color in zip(sides.items(), _COLORS, strict=False):
            axes.plot(list(by_size), list(by_size.values()), "o-", color=color, label=side)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(
            sorted({size for by_size in sides.values() for size in by_size}),
        )
        axes.xaxis.set_major_formatter(lambda value, _: units.size(value))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("bytes of the all-reduce")
        axes.set_ylabel("bus bandwidth, GB/s")
        legend(axes, len(sides))
    return svg[0]


def loss_svg(sides: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return a standalone SVG.

    Args:
        sides: name -> (seconds, loss) of each step.
    """
    with canvas(3.5, above=0.5) as (axes, svg):
        for (side, points), (style, color) in zip(sides.items(), _LINES, strict=False):
            seconds, losses = zip(*points, strict=True)
            axes.plot(seconds, losses, style, color=color, label=side)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("training loss, mean of 10 steps")
        legend(axes, min(len(sides), 6))
    return svg[0]
