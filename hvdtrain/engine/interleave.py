"""Backward passes of several micro-batches that take turns, block by block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py

# Private: the leaves of any nesting that torch supports. If torch removes it, this import fails;
# tests/single/test_torch_private.py detects it.
from torch.utils._pytree import tree_leaves

from hvdtrain import comm
from hvdtrain.errors import UserError
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.tasks import blocks_of

_NO_COLLECTIVES = (
    "called in a backward pass; with batch.interleave, ranks with different numbers of "
    "micro-batches would call it in a different order: set batch.interleave 1"
)


class InterleavedBackward:
    """Backward passes of several micro-batches that take turns, block by block.

    A gradient is complete, and its bucket can be sent, when the backward pass of the last
    micro-batch reaches its layer. In sequential passes that happens only during the last pass.
    Interleaved, each micro-batch runs backward through the last block, then each through the block
    before it, and so on: breadth-first accumulation (Lamy-Poirier, "Breadth-First Pipeline
    Parallelism", arXiv:2211.05953). Micro-batches add to a gradient in the same order, so sums are
    bitwise identical. The passes run in threads, one at a time.

    Args:
        task, model: determine the blocks; at the start of a block the next micro-batch takes its
            turn.
        count: number of interleaved micro-batches.
        device: device of the model; on a GPU all graphs would share one autograd thread.
        heartbeat: beats at each turn.

    Raises:
        UserError: passes through this model cannot be interleaved.
    """

    def __init__(
        self, task: Any, model: nn.Module, count: int, device: torch.device, heartbeat: Heartbeat
    ) -> None:
        self.count = count
        self._blocks = blocks_of(task, model)
        self._heartbeat = heartbeat
        self._turns = _RoundRobin(0)
        # Persistent threads: each has its own thread pool for parallel kernels.
        self._threads = ThreadPoolExecutor(count - 1, thread_name_prefix="backward")
        key = f"batch.interleave {count}"
        if device.type != "cpu":
            raise UserError(f"{key} is for models on CPUs, and this rank computes on {device.type}")
        if not self._blocks:
            raise UserError(
                f"{key} interleaves passes at blocks, but the model has none (no nn.ModuleList, "
                "and the task no blocks(model) that names them)"
            )
        if any(isinstance(m, _NormBase) and m.track_running_stats for m in model.modules()):
            raise UserError(
                f"{key} excludes BatchNorm, whose running statistics the forward pass of a "
                "micro-batch changes before the backward pass of an earlier one"
            )

    @contextmanager
    def forward(self, number: int) -> Iterator[None]:
        """Wrap the forward pass of interleaved micro-batch `number`, counted from 0."""

        def begins(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(partial(self._is_behind, number))
                    return

        hooks = [b.register_forward_pre_hook(begins, with_kwargs=True) for b in self._blocks]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def backward(self, losses: Sequence[Tensor]) -> None:
        """Run backward from all losses, in the order of their numbers.

        Raises:
            Exception: the first error of any pass; the other passes have ended.
        """
        turns = self._turns = _RoundRobin(len(losses))
        with comm.COLLECTIVES.refused(_NO_COLLECTIVES):
            others = [
                self._threads.submit(turns.run, number, loss.backward)
                for number, loss in enumerate(losses[1:], start=1)
            ]
            turns.run(0, losses[0].backward)
            for other in others:
                other.result()
        if turns.failure is not None:
            raise turns.failure

    def _is_behind(self, number: int, gradient: Tensor) -> None:
        """Called with the gradient of a block's input: micro-batch `number` has left the block."""
        self._heartbeat.beat(Activity.WORKING)
        self._turns.next(number)


class _RoundRobin:
    """Scheduler of the threads; waits need no timeout, as the watchdog detects a stuck turn.

    Attributes:
        failure: the first error of any thread.
    """

    def __init__(self, count: int) -> None:
        self.failure: BaseException | None = None
        self._left = list(range(count))
        self._may_run = [threading.Semaphore(int(number == 0)) for number in range(count)]

    def run(self, number: int, work: Callable[[], Any]) -> None:
        """Run `work` when it is its turn; errors are stored in `failure`, not raised."""
        try:
            self._wait(number)
            work()
        except BaseException as error:
            self.failure = self.failure or error
        following = self._following(number)
        self._left.remove(number)
        if self._left:
            self._may_run[following].release()

    def next(self, number: int) -> None:
        """Let the other threads take their turns.

        Raises:
            RuntimeError: another thread has failed.
        """
        self._may_run[self._following(number)].release()
        self._wait(number)

    def _following(self, number: int) -> int:
        return self._left[(self._left.index(number) + 1) % len(self._left)]

    def _wait(self, number: int) -> None:
        self._may_run[number].acquire()
        if self.failure is not None:
            raise RuntimeError("the backward pass of another micro-batch has failed")
