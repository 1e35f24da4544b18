"""How the hang detector classifies CPU and I/O work, with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from hvdtrain.elastic.watchdog import Clock, HangDetector
from hvdtrain.runtime.heartbeat import Activity

HANG_SECONDS = 60


def _hung_after(seconds: int, work: Callable[[int], int]) -> int | None:
    """Return the second in which a rank counts as hung, with four checks per second.

    Args:
        work: ticks that the rank has used by the end of a second.
    """
    detector = HangDetector(HANG_SECONDS, None)
    with patch.object(Clock, "look"):
        for look in range(4 * seconds):
            detector._clock.now = look / 4
            verdict = detector.verdict(1, Activity.WORKING, work(look // 4), False, False)
            if verdict:
                assert verdict.startswith("no progress, no work for 60 s")
                return look // 4
    return None


def test_background_thread_work_does_not_mask_hang() -> None:
    # A metrics exporter that is scraped every 15 s: 0.1 s of CPU time, and 60 kB of files.
    assert _hung_after(100, lambda second: second // 15 * 25) == HANG_SECONDS


def test_hang_timeout_restarts_after_last_work() -> None:
    hung = _hung_after(200, lambda second: 50 * min(second, 100))
    assert hung is not None and 155 <= hung <= 161


def test_slow_bursty_work_is_not_classified_as_hang() -> None:
    assert _hung_after(590, lambda second: second // 20 * 100) is None, "5 % of a core"
    assert _hung_after(590, lambda second: second // 50 * 366) is None, "1.5 MB every 50 s"
    assert _hung_after(590, lambda second: second // 4 * 16) is None, "one major fault a second"
