"""Tiny tasks for tests: `tests.support.tasks:CLASS`."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from typing import Any, ClassVar
from unittest.mock import patch

import psutil
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdtrain.data.order import sample_order
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig

FEATURES = 8
SAMPLES = 256
INJECTED = "injected failure"


class Regression:
    """A linear model on noise-free data; a few ms/step, about 10 parameters."""

    defaults: ClassVar[dict[str, Any]] = {"train.duration": 10, "optim.lr": 0.01}

    def datasets(self) -> Datasets:
        x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
        rows = torch.cat((x, x.sum(dim=1, keepdim=True)), dim=1)
        return Datasets(rows, rows[:32])  # type: ignore[arg-type]  # a tensor is map-style too

    def model(self) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        """`batch`: (samples, FEATURES + 1) float32, the target in the last column."""
        return {"loss": nn.functional.mse_loss(model(batch[:, :-1]), batch[:, -1:])}


class Forking(Regression):
    """Leave a daemon process and a pool of processes behind, all forked."""

    def datasets(self) -> Datasets:
        context = multiprocessing.get_context("fork")
        context.Process(target=time.sleep, args=(600,), daemon=True).start()
        self._pool = context.Pool(1)
        self._waiting = self._pool.map_async(time.sleep, [600])
        return super().datasets()


class NeedsConfig(Regression):
    """Its constructor requires a configuration that it does not declare."""

    def __init__(self, config: object) -> None:
        self.config = config


class IgnoresConfig(Regression):
    """Its constructor does not accept the configuration that it declares."""

    Config = LanguageModelConfig


class Large(Regression):
    """A loss that needs more memory than any host has, for micro-batches above `most` samples."""

    most = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if len(batch) > self.most:
            batch = torch.empty(10**15, FEATURES + 1)
        return super().loss(model, batch)


class LargeBeyondFour(Large):
    most = 4


class Spiking(Regression):
    """Noisy targets, and outliers in some global batches of 8 samples: HVDTRAIN_TEST_SPIKES=20,31.

    An epoch has 128 batches of 8 samples, numbered from 1.

    HVDTRAIN_TEST_KILL=2:15,1:rollback: process 2 (launcher's number) sends SIGKILL in its 15th
    micro-batch, and process 1 when it has begun to return to a checkpoint.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "train.duration": 40, "optim.lr": 0.01, "batch.global_size": 8, "batch.micro_size": 2,
        "eval.every": 0, "telemetry.port": 0, "checkpoint.every": 10, "checkpoint.keep": 50,
        "schedule.name": "constant", "schedule.warmup_steps": 0,
        "train.spike.window": 10, "train.spike.factor": 20.0,
    }  # fmt: skip

    def __init__(self) -> None:
        own = psutil.Process().environ()  # as it was at the start
        entries = filter(None, own.get("HVDTRAIN_TEST_KILL", "").split(","))
        kills = dict(entry.split(":") for entry in entries)
        self._killed_at, self._calls = kills.get(own.get("HOROVOD_RANK", "")), 0
        if self._killed_at == "rollback":
            patch("hvdtrain.process.resume._share", _kill_itself).start()

    def datasets(self) -> Datasets:
        generator, count = torch.Generator().manual_seed(0), 1024
        rows = torch.randn(count, FEATURES + 1, generator=generator)
        order = sample_order(0, count, count, seed=1234).reshape(-1, 8)
        for batch in filter(None, os.environ.get("HVDTRAIN_TEST_SPIKES", "").split(",")):
            rows[order[int(batch) - 1], -1] += 30
        return Datasets(rows)  # type: ignore[arg-type]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        self._calls += 1
        if str(self._calls) == self._killed_at:
            _kill_itself()
        return super().loss(model, batch)


