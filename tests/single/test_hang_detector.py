"""How the hang detector classifies CPU and I/O work, with a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from hvdtrain.elastic.watchdog import HangDetector
from hvdtrain.runtime.clock import Clock
from hvdtrain.runtime.heartbeat import Activity, Heartbeat

HANG_SECONDS = 60


def _hung_after(
    seconds: int, work: Callable[[int], int], activity: Activity = Activity.WORKING
) -> int | None:
    """Return the second in which a rank counts as hung, with four checks per second.

    Args:
        work: ticks that the rank has used by the end of a second.
        activity: of the rank, without progress.
    """
    detector = HangDetector(HANG_SECONDS, None)
    with patch.object(Clock, "look"):
        for look in range(4 * seconds):
            detector._clock.now = look / 4
            verdict = detector.verdict(1, activity, work(look // 4), False, False)
            if verdict:
                assert "progress" in verdict
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


def test_rank_that_cannot_leave_a_failed_generation_is_ended() -> None:
    rank = Heartbeat()
    watchdog = Heartbeat(rank.descriptor)
    with rank.waiting():
        assert _hung_after(700, lambda second: 0, watchdog.read()[1]) is None, "ranks may wait"
        rank.generation_over = True
        _, leaving = watchdog.read()
    assert watchdog.read()[1] == Activity.LOADING, "as before the wait"
    assert _hung_after(700, lambda second: 0, leaving) == 10 * HANG_SECONDS
    assert _hung_after(700, lambda second: 100 * second, leaving) == 10 * HANG_SECONDS, "it spins"
