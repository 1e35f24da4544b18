"""State of users' collectives in a process: their totals, and whether one may begin."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from hvdtrain.errors import CollectiveError
from hvdtrain.log import logger
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.heartbeat import HEARTBEAT
from hvdtrain.runtime.init import initialize, is_initialized
from hvdtrain.runtime.phases import PhaseTimer

OPERATIONS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")
# Their results depend on the number of ranks: sums of floating-point numbers, and orders of rows.
_FOLLOWING_RANKS = ("all_reduce", "all_gather", "reduce_scatter")
# Horovod's message on all ranks if their calls do not match; no rank is lost in that case.
_MISTAKES = ("Mismatched", "same name as another tensor")

T = TypeVar("T")


@dataclass(frozen=True)
class Usage:
    """Use of one operation, between several ranks.

    Args:
        calls: number of completed calls.
        bytes: bytes of the tensors, as nccl-tests counts them: the larger of input and output.
        seconds: in the calls, including the wait for other ranks.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class UserCollectives:
    """See the top of this file. One thread calls collectives; any thread may read the totals.

    Attributes:
        totals: totals of each operation, since the process began.
        counts: the fewest and the most micro-batches that a rank has in this training step; None
            outside a training step.
        timer: timer of a training run. Time in a collective counts as "other": it is neither this
            rank's own work, which identifies slow ranks, nor the gradient exchange.
    """

    def __init__(self) -> None:
        self.totals = {operation: Usage() for operation in OPERATIONS}
        self.counts: tuple[int, int] | None = None
        self.timer: PhaseTimer | None = None
        self._drained = dict(self.totals)
        self._not_exact: set[str] = set()
        self._beyond = ""
        self._is_copy = False

    def start(self, function: str) -> None:
        """Start Horovod, unless a training run or an earlier call has started it.

        Raises:
            CollectiveError: this process is not a rank.
            UserError, RankLostError: as runtime.init.initialize.
        """
        if is_initialized():
            return
        if environment.elastic():
            raise CollectiveError(
                f"comm.{function}: a user script cannot be elastic; start it with a fixed "
                "number of ranks (horovodrun -np 2 python script.py), or train a task with "
                "hvdtrain.train"
            )
        if multiprocessing.parent_process() is not None:
            raise CollectiveError(_no_rank(function))
        environment.prepare()
        initialize()

    def begin_run(self, timer: PhaseTimer, exact: bool) -> None:
        """Take the timer of a training run; `exact`: it is to be bitwise identical on all ranks."""
        self.timer = timer
        self._not_exact = set(_FOLLOWING_RANKS) if exact else set()

    def follows_ranks(self, operation: str) -> None:
        """Warn once in an exact run that an operation's result depends on the number of ranks."""
        if operation in self._not_exact:
            self._not_exact.discard(operation)
            logger.warning(
                "exchange.name exact does not cover comm.%s: its result follows the ranks (a sum "
                "in its rounding, rows in their order unless you sort them), so numbers computed "
                "from it may differ in the last bits on another number of ranks; see "
                'docs/collectives.md, "Exact runs"',
                operation,
            )

    def check(self, operation: str) -> None:
        """Raise CollectiveError if the other ranks would not participate in a collective."""
        if self._is_copy:
            raise CollectiveError(_no_rank(operation))
        if self._beyond:
            raise CollectiveError(f"comm.{operation}: {self._beyond}")

    def micro_batches(
        self, batches: Iterator[T], in_common: int, most: int | None = None
    ) -> Iterator[T]:
        """Yield this rank's micro-batches of a step or an evaluation.

        Args:
            in_common: number that every rank has; beyond it a collective would wait forever.
            most: the most that any rank has, in a training step.
        """
        self.counts = None if most is None else (in_common, most)
        try:
            for number, batch in enumerate(batches, start=1):
                self._beyond = _beyond(number, in_common) if number > in_common else ""
                yield batch
        finally:
            self._beyond, self.counts = "", None

    def refuse(self, why: str) -> None:
        """Make collectives raise CollectiveError with the reason `why` from now on; "": none."""
        self._beyond = why

    @contextmanager
    def refused(self, why: str) -> Iterator[None]:
        """Make collectives inside the context raise CollectiveError with the reason `why`."""
        before, self._beyond = self._beyond, why
        try:
            yield
        finally:
            self._beyond = before

    @contextmanager
    def timed(self, operation: str) -> Iterator[list[int]]:
        """Time a collective; the caller appends its bytes to the list."""
        sizes: list[int] = []
        began = time.perf_counter()
        try:
            with self.timer.inside("other") if self.timer else nullcontext():
                yield sizes
        except RankLostError as error:
            if not any(mistake in str(error) for mistake in _MISTAKES):
                raise
            raise CollectiveError(
                f"comm.{operation}: the ranks call it differently ({error})"
            ) from None
        before, seconds = self.totals[operation], time.perf_counter() - began
        self.totals[operation] = Usage(
            before.calls + 1, before.bytes + sum(sizes), before.seconds + seconds
        )

    @contextmanager
    def waiting(self, axis: str) -> Iterator[None]:
        """Count time inside as waiting for other ranks of a replica, see PhaseTimer.

        Raises:
            RankLostError: this generation is over, and a peer may have left already.
        """
        if HEARTBEAT.generation_over:
            raise RankLostError("this generation is over")
        with HEARTBEAT.waiting(), self.timer.waiting(axis) if self.timer else nullcontext():
            yield

    def total_of(self, name: str) -> dict[str, float]:
        """One field of `Usage`, for each operation."""
        return {operation: getattr(totals, name) for operation, totals in self.totals.items()}

    def drain(self) -> dict[str, dict[str, float]]:
        """Totals of the operations that were used since the last call."""
        found = {}
        for operation, now in self.totals.items():
            before, self._drained[operation] = self._drained[operation], now
            if now.calls > before.calls:
                found[operation] = asdict(
                    replace(
                        now,
                        calls=now.calls - before.calls,
                        bytes=now.bytes - before.bytes,
                        seconds=round(now.seconds - before.seconds, 6),
                    )
                )
        return found

    def forked(self) -> None:
        """Handle a fork: the child has Horovod's state, but not the thread that does the work."""
        self._is_copy = is_initialized()


def _beyond(number: int, in_common: int) -> str:
    return (
        f"called for this rank's micro-batch {number}, where another rank has {in_common}: it "
        "would never come; choose batch.global_size / batch.micro_size (in evaluation: the "
        "micro-batches of the validation data) as a multiple of the number of ranks"
    )


def _no_rank(function: str) -> str:
    return (
        f"comm.{function}: called in a helper process, such as a DataLoader's worker, which is not "
        "a rank; call it in the rank itself and hand the result over"
    )


# A process has one Horovod.
COLLECTIVES = UserCollectives()
os.register_at_fork(after_in_child=COLLECTIVES.forked)
