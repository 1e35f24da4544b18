"""Charts of `hvdtrain bench allreduce` and `hvdtrain bench exchange`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.report import charts


def bandwidth(sides: Mapping[str, Mapping[int, float]]) -> charts.Chart:
    """Bus bandwidth over the size of an all-reduce.

    Args:
        sides: name -> bytes -> GB/s.
    """
    drawn = _lines({name: [*by_size.items()] for name, by_size in sides.items()})
    return charts.lines("Bus bandwidth", "GB/s", drawn, x="bytes", log="xy", wide=True)


def losses(sides: Mapping[str, Sequence[tuple[float, float]]]) -> charts.Chart:
    """Training loss over time.

    Args:
        sides: name -> (seconds, loss) of each step.
    """
    note = "Mean of 10 steps, over the time of training"
    return charts.lines("Training loss", "", _lines(sides), x="seconds", wide=True, note=note)


def _lines(sides: Mapping[str, Sequence[tuple[float, float]]]) -> list[charts.Chart]:
    found = []
    for at, (name, points) in enumerate(sides.items()):
        xs, ys = ([float(value) for value in column] for column in zip(*points, strict=True))
        # Each color again, dashed, once all are used.
        color, dash = charts.PALETTE[at % len(charts.PALETTE)], at >= len(charts.PALETTE)
        found.append(charts.series(name, {"x": xs, "y": ys}, color, dash=dash))
    return found
