"""The ranks tell each other how long each of them took, and name the slow one.

One small all-gather every `telemetry.exchange_every` steps. It is begun after one step and read
after the next: nobody waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from torch import Tensor

from hvdtrain.engine.loop import Loop, Record
from hvdtrain.log import logger
from hvdtrain.optim.exchange import GradientExchange
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.metrics_file import MetricsFile
from hvdtrain.telemetry.straggler import StragglerWatch, Verdict, Window, scores
from hvdtrain.telemetry.timers import PHASES, PhaseTimer

_PROCESS = psutil.Process()


class CompareRanks:
    """Every rank has one in each round; every rank knows all figures and decides alike.

    Args:
        step: steps done when the round begins.
        figures: RUN/ranks.jsonl, on rank 0: a line for each exchange.
        note: told of each verdict ("straggler" or "straggler_ended", fields), on rank 0.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        step: int,
        timer: PhaseTimer,
        exchange: GradientExchange,
        device: torch.device,
        exporter: Exporter | None,
        figures: MetricsFile | None,
        note: Callable[..., None],
    ) -> None:
        self._every = config.exchange_every
        self._watch = StragglerWatch(config.straggler_threshold)
        self._timer = timer
        self._exchange = exchange
        self._device = device
        self._exporter = exporter
        self._figures = figures
        self._note = note
        self._told_step = step
        self._micro_batches = 0
        self._before = self._totals()
        self._handle: int | None = None
        self._line: dict[str, Any] = {}

    def on_step(self, loop: Loop, record: Record) -> None:
        step = loop.progress.step
        if self._handle is not None:
            self._take(loop, hvd.synchronize(self._handle))
        # After a failure the callbacks hear of the last step again: nothing is new then.
        if step == self._told_step:
            return
        self._micro_batches += loop.passes
        if step % self._every and not loop.ending:
            return
        mine = torch.tensor([self._window().to_list()], dtype=torch.float64)
        self._line = {"step": step, "steps": step - self._told_step, "time": record["time"]}
        self._told_step, self._micro_batches = step, 0
        if hvd.size() == 1:
            self._take(loop, mine)
            return
        self._handle = hvd.allgather_async(mine, name="compare")
        if loop.ending:
            self._take(loop, hvd.synchronize(self._handle))

    def _totals(self) -> tuple[dict[str, float], float, float, int]:
        exchange = self._exchange
        return self._timer.seconds(), time.monotonic(), exchange.inflight_seconds, exchange.bytes

    def _window(self) -> Window:
        """Closes the window, and opens the next."""
        before, self._before = self._before, self._totals()
        seconds, now, inflight, sent = self._before
        allocated = torch.cuda.memory_allocated() if self._device.type == "cuda" else 0
        return Window(
            {phase: seconds[phase] - before[0][phase] for phase in PHASES},
            now - before[1],
            inflight - before[2],
            sent - before[3],
            self._micro_batches,
            _PROCESS.memory_info().rss,
            allocated,
        )

    def _take(self, loop: Loop, gathered: Tensor) -> None:
        """Decides on the figures of all ranks, which are on every rank now."""
        self._handle = None
        windows = [Window.from_list(row) for row in gathered.tolist()]
        found = scores(windows)
        verdicts = self._watch.look(windows)
        rank = loop.topology.rank
        if self._exporter is not None:
            self._exporter.straggler(found[rank], self._watch.slow.get(rank))
        if self._figures is None:
            return
        for verdict in verdicts:
            self._tell(loop, verdict)
        if self._line["step"] > (self._figures.last_step or 0):
            self._figures.write({**self._line, **_columns(windows), "score": _round(found, 4)})

    def _tell(self, loop: Loop, verdict: Verdict) -> None:
        rank, kind, step = verdict.rank, verdict.kind, self._line["step"]
        host = loop.topology.hosts[rank]
        if not verdict.slow:
            self._note("straggler_ended", step=step, rank=rank, host=host, phase=kind)
            logger.info("rank %d on %s is not slow any more", rank, host)
            return
        score = round(verdict.score, 3)
        self._note("straggler", step=step, rank=rank, host=host, phase=kind, score=score)
        logger.warning(
            "rank %d on %s is slow: its own part of a step takes %.1f times as long as the "
            "fastest rank's (straggler score %.2f), and it loses most in: %s",
            rank,
            host,
            1 / verdict.score,
            verdict.score,
            kind,
        )

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.straggler(1.0, None)


def _columns(windows: list[Window]) -> dict[str, Any]:
    """Each figure as a list over the ranks: a tenth of the bytes of a line per rank."""
    return {
        "phases": {p: _round([w.seconds[p] for w in windows], 6) for p in PHASES},
        "wall_seconds": _round([w.wall_seconds for w in windows], 6),
        "inflight_seconds": _round([w.inflight_seconds for w in windows], 6),
        "bytes": [int(w.bytes) for w in windows],
        "host_memory_bytes": [int(w.host_memory_bytes) for w in windows],
        "device_memory_bytes": [int(w.device_memory_bytes) for w in windows],
    }


def _round(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]
