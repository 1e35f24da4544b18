"""Saves behind the training's back: a step stops only while its state is copied."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Sequence
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor

from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.log import logger

# The longest wait for a save: a file system may stand still for a minute, and a slow one has
# this rate.
PATIENCE_S = 120.0
_SLOWEST = 10e6  # bytes a second
_QUICKLY_TOUCHED = 64 << 20  # bytes; a save of less need not wait for `prepare`


class Store(Protocol):
    """Where checkpoints go: CheckpointManager on rank 0, FilesOfRank on another rank."""

    def has(self, step: int) -> bool:
        """The checkpoint of this step is there already."""
        ...

    def save(self, checkpoint: Checkpoint) -> object:
        """Writes it; OSError where it cannot be written."""
        ...


class CheckpointWriter:
    """Copies the state into a staging buffer and writes it from there, one save at a time.

    Rank 0 has one for as long as its process trains; another rank, where it has state of its own
    to save, for a generation. The thread is a daemon: one that hangs in a file system does not
    keep the process from ending.

    Args:
        store: writes and deletes.
        saved: step of the newest checkpoint of the run so far; 0 where there is none.
        emit: called with each save: "checkpoint" (step, seconds that it took, stall_seconds by
            which it held up the steps) or "checkpoint_failed" (step, error); from the thread.
    """

    def __init__(
        self,
        store: Store,
        saved: int = 0,
        emit: Callable[..., None] = lambda *a, **k: None,
    ) -> None:
        self._store = store
        self._emit = emit
        self._staging: Checkpoint | None = None
        self._thread: Thread | None = None
        self.last_saved_step = saved
        self.last_saved_at = time.time()  # unix; at first, when this writer began
        self.taken_step = saved  # of the newest state that was copied, and when
        self.taken_at = time.monotonic()
        self.error: Exception | None = None  # of the latest save
        self.failures = 0
        self.seconds = 0.0  # that the latest good save took, in the background
        self.stall_seconds = 0.0  # that the latest copy took
        self.stall_seconds_total = 0.0

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def prepared(self) -> bool:
        """There is a staging buffer."""
        return self._staging is not None

    def newest(self) -> str:
        """For people: which checkpoint the run would resume from."""
        step = self.last_saved_step
        return f"the newest checkpoint is of step {step}" if step else "there is no checkpoint"

    def holds(self, step: int) -> bool:
        """The step's state is saved or being saved."""
        return step == self.last_saved_step or (self.busy and step == self.taken_step)

    def expected_seconds(self) -> float:
        """How long a save would take that starts now, after the one in progress."""
        running = time.monotonic() - self.taken_at if self.busy else self.seconds
        return self.seconds + max(0.0, self.seconds - running)

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Makes the staging buffer in the background: the first touch of memory is slow."""
        if _size(checkpoint) > _QUICKLY_TOUCHED:
            self._begin(lambda: self._prepare(checkpoint))
        else:
            self._staging = _empty_like(checkpoint)

    def _prepare(self, checkpoint: Checkpoint) -> None:
        staging = _empty_like(checkpoint)
        _touch(_tensors(staging))
        self._staging = staging

    def start(self, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Copies the state and begins to write it; only while not `busy`.

        Args:
            checkpoint: may hold live tensors; they may change as soon as this returns.
            before: called in the background before the checkpoint is written, to bring to disk
                what it relies on; OSError where that cannot be done.
        """
        assert not self.busy
        begin = time.monotonic()
        if self._staging is None or not _fits(self._staging, checkpoint):
            self._staging = _empty_like(checkpoint)
        _copy(checkpoint, self._staging)
        self.taken_step, self.taken_at = checkpoint.state["step"], begin
        self.stall_seconds = time.monotonic() - begin
        self.stall_seconds_total += self.stall_seconds
        self.error = None
        self._begin(lambda: self._save(before))

    def give_up_others(self) -> None:
        """The save in progress waits for no other rank's files any more: a rank may be gone."""
        if self._staging is not None and self._staging.shared is not None:
            self._staging.shared.given_up.set()

    def fail(self, failures: Sequence[str]) -> None:
        """The save in progress has failed on other ranks; does nothing if there is none.

        Args:
            failures: what each of them says.
        """
        if self.busy and self._staging is not None and self._staging.shared is not None:
            self._staging.shared.failures.extend(failures)

    def patience(self) -> float:
        """The longest that anybody waits for the save in progress, in seconds."""
        return PATIENCE_S + _size(self._staging) / _SLOWEST

    def wait(self, deadline: float = math.inf) -> bool:
        """Waits for the save in progress, not for ever.

        Args:
            deadline: time.monotonic() at which to give up even earlier.

        Returns:
            Whether the writer is free.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, min(self.patience(), deadline - time.monotonic())))
        return not self.busy

    def _begin(self, work: Callable[[], None]) -> None:
        self._thread = Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _save(self, before: Callable[[], None]) -> None:
        begin = time.monotonic()
        step = self.taken_step
        assert self._staging is not None
        try:
            before()
            # Another rank may have been rank 0 when this step was saved.
            if not self._store.has(step):
                self._store.save(self._staging)
                self.seconds = time.monotonic() - begin
                stall = self.stall_seconds
                self._emit("checkpoint", step=step, seconds=self.seconds, stall_seconds=stall)
            self.last_saved_step = step
            self.last_saved_at = time.time()
        except Exception as error:  # whatever it is, training is worth more
            self.error = error
            self.failures += 1
            self._emit("checkpoint_failed", step=step, error=f"{type(error).__name__}: {error}")
            logger.error(
                "checkpoint of step %d could not be written (%s: %s); training continues, older "
                "checkpoints are untouched",
                step,
                type(error).__name__,
                error,
            )


def _size(checkpoint: Checkpoint | None) -> int:
    """Bytes of the tensors."""
    return sum(tensor.nbytes for tensor in _tensors(checkpoint))


def _tensors(checkpoint: Checkpoint | None) -> Iterable[Tensor]:
    parts = () if checkpoint is None else checkpoint.parts.values()
    return (tensor for tensors in parts for tensor in tensors.values())


def _empty_like(checkpoint: Checkpoint) -> Checkpoint:
    """Memory of its own for each tensor, pinned for those that lie on a GPU."""
    parts = {
        part: {
            name: torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
            for name, t in tensors.items()
        }
        for part, tensors in checkpoint.parts.items()
    }
    return Checkpoint(parts, {})


def _touch(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)  # other threads run meanwhile


def _fits(staging: Checkpoint, checkpoint: Checkpoint) -> bool:
    return _layout(staging) == _layout(checkpoint)


def _layout(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        part: {name: (t.shape, t.dtype) for name, t in tensors.items()}
        for part, tensors in checkpoint.parts.items()
    }


@torch.no_grad()
def _copy(source: Checkpoint, target: Checkpoint) -> None:
    for part, tensors in source.parts.items():
        for name, tensor in tensors.items():
            target.parts[part][name].copy_(tensor, non_blocking=True)
    if any(tensor.is_cuda for tensor in _tensors(source)):
        torch.cuda.synchronize()
    target.state, target.shared = dict(source.state), source.shared
    target.pieces = source.pieces
