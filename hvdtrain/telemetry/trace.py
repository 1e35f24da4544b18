"""What one rank records of the steps that are profiled: torch's trace, and peaks of memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hvdtrain.runtime.peak_memory import PeakMemory, Peaks
from hvdtrain.runtime.phases import PhaseTimer


class Trace:
    """Records from its making to `stop`. One at a time; all calls come from one thread.

    Args:
        step: the first one that is recorded.
        device: where the model is.
        timer: of the phases; its listener must call `enter`.
        memory: what they take of it.
        inflight: Exchange.inflight_seconds, now.
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
        """The span of a phase ends, and `phase` begins."""
        self._phase_span.__exit__(None, None, None)
        self._enter(phase)

    def step(self, step: int) -> None:
        """A step has ended, with all that is done after it, and `step` begins."""
        self._close()
        self._open(step, self._phase)

    def stop(self) -> dict[str, Any]:
        """Ends the recording.

        Returns:
            seconds of each phase, wall and in flight, and bytes of the peaks of each phase, as
            profile_files.RankProfile has them.
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
        """Writes the trace, gzipped, after `stop`.

        Args:
            facts: go into it as "distributedInfo", which readers of traces look for.

        Raises:
            OSError: it cannot be written.
        """
        self._profiler.add_metadata_json("distributedInfo", json.dumps(facts))
        self._profiler.export_chrome_trace(str(path))

    def _open(self, step: int, phase: str) -> None:
        # By this name TensorBoard's plugin and others know a step.
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
            # Between steps, and only while profiling: what was handed out counts for this side.
            self._timer.enter(self._timer.phase)
            torch.cuda.synchronize(self._device)
            self._timer.enter(self._timer.phase)
        return self._timer.seconds(), time.perf_counter(), self._inflight()


def warm_up(device: torch.device) -> None:
    """The profiler's first use in a process takes a second or more."""
    if device.type == "cpu":
        # Kineto writes two lines to the screen each time; on a GPU it may have errors to tell.
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
