"""Text for people: counts, rates, times, and colors only where a terminal shows them."""

from __future__ import annotations

from io import StringIO

import pytest

from hvdtrain.text import duration, plural, short, styled


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_count_agrees_with_its_noun() -> None:
    assert plural(1, "rank") == "1 rank" and plural(1024, "rank") == "1,024 ranks"
    assert plural(0, "rank") == "0 ranks"
    assert plural(2, "micro-batch", "micro-batches") == "2 micro-batches"


def test_rates_have_three_digits() -> None:
    values = (0, 0.5234, 9.996, 57.04, 99.96, 975, 999.6, 18_400, 1.2e6, 3e9, 5e12)
    expected = "0.00 0.52 10.0 57.0 100 975 1.00k 18.4k 1.20M 3.00G 5000G"
    assert " ".join(map(short, values)) == expected


def test_durations_are_written_as_on_a_clock() -> None:
    seconds = (0.4, 42, 59.6, 3_905, 86_399.7, 3 * 86_400 + 15_000)
    assert [*map(duration, seconds)] == ["0:00", "0:42", "1:00", "1:05:05", "1d 00:00", "3d 04:10"]


def test_colors_appear_only_on_a_terminal_that_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert styled("[a] b", "red", Terminal()) == "\x1b[31m[a] b\x1b[0m"
    assert styled("[a] b", "red", StringIO()) == "[a] b"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("[a] b", "red", Terminal()) == "[a] b"
