"""Recording of profiled steps on one rank: torch's trace, and memory peaks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hvdtrain.runtime.memory import PeakMemory, Peaks
from hvdtrain.runtime.phases import PhaseTimer


class Trace:
    """Recording, from construction to `stop`. Only one may exist; all calls come from one thread.

    Args:
        step: the first recorded step.
        device: of the model.
        timer: of the phases; its listener must call `enter`.
        memory: peak memory of the phases.
        inflight: returns the current Exchange.inflight_seconds.
    """

    def __init__(
        self,
        step: int,
        device: torch.device,
        timer: PhaseTimer,
        memory: PeakMemory,
        inflight: Callable[[], float],
    ) -> None:
        self._device = device
        self._timer = timer
        self._inflight = inflight
        self._profiler = profile(activities=_activities(device))
        self._profiler.prepare_trace()
        self._begun = self._totals()
        self._memory, self._peaks = memory, Peaks()
        memory.record(self._peaks)
        self._profiler.start_trace()
        self._open(step, timer.phase)

    def enter(self, phase: str) -> None:
        """End the span of the current phase, and begin the span of `phase`."""
        self._phase_span.__exit__(None, None, None)
        self._enter(phase)

    def step(self, step: int) -> None:
        """End the current step, including everything done after it, and begin `step`."""
        self._close()
        self._open(step, self._phase)

    def stop(self) -> dict[str, Any]:
        """End the recording.

        Returns:
            seconds of each phase, wall and in flight, and peak bytes of each phase, as in
            profile_files.RankProfile.
        """
        self._memory.stop(self._peaks)
        self._close()
        seconds, wall, inflight = self._totals()
        self._profiler.stop_trace()
        return {
            "phases": {p: round(seconds[p] - self._begun[0][p], 6) for p in seconds},
            "wall_seconds": round(wall - self._begun[1], 6),
            "inflight_seconds": round(inflight - self._begun[2], 6),
            "host_peak_bytes": self._peaks.host or None,
            "device_peak_bytes": self._peaks.device or None,
        }

    def write(self, path: Path, facts: dict[str, Any]) -> None:
        """Write the trace, gzipped, after `stop`.

        Args:
            facts: stored in the trace as "distributedInfo", which trace viewers look for.

        Raises:
            OSError: it cannot be written.
        """
        self._profiler.add_metadata_json("distributedInfo", json.dumps(facts))
        self._profiler.export_chrome_trace(str(path))

    def _open(self, step: int, phase: str) -> None:
        # TensorBoard's plugin and other tools recognize steps by this name.
        self._step_span = _span(f"ProfilerStep#{step}")
        self._enter(phase)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._phase_span = _span(f"phase {phase}")

    def _close(self) -> None:
        self._phase_span.__exit__(None, None, None)
        self._step_span.__exit__(None, None, None)

    def _totals(self) -> tuple[dict[str, float], float, float]:
        if self._device.type == "cuda":
            # Between steps, and only while profiling: launched work counts for the current phase.
            self._timer.enter(self._timer.phase)
            torch.cuda.synchronize(self._device)
            self._timer.enter(self._timer.phase)
        return self._timer.seconds(), time.perf_counter(), self._inflight()


def warm_up(device: torch.device) -> None:
    """Run the profiler once, because its first use in a process takes a second or more."""
    if device.type == "cpu":
        # Kineto prints two lines each time; on a GPU it may report errors.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=_activities(device)):
        torch.zeros(1, device=device)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *gpu]


def _span(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span
