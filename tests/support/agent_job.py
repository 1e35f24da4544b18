"""What tests of jobs with agents share: the steps of a run that is disturbed while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import runs
from tests.support.job import poll

WAIT_SECONDS = 90


class DisturbedRun:
    """Steps of a run with the task SlowWhile; a subclass starts it and sets `run`.

    Attributes:
        run: the run directory.
    """

    run: Path

    def output(self) -> str:
        """Return what the job has printed."""
        raise NotImplementedError

    def lines(self) -> list[dict[str, float]]:
        return runs.metrics(self.run)

    def wait_for_world(self, size: int, since: float = 0.0) -> None:
        """Wait for a step of `size` ranks that ended after `since`, a unix time."""

        def trains() -> bool:
            line = (self.lines() or [{"world_size": 0, "time": 0.0}])[-1]
            return line["world_size"] == size and line["time"] > since

        try:
            poll(trains, WAIT_SECONDS, f"a step of {size} ranks")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.output()}") from None

    def pause_since(self, began: float, size: int) -> float:
        """Seconds from a unix time to the first step that ended later, with `size` ranks."""
        self.wait_for_world(size, began)
        return next(
            line["time"] - began
            for line in self.lines()
            if line["time"] > began and line["world_size"] == size
        )

    def check_curve(self, expected: list[float], rel: float = 1e-4) -> None:
        """Check that each step so far was done once, with the losses of the undisturbed run.

        Sums of other numbers of ranks are rounded differently, which adds up over the steps.
        """
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        found = [line["loss"] for line in lines]
        assert found == pytest.approx(expected[: len(found)], rel=rel)


def undisturbed_losses(
    root: Path, arguments: Sequence[str], timeout: float = WAIT_SECONDS
) -> list[float]:
    """Return the losses of one process that trains without a launcher, at full speed."""
    env = {"HVDTRAIN_TEST_SLOW": f"0:{root}/none"}
    argv = [*arguments, "--run.root", str(root), "--run.id", "a"]
    done = runs.run(root / "output", argv, env=env, timeout=timeout)
    assert done.returncode == 0, done
    return runs.losses(root / "a")
