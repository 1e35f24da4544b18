"""Tasks of chaos runs: every rank has a forked child, and forks a helper process on request."""

from __future__ import annotations

import multiprocessing
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from hvdtrain.data.mixture import Mixture
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.tasks import Datasets
from tests.support.streams import Saved
from tests.support.tasks import FEATURES, Paced

HELPER = "helper"  # its name for ps; its command line is the rank's
_HELPER_SECONDS = 120.0
# Floats of the frozen tensor: with a slow disk, reading a checkpoint takes long (SmallDisk.slow).
_LARGE = 2 << 20
_WIDTH = 16


class Helped(Paced):
    """Paced, with a large frozen tensor; a rank forks a helper process when a file requests it.

    HVDTRAIN_TEST_CONTROL: a directory; process N (launcher's number) forks when the file fork-N
    exists, and removes it. The helper holds everything that the rank had open, as a multiprocessing
    worker does, sleeps, and outlives the rank. The file shard-N contains the number of the model's
    shard that the process holds.

    `datasets` also forks a child: a daemon process of multiprocessing, or a Pool's worker. It
    sleeps forever, so it is left over unless it ends with its rank.
    """

    def __init__(self) -> None:
        super().__init__()
        number = launched_rank(psutil.Process().environ())  # as it was at the start
        self._number = number or 0
        control = Path(os.environ["HVDTRAIN_TEST_CONTROL"])
        self._wish, self._shard_file = control / f"fork-{number}", control / f"shard-{number}"
        self._shard_file.unlink(missing_ok=True)
        self._shard: int | None = None

    def datasets(self) -> Datasets:
        context = multiprocessing.get_context("fork")
        if self._number % 2:
            self._pool = context.Pool(1, _rename)
        else:
            context.Process(target=_sleep, daemon=True).start()
        return super().datasets()

    def model(self) -> nn.Module:
        return _with_large_tensor(super().model())

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._wish.exists():
            self._fork()
        if (shard := self.shard(model)) != self._shard:
            self._shard = shard
            self._shard_file.write_text(str(shard))
        return super().loss(model, batch)

    def shard(self, model: nn.Module) -> int:
        """Return the number of this process's shard of the model; 0 if it holds the whole model."""
        return 0

    def _fork(self) -> None:
        if os.fork() == 0:
            with suppress(BaseException):
                _rename()
                self._wish.unlink()
                time.sleep(_HELPER_SECONDS)
            os._exit(0)


class HelpedMixture(Helped):
    """Helped with a mixture of two sources, whose weights change in the run."""

    def datasets(self) -> Datasets:
        rows = super().datasets().train
        assert isinstance(rows, Tensor)
        sources = {"large": rows[:-100], "small": rows[-100:]}
        weights, later = {"large": 0.7, "small": 0.3}, {"large": 0.25, "small": 0.75}
        train = Mixture(sources, weights, changes={500: later})  # type: ignore[arg-type]
        validation = train.validation({"large": rows[:16], "small": rows[-16:]})  # type: ignore[dict-item]
        return Datasets(train, validation, train.fingerprint())

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        rows, _ = batch
        return super().loss(model, rows)


class HelpedStream(Saved, Helped):
    """Helped with an iterable dataset that has a state."""


class HelpedPerceptron(Helped):
    """Helped with a model that tensor parallelism can split."""

    def model(self) -> nn.Module:
        return _with_large_tensor(Perceptron())

    def shard(self, model: nn.Module) -> int:
        mesh = getattr(model.get_parameter("up.weight"), "device_mesh", None)
        return 0 if mesh is None else int(mesh.get_local_rank())


class Perceptron(nn.Module):
    """One hidden layer; its input is normalized, so some of the target cannot be learned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, _WIDTH)
        self.down = nn.Linear(_WIDTH, 1)

    def tensor_plan(self) -> dict[str, str]:
        return {"up": "column", "down": "row"}

    def forward(self, x: Tensor) -> Tensor:
        """`x`: (samples, FEATURES); returns (samples, 1)."""
        result: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return result


def _with_large_tensor(model: nn.Module) -> nn.Module:
    large = torch.arange(_LARGE, dtype=torch.float32)
    model.register_parameter("large", nn.Parameter(large, requires_grad=False))
    return model


def _rename() -> None:
    Path("/proc/self/comm").write_text(HELPER)


def _sleep() -> None:
    _rename()
    while True:
        time.sleep(60)
