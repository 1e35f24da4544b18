"""Tasks that disturb, slow down or block one rank of a run.

Processes are numbered in the order in which their launcher started them.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import psutil
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor, nn
from torch.utils.data import Dataset

import hvdtrain.process.prepare
from hvdtrain import comm
from hvdtrain.checkpoint import layout, tensor_file
from hvdtrain.engine.state import RunState
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.language_model import LanguageModel
from tests.support.tasks import Paced, Regression

BAD_SAMPLE = 77


def _trouble() -> str:
    """Return the trouble of this process: HVDTRAIN_TEST_TROUBLE=3:device,4:data; "*" means any
    process."""
    own = psutil.Process().environ()  # as it was at the start
    entries = os.environ.get("HVDTRAIN_TEST_TROUBLE", "").split(",")
    troubles = dict(entry.split(":") for entry in entries if entry)
    return troubles.get(str(launched_rank(own)), troubles.get("*", ""))


class Troubled(Paced):
    """Paced, with one of these troubles.

    sample: one sample of the data raises, on whichever rank it is read.

    data: one sample fewer than on the other ranks.

    device: another device than the other processes. No test machine has two kinds, so the result of
    `choose_device` is replaced.

    transfer: it does not receive the other ranks' state, because its exchange fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._trouble = _trouble()
        if self._trouble == "transfer":
            RunState.broadcast = _fail  # type: ignore[method-assign]

    def datasets(self) -> Datasets:
        datasets = super().datasets()
        if self._trouble != "data":
            return datasets
        return Datasets(datasets.train[:-1], datasets.validation)  # type: ignore[index]

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        bad = super().datasets().train[BAD_SAMPLE]
        if self._trouble == "sample" and model.training and (batch == bad).all(dim=1).any():
            raise ValueError("a bad sample")
        return super().loss(model, batch)


def _fail(*_: Any, **__: Any) -> None:
    hvd.shutdown()
    raise HorovodInternalError("the network between here and there")


if _trouble() == "device":
    hvdtrain.process.prepare.choose_device = lambda *_: torch.device("meta")


_LONGEST_SECONDS = 60.0


class Held(Paced):
    """Paced; the process that was started as number 0 waits once.

    HVDTRAIN_TEST_HOLD=place:PATH: at `place` it creates the file PATH, and continues when the file
    is removed. Places: step (its first micro-batch), evaluation (its first one), save (its first
    checkpoint: model.safetensors is written, optimizer.safetensors is not yet on disk).
    """

    def __init__(self) -> None:
        super().__init__()
        place, _, path = os.environ.get("HVDTRAIN_TEST_HOLD", "").partition(":")
        own = psutil.Process().environ()  # as it was at the start
        self._place = place if launched_rank(own) == 0 else ""
        self._path = Path(path)
        if self._place == "save":
            self._hold_save()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._place == ("step" if model.training else "evaluation"):
            self._hold()
        return super().loss(model, batch)

    def _hold_save(self) -> None:
        fsync = os.fsync

        def holding(file: int) -> None:
            written = os.readlink(f"/proc/self/fd/{file}")
            saving = threading.current_thread().name == "checkpoint"
            if saving and self._place and written.endswith("/optimizer.safetensors"):
                self._hold()
            fsync(file)

        os.fsync = holding

    def _hold(self) -> None:
        self._place = ""
        self._path.touch()
        deadline = time.monotonic() + _LONGEST_SECONDS
        while self._path.exists() and time.monotonic() < deadline:
            time.sleep(0.02)


