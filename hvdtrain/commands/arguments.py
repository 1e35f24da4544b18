"""Types of command-line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf, isfinite


def at_least(least: int) -> Callable[[str], int]:
    """Type of an argument that is an integer >= `least`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is not an integer >= {least}")
        return number

    return parse


def number_at_least(least: float) -> Callable[[str], float]:
    """Type of an argument that is a finite number >= `least`."""

    def parse(text: str) -> float:
        number = _number(text)
        if not (isfinite(number) and number >= least):
            raise argparse.ArgumentTypeError(f"{text} is not >= {least:g}")
        return number

    return parse


def positive_number(text: str) -> float:
    """Type of an argument that is a finite number > 0."""
    number = _number(text)
    if not 0 < number < inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number > 0")
    return number


def seconds(text: str) -> float:
    """Type of an argument that is a time limit; `inf` is allowed."""
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is not > 0")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -inf
