"""Step time and loss of each gradient exchange strategy, as a table or as JSON."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from hvdtrain.bench.report import machine

NO_EXCHANGE = "no exchange"
DENSE = "dense"
# Steps excluded from time and bytes: powersgd begins after this number of steps.
WARM_UP_STEPS = 10
_SMOOTHED = 10  # steps over which the training loss is averaged


@dataclass(frozen=True)
class Curve:
    """A run with one strategy.

    Args:
        seconds: time at the end of each step, from the beginning of the first step.
        losses: training loss of each step; nan if it was not finite.
        sent: gradient bytes that a rank passed to collectives per step, in the wire format.
        validation_loss: after the last step.
    """

    seconds: Sequence[float]
    losses: Sequence[float]
    sent: float
    validation_loss: float

    @property
    def step_seconds(self) -> float:
        """Seconds per step, over all steps after the first WARM_UP_STEPS.

        It is not the median, because a strategy may exchange only every few steps.
        """
        timed = len(self.seconds) - WARM_UP_STEPS
        return (self.seconds[-1] - self.seconds[WARM_UP_STEPS - 1]) / timed

    def loss_after(self, steps: int) -> float:
        """Mean training loss of the last 10 of the first `steps` steps; nan for 0."""
        last = self.losses[max(0, steps - _SMOOTHED) : steps]
        return fmean(last) if last else math.nan

    def loss_at(self, seconds: float) -> float:
        """`loss_after` the steps completed within `seconds`; nothing is interpolated."""
        return self.loss_after(bisect_right(self.seconds, seconds))

    def smoothed(self) -> list[tuple[float, float]]:
        """(seconds, `loss_after`) of each step."""
        return [(at, self.loss_after(step)) for step, at in enumerate(self.seconds, start=1)]


@dataclass(frozen=True)
class ExchangeReport:
    """Results of the measurement.

    Args:
        facts: ranks, hosts, launcher and the like, for the reader.
        curves: curves of each strategy, one per round.
        alone: seconds per step of ranks that exchange nothing, one per round.
    """

    facts: Mapping[str, Any]
    curves: Mapping[str, Sequence[Curve]]
    alone: Sequence[float]

    @property
    def steps(self) -> int:
        return len(next(iter(self.curves.values()))[0].losses)

    def equal_seconds(self) -> list[float]:
        """For each round, the time at which its fastest strategy had done all steps."""
        rounds = zip(*self.curves.values(), strict=True)
        return [min(curve.seconds[-1] for curve in curves) for curves in rounds]

    def rows(self) -> list[dict[str, Any]]:
        """One row per side; medians over the rounds, None for values that a side does not have.

        `of` contains ratios of step times from the same round.
        """
        return [self._row(side) for side in (NO_EXCHANGE, *self.curves)]

    def to_json(self) -> str:
        content = {
            "benchmark": "exchange",
            **self.facts,
            "steps": self.steps,
            "equal_seconds": median(self.equal_seconds()),
            "machine": machine(),
            "rows": self.rows(),
        }
        return json.dumps(content, indent=1)

    def to_table(self) -> str:
        references = [side for side in (NO_EXCHANGE, DENSE) if side in self._step_seconds()]
        times = ["median", "min", "max", *(f"/ {side}" for side in references)]
        at = f"at {median(self.equal_seconds()):.4g} s"
        head = ["", *times, "sent", f"step {self.steps}", at, "validation"]
        units = ["", *["ms a step"] * 3, *["x"] * len(references), "MB a step", *["loss"] * 3]
        lines = [head, units]
        for row in self.rows():
            seconds = (row["step_seconds"], row["min_step_seconds"], row["max_step_seconds"])
            losses = (row["loss"], row["loss_at_equal_seconds"], row["validation_loss"])
            sent = row["sent_bytes"]
            line = [row["side"], *(f"{value * 1e3:.4g}" for value in seconds)]
            line += [_text(row["of"].get(side), ".3f") for side in references]
            line += [_text(sent and sent / 1e6, ".3g"), *(_text(loss, ".4f") for loss in losses)]
            lines.append(line)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = []
        for name, *numbers in lines:
            right = [n.rjust(width) for n, width in zip(numbers, widths[1:], strict=True)]
            text.append("  ".join([name.ljust(widths[0]), *right]).rstrip())
        here, facts = machine(), [f"{name} {value}" for name, value in self.facts.items()]
        load = f"load {here['load']:.1f} on {here['cores']} cores"
        return "\n".join([*text, ", ".join([*facts, load])])

    def _step_seconds(self) -> dict[str, list[float]]:
        own = {side: [curve.step_seconds for curve in found] for side, found in self.curves.items()}
        return {NO_EXCHANGE: list(self.alone), **own}

    def _row(self, side: str) -> dict[str, Any]:
        by_side = self._step_seconds()
        values, curves = by_side[side], self.curves.get(side, ())
        of = {
            other: median(a / b for a, b in zip(values, by_side[other], strict=True))
            for other in (NO_EXCHANGE, DENSE)
            if other in by_side and side not in (other, NO_EXCHANGE)
        }
        at = zip(curves, self.equal_seconds(), strict=False)
        return {
            "side": side,
            "step_seconds": median(values),
            "min_step_seconds": min(values),
            "max_step_seconds": max(values),
            "of": of,
            "sent_bytes": _middle(curve.sent for curve in curves),
            "loss": _middle(curve.loss_after(self.steps) for curve in curves),
            "loss_at_equal_seconds": _middle(c.loss_at(seconds) for c, seconds in at),
            "validation_loss": _middle(curve.validation_loss for curve in curves),
        }


def _middle(values: Iterable[float]) -> float | None:
    """The median; None if there is no value or one is not finite."""
    found = list(values)
    return median(found) if found and all(map(math.isfinite, found)) else None


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
