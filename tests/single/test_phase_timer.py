"""The phases of a rank's time are disjoint and sum to the wall time."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path

import pytest

from hvdtrain.runtime.phases import PHASES, PhaseTimer
from tests.support import runs

pytestmark = pytest.mark.slow


def test_phases_partition_wall_time() -> None:
    began = time.perf_counter()
    timer = PhaseTimer(began)
    time.sleep(0.02)
    timer.enter("data")
    time.sleep(0.03)
    with timer.inside("eval"):
        time.sleep(0.04)
        timer.enter("forward")  # entering another phase does not leave the block
        time.sleep(0.05)
    time.sleep(0.01)
    seconds = timer.seconds()
    wall = time.perf_counter() - began
    assert sum(seconds.values()) == pytest.approx(wall, abs=0.002)
    for phase, least in {"other": 0.02, "data": 0.04, "eval": 0.04, "forward": 0.05}.items():
        assert seconds[phase] >= least, seconds  # more on a busy machine


def test_current_phase_time_is_included() -> None:
    timer = PhaseTimer(time.perf_counter())
    timer.enter("eval")
    time.sleep(0.02)
    assert timer.seconds()["eval"] >= 0.02


def test_error_inside_phase_restores_previous_phase() -> None:
    timer = PhaseTimer(time.perf_counter())
    with pytest.raises(KeyError), timer.inside("checkpoint"):
        raise KeyError
    assert timer.phase == "other"


class DeviceEvent:
    """Replacement of torch.cuda.Event, which needs a GPU: passed when `now` reaches it."""

    now = 0.0  # the device's clock, in ms

    def __init__(self, at: float) -> None:
        self._at = at

    def query(self) -> bool:
        return self._at <= DeviceEvent.now

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert self.query() and end.query(), "the host would wait for the device here"
        return end._at - self._at


def test_device_phase_times_are_read_without_blocking_host() -> None:
    DeviceEvent.now = 0.0
    times = deque([0.0, 100.0, 300.0, 350.0, 400.0])
    timer = PhaseTimer(time.perf_counter())
    timer.use_events(lambda: DeviceEvent(times.popleft()))
    before = timer.seconds()
    timer.enter("forward")  # the device reaches it at 100 ms, and so on
    timer.enter("backward")
    assert timer.seconds() == before and timer.phase == "backward"
    DeviceEvent.now = 320.0  # it is still in backward
    timer.enter("optimizer")
    passed = {phase: timer.seconds()[phase] - before[phase] for phase in PHASES}
    assert passed["other"] == pytest.approx(0.1) and passed["forward"] == pytest.approx(0.2)
    assert passed["backward"] == 0.0
    DeviceEvent.now = 1000.0
    timer.enter("other")
    assert timer.seconds()["backward"] == pytest.approx(0.05)
    assert timer.seconds()["optimizer"] == pytest.approx(0.05)


@pytest.mark.parametrize("launcher", ["", "gloo:2"])
def test_phase_times_of_run_sum_to_wall_time(tmp_path: Path, launcher: str) -> None:
    arguments = ["--train.duration=40", "--eval.every=7", "--checkpoint.every=9"]
    directory = runs.train(tmp_path, "run", arguments, launcher)
    lines = [json.loads(line) for line in (directory / "ranks.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    for line in lines:
        for rank, wall in enumerate(line["wall_seconds"]):
            phases = {name: seconds[rank] for name, seconds in line["phases"].items()}
            assert sum(phases.values()) == pytest.approx(wall, rel=0.02), phases
            assert all(phases[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
            assert (phases["comm_exposed"] > 0) == bool(launcher)
            assert (line["bytes"][rank] > 0) == bool(launcher)
            assert line["inflight_seconds"][rank] >= phases["comm_exposed"] * 0.5
    assert any(line["phases"]["eval"][0] > 0 for line in lines)
    assert any(line["phases"]["checkpoint"][0] > 0 for line in lines)
