"""Traces of the steps in `profile.steps`, and Horovod's timeline of these steps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.exchange.base import Exchange
from hvdtrain.log import logger
from hvdtrain.runtime import init
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.memory import PeakMemory, Peaks
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.telemetry.config import ProfileConfig
from hvdtrain.telemetry.profile_summary import (
    READY,
    TRACE,
    clear,
    rank_path,
    timeline_path,
    write_measurements,
)


class Profile(Callback):
    """Record traces of the steps in `profile.steps`.

    Every rank has one Profile in each generation, as the last callback, so that a step is recorded
    with everything that is done after it. A generation that ends inside the range closes its files.

    Errors in profiling do not end the run.

    Args:
        directory: RUN/profile; created when needed.
        step: steps done when the generation begins.
    """

    def __init__(
        self,
        config: ProfileConfig,
        directory: Path,
        step: int,
        exchange: Exchange,
        context: RankContext,
    ) -> None:
        self._steps = config.range
        self._directory = directory
        self._topology = topology = context.mesh.topology
        self._timer, self._memory = context.timer, context.memory
        self._exchange = exchange
        self._device = device = context.device
        named = config.named_ranks
        self._mine = named is None or topology.rank in named
        self._failed = False
        self._first: int | None = None  # first step of the current recording
        self._trace: Trace | None = None
        self._timeline = False
        self._ready: int | None = None  # handle of the all-reduce that marks the timeline
        if step + 1 >= self._steps.stop:
            if topology.rank == 0 and not directory.exists():
                logger.warning("profile.steps %s: the run is at step %d", config.steps, step)
        elif self._mine:
            self._try(lambda: warm_up(device))
        self._reach(step + 1)

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        # After a failure the callbacks are called for the last step again: nothing is new then.
        if loop.progress.step < self._next:
            return
        if self._ready is not None:
            ready, self._ready = self._ready, None
            completed(ready)
        self._reach(loop.progress.step + 1, loop.ending)

    def close(self) -> None:
        if self._first is not None:
            self._end()

    def _reach(self, step: int, ending: bool = False) -> None:
        """Handle that `step` comes next, unless the run is at its end."""
        self._next = step
        inside = step in self._steps and not ending
        if inside and self._first is None:
            self._begin(step)
        elif not inside and self._first is not None:
            self._end()
        elif self._trace is not None:
            trace = self._trace
            self._try(lambda: trace.step(step))

    def _begin(self, step: int) -> None:
        self._first = step
        self._try(self._open_files)
        self._timer.listen(self._enter)

    def _enter(self, phase: str) -> None:
        """Handle a change of phase during a recording."""
        if phase == "comm_exposed" and self._ready is None:
            # On every rank, whatever failed on this one: the backward pass has ended.
            name = f"{READY}{self._next}"
            self._ready = begin_sum(torch.zeros(1), name)
        if self._trace is not None:
            trace = self._trace
            self._try(lambda: trace.enter(phase))

    def _open_files(self) -> None:
        assert self._first is not None
        if self._mine or self._topology.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
        if self._topology.rank == 0:
            clear(self._directory, self._first)
            self._start_timeline()
        if self._mine:
            exchange = self._exchange
            self._trace = Trace(
                *(self._first, self._device, self._timer, self._memory),
                lambda: exchange.inflight_seconds,
            )

    def _start_timeline(self) -> None:
        if self._topology.world_size == 1:
            return  # no other rank to wait for
        if not init.can_start_timeline():
            logger.warning("profile: Horovod writes its timeline to the file in HOROVOD_TIMELINE")
            return
        assert self._first is not None
        init.start_timeline(timeline_path(self._directory, self._first))
        self._timeline = True

    def _end(self) -> None:
        self._timer.unlisten(self._enter)
        if self._timeline:
            self._timeline = False
            init.stop_timeline()
        self._try(self._write_files)
        self._first, self._trace = None, None

    def _write_files(self) -> None:
        first, trace, end = self._first, self._trace, self._next
        assert first is not None
        rank, host = self._topology.rank, self._topology.host
        metrics = trace.stop() if trace is not None else {}
        if end == first:  # no step was finished
            timeline_path(self._directory, first).unlink(missing_ok=True)
        elif trace is not None:
            facts = {"rank": rank, "world_size": self._topology.world_size}
            path = rank_path(self._directory, rank, host, first, TRACE)
            trace.write(path, {"backend": "horovod", **facts})
            metrics |= {"host": host, "steps": [first, end], "device": self._device.type, **facts}
            write_measurements(rank_path(self._directory, rank, host, first, ".json"), metrics)
            logger.info("profile of steps %d to %d: %s", first, end - 1, path)

    def _try(self, part: Callable[[], None]) -> None:
        """Run `part`; log the first failure, and run nothing after it."""
        if self._failed:
            return
        try:
            part()
        except Exception as error:
            self._failed = True
            logger.warning("profile: %s; training continues without it", error)
            if self._trace is not None:
                with suppress(Exception):
                    self._trace.stop()
                self._trace = None


# Recording on one rank: torch's trace, and memory peaks.


class Trace:
    """Recording, from construction to `stop`. Only one may exist; all calls come from one thread.

    Args:
        step: the first recorded step.
        device: device of the model.
        timer: timer of the phases; its listener must call `enter`.
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
        self._profiler = _profiler(device)
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
            profile_summary.RankProfile.
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
    with _profiler(device):
        torch.zeros(1, device=device)


def _profiler(device: torch.device) -> profile:
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    # There is only one cycle; without acc_events, torch 2.11 warns that it drops earlier ones.
    return profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)


def _span(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span
