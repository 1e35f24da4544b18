"""Plot of the efficiency over ranks and of the limiting resource."""

from __future__ import annotations

from matplotlib.ticker import PercentFormatter

from hvdtrain.plan.outlook import Outlook
from hvdtrain.report.draw import BLUE, GREEN, GREY, ORANGE, PURPLE, canvas, legend

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, GREY)
_MARKS = {"compute": "o", "bandwidth": "s", "latency": "^", "uneven": "D"}


def plan_svg(outlook: Outlook) -> str:
    """Return a standalone SVG: a line per exchange, with marks for the limiting resource."""
    with canvas(3.5, above=0.7) as (axes, svg):
        for strategy, colour in zip(outlook.terms.strategies, _COLOURS, strict=False):
            found = [one for _, one in outlook.scaling if one.strategy == strategy]
            ranks = [one.ranks for one in found]
            axes.plot(ranks, [one.efficiency for one in found], color=colour, label=strategy)
            for one in found:
                mark = _MARKS[one.limit]
                axes.plot([one.ranks], [one.efficiency], mark, color=colour, markersize=5)
        for limit, mark in _MARKS.items():
            if any(one.limit == limit for _, one in outlook.scaling):
                axes.plot([], [], mark, color=GREY, label=f"limited by {limit}", linestyle="none")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks(sorted({one.ranks for _, one in outlook.scaling}))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("ranks")
        axes.set_ylabel("efficiency")
        legend(axes, 4)
    return svg[0]
