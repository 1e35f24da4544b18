"""A long simulated run, written as fast as the disk allows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PHASES = ("data", "forward", "backward", "comm_exposed", "optimizer", "eval", "checkpoint", "other")
GLOBAL, EVERY, VARIANTS, BEGIN = 1024, 10, 50, 1_700_000_000.0
SLOW = 17  # the rank that is slow from step SLOW_FROM to SLOW_TO of 100,000


class LongRun:
    """Write RUN/ with restarts at given steps and one slow rank in the second quarter of the run.

    Args:
        directory: RUN.
        steps, ranks: number of steps and ranks.
        failures: steps after which a rank failed; each failure repeats 3 steps and costs 20 s.
    """

    def __init__(self, directory: Path, steps: int, ranks: int, failures: tuple[int, ...]) -> None:
        self.directory, self.total, self.ranks = directory, steps, ranks
        self.slow = steps // 4, steps // 2
        self._random = np.random.default_rng(5)
        self._clock = BEGIN
        directory.mkdir(parents=True)
        config = f"task: synthetic\ntrain: {{steps: {steps}, log_every: 1}}\n"
        hosts = {f"node{n}": list(range(8 * n, 8 * n + 8)) for n in range(ranks // 8)}
        self._hosts = hosts
        start = {"time": BEGIN, "config": config}
        manifest = {"task": "synthetic", "hosts": hosts, "world_size": ranks, "starts": [start]}
        (directory / "manifest.json").write_text(json.dumps(manifest))
        (directory / "config.yaml").write_text(config)
        self._windows = {slow: self._make_windows(slow) for slow in (False, True)}
        with (
            open(directory / "metrics.jsonl", "w") as self._metrics,
            open(directory / "left_metrics.jsonl", "w") as self._left,
            open(directory / "ranks.jsonl", "w") as self._table,
            open(directory / "events.jsonl", "w") as self._events,
        ):
            self._write_all(failures)

    def _write_all(self, failures: tuple[int, ...]) -> None:
        self._start(0, "launch")
        for step in range(1, self.total + 1):
            self._step(step, self._metrics)
            if step in failures:
                for lost in range(step + 1, step + 4):
                    self._step(lost, self._left)
                self._clock += 20
                self._start(step, "failure")
        self._event("end", step=self.total, exit_code=0)

    def _step(self, step: int, file: Any) -> None:
        slow = self.slow[0] < step <= self.slow[1]
        seconds = (0.15 if slow else 0.1) * self._random.lognormal(0, 0.05)
        self._clock += seconds
        line = {
            "step": step,
            "loss": 2 + 8 / (1 + step / 2000) + self._random.normal(0, 0.05),
            "samples": step * GLOBAL,
            "lr": 3e-4,
            "grad_norm": 1.0,
            "world_size": self.ranks,
            "step_seconds": seconds,
            "samples_per_second": GLOBAL / seconds,
            "time": self._clock,
        }
        if step % 1000 == 0:
            line["validation_loss"] = line["loss"] + 0.3
            self._clock += 2
            self._event("checkpoint", step=step, seconds=0.5)
        file.write(json.dumps(line) + "\n")
        if file is self._metrics and step % EVERY == 0:
            variant = self._windows[slow][int(self._random.integers(VARIANTS))]
            head = f'{{"step": {step}, "steps": {EVERY}, "time": {self._clock}, '
            self._table.write(head + variant)
        if step in self.slow:
            fields = {"rank": SLOW, "host": f"node{SLOW // 8}", "phase": "data"}
            name = "straggler" if step == self.slow[0] else "straggler_ended"
            score = {"score": 0.4} if name == "straggler" else {}
            self._event(name, step=step, **fields, **score)

    def _make_windows(self, slow: bool) -> list[str]:
        """Make the remaining content of lines of ranks.jsonl; each line uses one."""
        found = []
        for _ in range(VARIANTS):
            own = np.array([0.05, 0.2, 0.4, 0.0, 0.06, 0.0, 0.0, 0.02])[:, None]
            seconds = own * self._random.lognormal(0, 0.03, (len(PHASES), self.ranks))
            seconds[0, SLOW] += 0.6 * slow
            compute = seconds[[0, 1, 2, 4]].sum(axis=0)
            wall = np.full(self.ranks, 1.5 if slow else 1.0)
            seconds[3] = wall - seconds.sum(axis=0)
            whole = np.ones(self.ranks, int)
            line = {
                "phases": dict(zip(PHASES, seconds.round(6).tolist(), strict=True)),
                "wall_seconds": wall.tolist(),
                "inflight_seconds": (seconds[3] + 0.3).round(6).tolist(),
                "bytes": (whole * 10 * 4 * 124_000_000).tolist(),
                "micro_batches": (whole * 160).tolist(),
                "host_memory_bytes": self._random.integers(2e9, 3e9, self.ranks).tolist(),
                "device_memory_bytes": (whole * 40_000_000_000).tolist(),
                "score": (compute.min() / compute).round(4).tolist(),
            }
            found.append(json.dumps(line)[1:] + "\n")
        return found

    def _start(self, step: int, cause: str) -> None:
        self._generation = getattr(self, "_generation", -1) + 1
        self._event(
            "start",
            generation=self._generation,
            cause=cause,
            step=step,
            samples=step * GLOBAL,
            world_size=self.ranks,
            hosts=self._hosts,
            source="memory" if step else "new",
            seconds=3.0,
            global_size=GLOBAL,
            seed=1,
            dataset_size=10**6,
            fingerprint="f00",
            total_steps=self.total,
        )

    def _event(self, event: str, **fields: Any) -> None:
        self._events.write(json.dumps({"event": event, "time": self._clock, **fields}) + "\n")