class SpikingSaved(Spiking):
    """Spiking; each step waits for the checkpoint of the step before."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        _wait_for_checkpoint()
        return super().loss(model, batch)


def _kill_itself(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Half(Regression):
    """A model with float16 parameters."""

    def model(self) -> nn.Module:
        return super().model().half()


class Overfitted(Regression):
    """Validation on half of the target, so that the validation loss falls and then rises."""

    def datasets(self) -> Datasets:
        train = super().datasets().train
        validation = train[:32].clone()  # type: ignore[index]
        validation[:, -1] /= 2
        return Datasets(train, validation)


class Failing(Regression):
    """Raise on one rank in one step: HVDTRAIN_TEST_FAIL=rank:step, steps counted from 1.

    Steps are counted by calls, so a rank must have one micro-batch per step.
    """

    def __init__(self) -> None:
        self._rank, self._step = map(int, os.environ["HVDTRAIN_TEST_FAIL"].split(":"))
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        import horovod.torch as hvd

        self._calls += 1
        if (hvd.rank(), self._calls) == (self._rank, self._step):
            raise RuntimeError(INJECTED)
        return super().loss(model, batch)


def _wait_for_checkpoint() -> None:
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)


class Slow(Regression):
    """Regression with slow micro-batches, so that tests can disturb a run between two steps.

    HVDTRAIN_TEST_PACE: seconds per micro-batch (default 0.05).
    """

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        time.sleep(float(os.environ.get("HVDTRAIN_TEST_PACE", "0.05")))
        return super().loss(model, batch)


class Uneven(Slow):
    """Slow; rank 1 takes twice as long."""

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if launched_rank() == 1:
            super().loss(model, batch)
        return super().loss(model, batch)


class NotFinite(Regression):
    """A loss that is NaN in some steps, in one micro-batch of one rank.

    HVDTRAIN_TEST_NAN=4,5 names the steps, counted from 1; 4- means all from 4 on. Requires
    `TINY_BATCHES` micro-batches per step, on one rank or on as many ranks.
    """

    TINY_BATCHES = 4

    def __init__(self) -> None:
        self._steps = os.environ["HVDTRAIN_TEST_NAN"]
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        import horovod.torch as hvd

        _wait_for_checkpoint()  # the test reads the state after each step
        passes = self.TINY_BATCHES // hvd.size()
        step, number = divmod(self._calls, passes)
        self._calls += 1
        losses = super().loss(model, batch)
        mine = (hvd.rank(), number) == (1 % hvd.size(), 1 % passes)
        if mine and self._is_bad(step + 1):
            losses["loss"] = losses["loss"] * float("nan")
        return losses

    def _is_bad(self, step: int) -> bool:
        if self._steps.endswith("-"):
            return step >= int(self._steps[:-1])
        return str(step) in self._steps.split(",")


class Signalled(LanguageModel):
    """The language model; a rank sends signals to itself.

    HVDTRAIN_TEST_SIGNAL=SIGTERM:9,SIGKILL:14:1 sends them in the 9th micro-batch of rank 0's
    process and in the 14th of rank 1's, counted from 1.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self._signals: dict[int, str] = {}
        for entry in filter(None, os.environ.get("HVDTRAIN_TEST_SIGNAL", "").split(",")):
            name, at, rank = (*entry.split(":"), "0")[:3]
            if int(rank) == launched_rank():
                self._signals[int(at)] = name
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        self._calls += 1
        if self._calls in self._signals:
            _wait_for_checkpoint()  # tests state from which one the run continues
            if self._calls > min(self._signals):
                time.sleep(1.1)  # earlier, it would count as the same signal
            os.kill(os.getpid(), signal.Signals[self._signals[self._calls]])
        return super().loss(model, batch)  # type: ignore[arg-type]


class Paced(Regression):
    """Regression after a BatchNorm; each micro-batch takes a while.

    HVDTRAIN_TEST_PACE: seconds per micro-batch (default 0.1).

    HVDTRAIN_TEST_HANG=3:50,2:90:8: process 3 (launcher's number) hangs in its 50th micro-batch,
    forever in a lock, and process 2 in its 90th, computing for 8 s.
    """

    defaults: ClassVar[dict[str, Any]] = {"train.duration": 1500, "optim.lr": 0.001}

    def __init__(self) -> None:
        self._pace = float(os.environ.get("HVDTRAIN_TEST_PACE", "0.1"))
        self._calls = 0
        own = psutil.Process().environ()  # as it was at the start
        self._stuck_at, self._stuck_for = 0, 0.0
        for entry in filter(None, own.get("HVDTRAIN_TEST_HANG", "").split(",")):
            number, at, seconds = (*entry.split(":"), "0")[:3]
            if number == own.get("HOROVOD_RANK"):
                self._stuck_at, self._stuck_for = int(at), float(seconds)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        self._calls += 1
        if self._calls == self._stuck_at:
            self._get_stuck()
        time.sleep(self._pace if model.training else 0)
        return super().loss(model, batch)

    def _get_stuck(self) -> None:
        until = time.monotonic() + self._stuck_for
        while time.monotonic() < until:
            sum(range(10_000))
        if not self._stuck_for:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()