class Writing(Paced):
    """Paced; the process that was started as number 0 also writes a file in each micro-batch.

    HVDTRAIN_TEST_FILE: the file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._writes = launched_rank(psutil.Process().environ()) == 0  # as it was at the start

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._writes:
            Path(os.environ["HVDTRAIN_TEST_FILE"]).write_text("")
        return super().loss(model, batch)


READS = 12  # of a file
SECONDS = 0.5  # that each takes


class _SlowFile(io.FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._bytes = os.stat(path).st_size // READS + 1

    def readinto(self, buffer: Any) -> int | None:
        time.sleep(SECONDS)
        return super().readinto(memoryview(buffer)[: self._bytes])

    def read(self, size: int | None = -1) -> bytes | None:  # type: ignore[override]
        time.sleep(SECONDS)
        return super().read(self._bytes)


def _open(path: Path, mode: str, buffering: int = -1) -> Any:
    return _SlowFile(path) if mode == "rb" else open(path, mode, buffering)


class OnSlowDisk(Regression):
    def __init__(self) -> None:
        for module in (layout, tensor_file):
            module.open = _open  # type: ignore[attr-defined]


class Lagging(Paced):
    """Paced, so that a busy machine disturbs it little; one rank loads slowly while a file exists.

    HVDTRAIN_TEST_LAG=rank:seconds:PATH: seconds per sample on this rank.
    """

    def datasets(self) -> Datasets:
        return _lagging(super().datasets())


def _lagging(found: Datasets) -> Datasets:
    rank, seconds, path = os.environ["HVDTRAIN_TEST_LAG"].split(":")
    own = psutil.Process().environ()  # as it was at the start
    if int(rank) != launched_rank(own):
        return found
    return found._replace(train=_SlowToLoad(found.train, float(seconds), Path(path)))


class SlowToCompute(LanguageModel):
    """The language model; one rank takes longer for each micro-batch, before it calls its model.

    HVDTRAIN_TEST_SLOW=rank:seconds
    """

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        rank, seconds = os.environ["HVDTRAIN_TEST_SLOW"].split(":")
        if int(rank) == launched_rank() and model.training:
            time.sleep(float(seconds))
        return super().loss(model, batch)  # type: ignore[arg-type]


class _SlowToLoad(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], seconds: float, path: Path) -> None:
        self._dataset = dataset
        self._seconds = seconds
        self._path = path

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        if self._path.exists():
            time.sleep(self._seconds)
        return self._dataset[index]


class Controlled(Lagging):
    """Lagging; controlled by files in the directory HVDTRAIN_TEST_CONTROL.

    nan: while it exists, the loss of rank 1 is NaN.

    quick: while it exists, a micro-batch takes no time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(os.environ["HVDTRAIN_TEST_CONTROL"])
        self._own_pace = self._pace

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        self._pace = 0.0 if (self._directory / "quick").exists() else self._own_pace
        losses = super().loss(model, batch)
        if hvd.rank() == 1 and (self._directory / "nan").exists():
            losses["loss"] = losses["loss"] * float("nan")
        return losses


class NoLocks(Paced):
    """Paced, on a file system without flock: Lustre mounted without it returns ENOSYS.

    Such a file system is not available for tests, so the call itself fails.
    """

    def __init__(self) -> None:
        super().__init__()

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        fcntl.flock = fail


class LendsLock(Paced):
    """Paced; process 0 passes the lock of its run to the listener at HVDTRAIN_TEST_LOCKS.

    The lock then outlives the process, because a passed descriptor shares it. A helper process that
    held it would be ended with its rank.
    """

    def __init__(self) -> None:
        super().__init__()
        own = psutil.Process().environ()  # as it was at the start
        self._lent = launched_rank(own) != 0

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if not self._lent:
            self._lent = True
            with socket.socket(socket.AF_UNIX) as listener:
                listener.connect(os.environ["HVDTRAIN_TEST_LOCKS"])
                socket.send_fds(listener, [b"."], _locks())
        return super().loss(model, batch)


def _locks() -> list[int]:
    """Return this process's open descriptors of files named .lock."""
    found = []
    for file in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").endswith("/.lock"):
                found.append(file)
    return found


class BorrowedLocks:
    """Keep each lock that a LendsLock passes to `address`, until `close`.

    Args:
        directory: a directory that all hosts see, with a short path, because it becomes part of a
            socket's path.
    """

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / f"locks-{secrets.token_hex(4)}")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self.held: list[int] = []
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with suppress(OSError):  # closed
            while True:
                rank, _ = self._listener.accept()
                with rank:
                    self.held += socket.recv_fds(rank, 1, 1)[1]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for file in self.held:
            os.close(file)


class Collecting(Paced):
    """Paced, with the same losses: they are multiplied by a 1 that all ranks compute."""

    def datasets(self) -> Datasets:
        assert comm.broadcast(torch.tensor(comm.rank()), root=comm.size() - 1) == comm.size() - 1
        return super().datasets()

    def model(self) -> nn.Module:
        comm.barrier()
        return super().model()

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        weights = comm.all_gather(next(p for p in model.parameters() if p.dim() == 2).detach())
        assert len(weights) == comm.size() and (weights == weights[0]).all(), "ranks differ"
        mode = torch.tensor([float(model.training), 1 - model.training])
        assert comm.reduce_scatter(mode.repeat(comm.size())).sum() == comm.size()
        one = comm.all_reduce(mode, "mean").sum()
        return {"loss": super().loss(model, batch)["loss"] * one}
