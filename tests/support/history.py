"""Files of a simulated run: starts, steps and kills on a simulated clock."""

from __future__ import annotations

import shutil
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

from hvdtrain.file_thread import wait_for_writes
from hvdtrain.run_files.events_file import EventsFile, read_lines
from hvdtrain.run_files.metrics_file import MetricsFile

SIZE, SEED, TOTAL = 10, 7, 60
STEP, EVALUATION, SAVING, STARTING, WARMING, RECOVERING = 1.0, 0.5, 0.25, 4.0, 2.0, 0.75


class History:
    """Write a run directory with the classes that write a real one.

    Args:
        directory: RUN.
        log_every, eval_every, save_every: steps; the last two may be 0 = never.
        sync_every: local steps between synchronizations; 0 = none.

    Attributes:
        off: offset in seconds of the writing host's clock; may change at any time.
    """

    def __init__(
        self,
        directory: Path,
        log_every: int = 1,
        eval_every: int = 0,
        save_every: int = 5,
        sync_every: int = 0,
    ) -> None:
        self.directory = directory
        self.log_every, self.eval_every, self.save_every = log_every, eval_every, save_every
        self.sync_every = sync_every
        self.clock = 1_700_000_000.0
        self.off = 0.0
        self.begin = self.clock
        self.step = 0
        self.ranks = 0
        self.lowest = 0  # step from which this generation continues
        self.generation = -1
        self.running = False
        self.spent: Counter[str] = Counter()  # seconds that the audit must find
        self.saved: list[int] = []
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text('{"starts": []}')
        self.events = EventsFile(directory / "events.jsonl")
        self._lines: dict[int, float] = {}  # step -> seconds of the lines that count
        self._last = self._sign = self.clock

    def launch(self, ranks: int) -> None:
        """Start from the newest checkpoint, or from the beginning."""
        part = "start" if self.generation < 0 else "restart"
        if self.generation >= 0:
            self._pass("down", 30.0)
        self._pass(part, STARTING)
        self.step = max(self.saved, default=0)
        source = "checkpoint" if self.saved else "new"
        self._start("launch", source, ranks, STARTING)
        self._pass(part, WARMING)

    def recover(self, ranks: int, cause: str = "failure", back: int = 0) -> None:
        """Recover in memory; `back` is 1 if the most advanced rank is lost.

        With `sync_every`: the number of local steps of the ranks.
        """
        self._pass("recovery", RECOVERING)
        self.step -= back
        self._start(cause, "memory", ranks, RECOVERING)

    def move(self, hosts: dict[str, list[int]], ahead: float) -> None:
        """Recover with rank 0 on another host, whose clock differs by so much.

        Args:
            hosts: of the ranks.
            ahead: seconds.
        """
        self._pass("recovery", RECOVERING)
        self.off += ahead
        lines = read_lines(self.directory / "metrics.jsonl")[-3:]
        seen = [[line["step"], line["time"] + ahead + 0.01] for line in lines]
        ranks = sum(map(len, hosts.values()))
        self._start("failure", "memory", ranks, RECOVERING, hosts=hosts, seen=seen)

    def return_to_copies(self, ranks: int, back: int) -> None:
        """Lose shards, and continue from copies in memory that are `back` steps old."""
        self._pass("recovery", RECOVERING)
        lost, self.step = self.step, self.step - back
        facts = {"lost_step": lost} if back else {}
        self._start("failure", "memory_copy", ranks, RECOVERING, **facts)

    def steps(self, count: int) -> None:
        for _ in range(min(count, TOTAL - self.step)):
            self._pass("step", STEP)
            self.step += 1
            self._log()
            self._save(due=bool(self.save_every) and self.step % self.save_every == 0)

    def crash(self, torn: bool = False) -> None:
        """Kill the run in the middle of a step, and perhaps of a line."""
        self.running = False
        if torn:
            for name in ("events.jsonl", "metrics.jsonl"):
                with open(self.directory / name, "a") as file:
                    file.write('{"step": 3, "event": "start", "ti')

    def end(self, code: int) -> None:
        if code == 75 and self.step > self.lowest:
            self._log(ending=True)
            self._save(due=True)
        self._sign = self.clock
        self._write("end", step=self.step, exit_code=code)
        self.running = False

    @property
    def wall(self) -> float:
        return self._sign - self.begin

    def _start(self, cause: str, source: str, ranks: int, seconds: float, **facts: Any) -> None:
        self.generation += 1
        self.ranks, self.running, self.lowest = ranks, True, self.step
        for step in [step for step in self._lines if step > self.step]:
            taken = self._lines.pop(step)
            self.spent["steps"] -= taken
            self.spent["redone"] += taken
        for step in [step for step in self.saved if step > self.step]:
            self.saved.remove(step)
            shutil.rmtree(self._checkpoint(step))  # a real run renames it
        self._metrics = MetricsFile(self.directory / "metrics.jsonl", after=self.step)
        weakref.finalize(self, self._metrics.close)
        if "hosts" not in facts:
            facts["hosts"] = {"node1": list(range(min(ranks, 2)))}
            if ranks > 2:
                facts["hosts"]["node2"] = list(range(2, ranks))
        self._write(
            "start",
            generation=self.generation,
            cause=cause,
            step=self.step,
            samples=self.step * SIZE,
            world_size=ranks,
            source=source,
            seconds=seconds,
            global_size=SIZE,
            seed=SEED,
            dataset_size=64,
            fingerprint="f00",
            total_steps=TOTAL,
            log_every=self.log_every,
            micro_size=2,
            sync_every=self.sync_every,
            **facts,
        )
        self._sign = self.clock

    def _log(self, ending: bool = False) -> None:
        evaluated = bool(self.eval_every) and self.step % self.eval_every == 0
        ending = ending or self.step == TOTAL
        if self.step in self._lines or (self.step % self.log_every and not (evaluated or ending)):
            return
        record = {
            "step": self.step,
            "loss": TOTAL / self.step,
            "samples": self.step * SIZE,
            "world_size": self.ranks,
            "step_seconds": STEP,
            "samples_per_second": SIZE / STEP,
            "time": self.clock + self.off,
            "generation": self.generation,
            **({"validation_loss": 1 + TOTAL / self.step} if evaluated else {}),
            **({"validation_perplexity": float(self.step)} if evaluated else {}),
        }
        self._metrics.write(record)
        wait_for_writes(50)  # a step later in a run, but here there is no step
        self._lines[self.step] = STEP
        self._sign = self.clock
        if evaluated:
            self._pass("evaluation", EVALUATION)

    def _save(self, due: bool) -> None:
        if due and self.step not in self.saved:
            self._pass("checkpoint", SAVING)
            self.saved.append(self.step)
            directory = self._checkpoint(self.step)
            directory.mkdir(parents=True)
            (directory / "complete").touch()
            self._write("checkpoint", step=self.step, seconds=SAVING)
            self._sign = self.clock

    def _checkpoint(self, step: int) -> Path:
        return self.directory / f"checkpoints/step_{step:08}"

    def _write(self, event: str, **fields: Any) -> None:
        self.events.write(event, time=self.clock + self.off, **fields)

    def _pass(self, part: str, seconds: float) -> None:
        self.clock += seconds
        self.spent["steps" if part == "step" else part] += seconds