class WithHelpers(Paced):
    """Paced; each rank has two helpers: forked, as pools and data workers are, and detached."""

    def __init__(self) -> None:
        super().__init__()
        self._calls_before_fork = 3  # helpers also hold the exchange's sockets

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._calls == self._calls_before_fork:
            for detached in (False, True):
                if os.fork() == 0:
                    if detached:
                        os.setsid()
                    threading.Event().wait()
        return super().loss(model, batch)


class Flipped(Regression):
    """Flip one bit of one rank's state between two steps.

    HVDTRAIN_TEST_FLIP=rank:step:what,... flips a bit of a weight, or of the entry `what` of the
    optimizer's state (exp_avg), right after the optimizer's step.
    """

    def __init__(self) -> None:
        self._flips: dict[int, str] = {}
        for entry in os.environ["HVDTRAIN_TEST_FLIP"].split(","):
            rank, step, what = entry.split(":")
            if int(rank) == launched_rank():
                self._flips[int(step)] = what
        register_optimizer_step_post_hook(self._flip)

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        _wait_for_checkpoint()
        return super().loss(model, batch)

    def _flip(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        state = optimizer.state[parameter]
        # Popped, because Horovod's optimizer calls the hook twice.
        what = self._flips.pop(int(state["step"]), None)
        if what is not None:
            tensor = parameter.data if what == "weight" else state[what]
            tensor.view(-1).view(torch.int32)[0] ^= 1 << 12


class Sampled(Regression):
    """A task whose sample is HVDTRAIN_TEST_SAMPLE, with Python's escapes; it raises if that is
    empty."""

    def sample(self, model: nn.Module) -> str:
        text = os.environ["HVDTRAIN_TEST_SAMPLE"]
        if not text:
            raise RuntimeError(INJECTED)
        return text.encode("ascii").decode("unicode_escape")


class BlockedDisk(Regression):
    """Saves hang: the writer's thread does not return from its first fsync.

    HVDTRAIN_TEST_BLOCKED=limit or limit:seconds: how long the end of the run waits for it, and how
    long the disk is blocked (default: forever).
    """

    def __init__(self) -> None:
        from hvdtrain.checkpoint import writer

        fsync = os.fsync
        limit, _, seconds = os.environ["HVDTRAIN_TEST_BLOCKED"].partition(":")
        writer.TIMEOUT_S = float(limit)
        free = threading.Event()

        def blocking(file: int) -> None:
            if threading.current_thread().name == "checkpoint":
                free.wait(float(seconds) if seconds else None)
                free.set()
            fsync(file)

        os.fsync = blocking


class FullDisk(Regression):
    """Fill the run's disk in some steps.

    HVDTRAIN_TEST_FULL=directory:first:last fills it before step `first`, counted from 1, and frees
    it after step `last`. Requires one rank and one micro-batch per step.
    """

    def __init__(self) -> None:
        directory, self._first, self._last = os.environ["HVDTRAIN_TEST_FULL"].split(":")
        self._ballast = os.path.join(directory, "ballast")
        self._calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        _wait_for_checkpoint()
        self._calls += 1
        if self._calls == int(self._first):
            with suppress(OSError), open(self._ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(512))
        if self._calls == int(self._last) + 1:
            os.remove(self._ballast)
        return super().loss(model, batch)


class Purged(Regression):
    """Remove the directory HVDTRAIN_TEST_PURGED in step 5. Requires one micro-batch per step."""

    calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        _wait_for_checkpoint()
        self.calls += 1
        if self.calls == 5:
            shutil.rmtree(os.environ["HVDTRAIN_TEST_PURGED"])
        return super().loss(model, batch)


class SlowWhile(LanguageModel):
    """The language model with slow micro-batches while a file exists.

    HVDTRAIN_TEST_SLOW=seconds:PATH, so that there is time to disturb the job.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        seconds, _, self._path = os.environ["HVDTRAIN_TEST_SLOW"].partition(":")
        self._seconds = float(seconds)

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if os.path.exists(self._path):
            time.sleep(self._seconds)
        return super().loss(model, batch)  # type: ignore[arg-type]
