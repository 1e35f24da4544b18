"""Checkpoints written in the background: a step waits only while its state is copied."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor

from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.log import logger
from hvdtrain.runtime.pinned import pinned

# Longest wait for a save: a file system may hang for a minute, and a slow one writes at _SLOWEST.
TIMEOUT_S = 120.0
_SLOWEST = 10e6  # bytes/s
_ALIGNMENT = 64  # bytes
_QUICKLY_TOUCHED = 64 << 20  # bytes; a smaller save need not wait for `prepare`


class Store(Protocol):
    """Destination of checkpoints: CheckpointManager on rank 0, FilesOfRank on other ranks."""

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step exists already."""
        ...

    def save(self, checkpoint: Checkpoint) -> object:
        """Write a checkpoint; raise OSError if it cannot be written."""
        ...


class CheckpointWriter:
    """Background writer of checkpoints, from a staging buffer, one save at a time.

    Rank 0 has one as long as its process trains. Another rank with state of its own to save has one
    for each generation. The thread is a daemon, so a save that hangs in a file system does not
    keep the process from exiting.

    Args:
        store: writes and deletes.
        saved: step of the newest checkpoint of the run so far; 0 if there is none.
        emit: called from the thread after each save: "checkpoint" (step, seconds of the save,
            stall_seconds of training) or "checkpoint_failed" (step, error).
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
        self.last_saved_at = time.time()  # unix time; initially the creation of this writer
        self.taken_step = saved  # step of the newest copied state; the next line is its time
        self.taken_at = time.monotonic()
        self.error: Exception | None = None  # of the latest save
        self.failures = 0
        self.seconds = 0.0  # duration of the latest successful save, in the background
        self.stall_seconds = 0.0  # duration of the latest copy
        self.stall_seconds_total = 0.0

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def prepared(self) -> bool:
        """Whether there is a staging buffer."""
        return self._staging is not None

    def newest(self) -> str:
        """Message for users: the checkpoint from which the run would resume."""
        step = self.last_saved_step
        return f"the newest checkpoint is of step {step}" if step else "there is no checkpoint"

    def go_back(self, step: int, saved: int) -> None:
        """Count checkpoints after `step` as not saved: the run repeats these steps.

        Args:
            saved: step of the newest checkpoint that counts; 0 if there is none.
        """
        if self.taken_step > step:
            self.taken_step = self.last_saved_step = saved

    def holds(self, step: int) -> bool:
        """Whether the step's state is saved or being saved."""
        return step == self.last_saved_step or (self.busy and step == self.taken_step)

    def expected_seconds(self) -> float:
        """Expected time until a save that is started now finishes, after the one in progress."""
        running = time.monotonic() - self.taken_at if self.busy else self.seconds
        return self.seconds + max(0.0, self.seconds - running)

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Allocate the staging buffer in the background: the first access to memory is slow."""
        if _size(checkpoint) > _QUICKLY_TOUCHED:
            self._begin(lambda: self._prepare(checkpoint))
        else:
            self._staging = _empty_like(checkpoint)

    def _prepare(self, checkpoint: Checkpoint) -> None:
        staging = _empty_like(checkpoint)
        _touch(_tensors(staging))
        self._staging = staging

    def start(self, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Copy the state and begin to write it; must not be called while `busy`.

        Args:
            checkpoint: may hold live tensors; they may change as soon as this returns.
            before: called in the background before the checkpoint is written, to flush to disk what
                it depends on; raises OSError if it fails.
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
        """Stop the save in progress from waiting for other ranks' files: a rank may be gone."""
        if self._staging is not None and self._staging.shared is not None:
            self._staging.shared.given_up.set()

    def fail(self, failures: Sequence[str]) -> None:
        """Report that other ranks failed in the save in progress; no effect if there is none.

        Args:
            failures: the other ranks' error messages.
        """
        if self.busy and self._staging is not None and self._staging.shared is not None:
            self._staging.shared.failures.extend(failures)

    def wait_limit(self) -> float:
        """The longest wait for the save in progress, in seconds."""
        return TIMEOUT_S + _size(self._staging) / _SLOWEST

    def wait(self, deadline: float = math.inf) -> bool:
        """Wait for the save in progress, with a timeout of `wait_limit`.

        Args:
            deadline: time.monotonic() at which to give up earlier.

        Returns:
            Whether the writer is free.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, min(self.wait_limit(), deadline - time.monotonic())))
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
        except Exception as error:  # no error is worth stopping the training
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
    """Total size of the tensors in bytes."""
    return sum(tensor.nbytes for tensor in _tensors(checkpoint))


def _tensors(checkpoint: Checkpoint | None) -> Iterable[Tensor]:
    parts = () if checkpoint is None else checkpoint.parts.values()
    return (tensor for tensors in parts for tensor in tensors.values())


def _empty_like(checkpoint: Checkpoint) -> Checkpoint:
    """Allocate memory for each tensor; one pinned block per part for the tensors on a GPU."""
    parts = {}
    for part, tensors in checkpoint.parts.items():
        on_gpu = {name: t for name, t in tensors.items() if t.is_cuda}
        views = _in_one_block(on_gpu, pinned)
        parts[part] = {
            name: views[name] if name in views else torch.empty(t.shape, dtype=t.dtype)
            for name, t in tensors.items()
        }
    return Checkpoint(parts, {})


def _in_one_block(
    tensors: Mapping[str, Tensor], allocate: Callable[[int, torch.device], Tensor]
) -> dict[str, Tensor]:
    """Return contiguous tensors of the same names, shapes and dtypes, in one block of memory.

    Args:
        tensors: on one device, for which memory is allocated.
        allocate: see `pinned`.
    """
    if not tensors:
        return {}
    ends = [*accumulate(_aligned(t) for t in tensors.values())]
    block = allocate(ends[-1], next(iter(tensors.values())).device)
    return {
        name: block[end - _aligned(t) :][: t.nbytes].view(t.dtype).view(t.shape)
        for end, (name, t) in zip(ends, tensors.items(), strict=True)
    }


def _aligned(tensor: Tensor) -> int:
    """Bytes of a tensor in a block; the next tensor is aligned as if it were allocated alone."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _touch(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)  # releases the GIL


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
    target.positions = source.positions
