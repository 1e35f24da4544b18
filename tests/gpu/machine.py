"""The machine that `make gpu-check` looks at, and runs on it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.horovod_wheel.process import run_logged

HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
STEPS = 12
CURVE = 1e-3  # between the losses on two devices, or of two numbers of ranks
_TRAIN = [sys.executable, "-m", "hvdtrain.train"]
_BATCH = "--data.train hvdtrain/*/*.py --batch.global_size 4 --batch.micro_size 2"
# Where there is no GPU, the checks themselves are tried with a model for which a CPU is enough.
_TINY = f"{_BATCH} --model.layers 2 --model.width 64 --model.heads 2"
_SHORT = (
    f"--train.steps {STEPS} --schedule.warmup_steps 2 --eval.every 0 --checkpoint.every 0"
    " --telemetry.port 0 --telemetry.exchange_every 4"
)
# NCCL refuses two ranks on one GPU of one host; what it takes for a host is this name.
_AS_HOSTS = ["sh", "-c", 'NCCL_HOSTID=$HOROVOD_HOSTNAME exec "$0" "$@"']


@dataclass(frozen=True)
class Machine:
    """Where the checks run.

    Args:
        gpus: how many torch can use here.
        work: for runs; large files.
        log: all that the commands say.
    """

    gpus: int
    work: Path
    log: Path

    @property
    def preset(self) -> str:
        return "gpt-small" if self.gpus else "gpt-nano"

    @property
    def model(self) -> list[str]:
        """Flags of model, data and batch, beside the preset."""
        return (_BATCH if self.gpus else _TINY).split()

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def hosts(self) -> str:
        """Of two ranks; with fewer than two GPUs each is on a host of its own, by its name."""
        return "localhost:2" if self.gpus > 1 else "localhost:1,127.0.0.1:1"

    @property
    def wrapper(self) -> list[str]:
        """What stands before the command of each of two ranks."""
        return _AS_HOSTS if self.gpus < 2 else []

    def run(
        self,
        command: list[str],
        seconds: float,
        wanted: int = 0,
        env: dict[str, str] | None = None,
    ) -> str:
        """What a command said.

        Raises:
            AssertionError: its exit code is not the wanted one.
            UserError: it was not done in time.
        """
        own = self.work / "command.log"
        try:
            code = run_logged(command, own, seconds, os.environ | (env or {}))
        finally:
            said = own.read_text(errors="replace")
            with self.log.open("a") as log:
                log.write(f"+ {' '.join(command)}\n{said}\n")
        last = [line for line in said.splitlines() if line.strip()][-3:]
        assert code == wanted, f"exit code {code}: {' / '.join(last)}"
        return said

    def rank(self, name: str) -> list[str]:
        """The command of a rank of a run with a few steps."""
        flags = f"--config {self.preset} {_SHORT} --run.root {self.work} --run.id {name}"
        return [*_TRAIN, *flags.split(), *self.model]

    def train(self, name: str, launcher: list[str], seconds: float, more: str = "") -> Path:
        """Such a run; its directory."""
        env = {"CUDA_VISIBLE_DEVICES": ""} if name == "cpu" else {}
        self.run([*launcher, *self.rank(name), *more.split()], seconds, env=env)
        return self.work / name


def lines(path: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl or ranks.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(one: Path, other: Path) -> str:
    """The largest relative difference of two runs' losses in the first `STEPS` steps.

    Raises:
        AssertionError: it is larger than `CURVE`.
    """
    losses = [lines(run / "metrics.jsonl")[:STEPS] for run in (one, other)]
    pairs = list(zip(*losses, strict=True))
    largest = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    seen = f"at most {largest:.1e} apart in {len(pairs)} steps; last {pairs[-1][0]['loss']:.4f}"
    assert largest <= CURVE, seen
    return seen
