"""The machine of `make gpu-check`, and runs on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.horovod_wheel.process import run_logged

HVDTRAIN = [sys.executable, "-m", "hvdtrain.cli"]
STEPS = 12
CURVE = 1e-3  # allowed difference of losses on two devices, or on two numbers of ranks
HALF_CURVE = 2e-2  # in 16 bits, from float32
_TRAIN = [sys.executable, "-m", "hvdtrain.train"]
# float32, although the preset chooses 16 bits on GPUs: the losses are compared with the CPU's.
_BATCH = (
    "--data.train hvdtrain/*/*.py --batch.global_size 4 --batch.micro_size 2"
    " --precision.name float32"
)
# Without a GPU, the checks themselves are tested with a model that suits a CPU.
_TINY = f"{_BATCH} --model.layers 2 --model.width 64 --model.heads 2"
_SHORT = (
    f"--train.duration {STEPS} --schedule.warmup_steps 2 --eval.every 0 --checkpoint.every 0"
    " --telemetry.port 0 --telemetry.exchange_every 4"
)
# NCCL refuses two ranks on one GPU of one host; it identifies a host by this name.
_AS_HOSTS = ["sh", "-c", 'NCCL_HOSTID=$HOROVOD_HOSTNAME exec "$0" "$@"']


@dataclass(frozen=True)
class Machine:
    """Machine on which the checks run.

    Args:
        gpus: number of GPUs that torch can use.
        work: directory for runs; large files.
        log: output of all commands.
        until: time.monotonic() at which all checks must have ended.
    """

    gpus: int
    work: Path
    log: Path
    until: float

    @property
    def preset(self) -> str:
        return "gpt-small" if self.gpus else "gpt-nano"

    @property
    def model(self) -> list[str]:
        """Flags of model, data and batch, in addition to the preset."""
        return (_BATCH if self.gpus else _TINY).split()

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def hosts(self) -> str:
        """Return the hosts of two ranks; with fewer than two GPUs, each has its own host name."""
        return "localhost:2" if self.gpus > 1 else "localhost:1,127.0.0.1:1"

    @property
    def wrapper(self) -> list[str]:
        """Return the prefix of the command of each of two ranks."""
        return _AS_HOSTS if self.gpus < 2 else []

    def run(
        self,
        command: list[str],
        seconds: float,
        wanted: int = 0,
    ) -> str:
        """Run a command; return its output.

        Raises:
            AssertionError: its exit code is not the expected one.
            UserError: it exceeded the limit.
        """
        own = self.work / "command.log"
        try:
            limit = min(seconds, self.until - time.monotonic())
            code = run_logged(command, own, limit, os.environ)
        finally:
            said = own.read_text(errors="replace")
            with self.log.open("a") as log:
                log.write(f"+ {' '.join(command)}\n{said}\n")
        last = [line for line in said.splitlines() if line.strip()][-3:]
        assert code == wanted, f"exit code {code}: {' / '.join(last)}"
        return said

    def rank(self, name: str) -> list[str]:
        """Return the command of a rank of a run with a few steps."""
        flags = f"--config {self.preset} {_SHORT} --run.root {self.work} --run.id {name}"
        return [*_TRAIN, *flags.split(), *self.model]

    def train(self, name: str, launcher: list[str], seconds: float, more: str = "") -> Path:
        """Run it; return its directory."""
        self.run([*launcher, *self.rank(name), *more.split()], seconds)
        return self.work / name

    @contextmanager
    def trained_on_cpu(self) -> Iterator[Callable[[], Path]]:
        """Train on half of the cores in the background; the context ends the run.

        Yields:
            A function that waits for the run, and returns its directory or raises AssertionError.
        """
        cores = sorted(os.sched_getaffinity(0))
        cores = cores[len(cores) // 2 :]
        env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(len(cores))}
        output = self.work / "cpu.log"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self.rank("cpu"),
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.sched_setaffinity(process.pid, cores)

        def wait() -> Path:
            try:
                code = process.wait(self.until - time.monotonic())
            except subprocess.TimeoutExpired:
                raise AssertionError("the run on the CPU has not ended") from None
            assert code == 0, f"exit code {code}: {output.read_text()[-300:]}"
            return self.work / "cpu"

        try:
            yield wait
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl or ranks.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(one: Path, other: Path, limit: float = CURVE) -> str:
    """Return the largest relative difference of two runs' losses in the first `STEPS` steps.

    Raises:
        AssertionError: it exceeds `limit`.
    """
    losses = [lines(run / "metrics.jsonl")[:STEPS] for run in (one, other)]
    pairs = list(zip(*losses, strict=True))
    largest = max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)
    seen = f"at most {largest:.1e} apart in {len(pairs)} steps; last {pairs[-1][0]['loss']:.4f}"
    assert largest <= limit, seen
    return seen
