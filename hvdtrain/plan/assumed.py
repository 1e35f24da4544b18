"""Assumptions in place of properties of a job that were not measured."""

from __future__ import annotations

from hvdtrain.plan.job import StrategyCost

# Share of a forward and a backward pass: two of three matrix products.
BACKWARD_SHARE = 2 / 3


def free_wires() -> dict[str, StrategyCost]:
    """Costs of the exchanges that are nearly free: they convert each gradient once."""
    return {name: StrategyCost() for name in ("dense", "float16", "bfloat16")}
