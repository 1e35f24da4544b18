"""When a checkpoint is saved: every N steps or seconds, at the end, and on a stop request.

Ranks wait until a checkpoint is written only at the end of the run: there all ranks take turns
until rank 0's writer has finished. During the run a step waits while its state is copied, and with
checkpoint.keep_best rank 0 waits up to 10 s for the writer, if the step has the lowest validation
loss. If the writer is busy when the next checkpoint is due, that checkpoint is taken after the
first step at which the writer is free, with the state of that step; with local SGD, after a
synchronization.

If the run may return to a checkpoint because of a loss spike, a step at which a checkpoint is due
by steps waits for the writer instead: the curve then does not depend on how fast files are written.

Rank 0 decides. If ranks have their own state to save (local and sharded parts), they save it after
the same step, into one directory: after each step they vote on it with a small all-reduce.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import torch

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.layout import directory_name, hidden_name
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.engine.loop import Callback, Loop, StepRecord, is_best
from hvdtrain.engine.state import RunState
from hvdtrain.log import logger
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import broadcast_json, gather_json, sum_
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.phases import PhaseTimer

# Interval of the turns while rank 0 saves at the end of the run: a single collective that lasts as
# long as a slow disk would look like a rank that does not respond.
_TURN_SECONDS = 1.0
# Maximum wait of a step with the lowest validation loss for an earlier checkpoint.
_BEST_SECONDS = 10.0


class Turn(IntEnum):
    """Rank 0's decision in each turn of the last save."""

    DONE = 0  # the save has ended, or rank 0 has given up
    WAIT = 1  # rank 0 still waits for its writer
    BEGIN = 2  # all ranks begin a save now


class Votes(NamedTuple):
    """Number of ranks that report each condition about a save between two steps."""

    begin: int  # a save is due (reported only by rank 0)
    busy: int  # the writer is still writing an earlier checkpoint
    failed: int  # the writer could not write its files of an earlier checkpoint


def count_votes(begin: bool, busy: bool, failed: bool) -> Votes:
    """Sum the votes of all ranks; every rank calls it."""
    own = torch.tensor([begin, busy, failed], dtype=torch.int64)
    return Votes(*sum_(own, "checkpoint.begin").tolist())


def agree_on_turn(own: Turn, failed: bool) -> tuple[Turn, bool]:
    """Exchange one turn of the last save; every rank calls it.

    Args:
        own: rank 0's decision; DONE on all other ranks, so that the sum over the ranks is rank 0's
            decision.
        failed: this rank could not write its files.

    Returns:
        Rank 0's decision, and whether any rank has failed.
    """
    sums = sum_(torch.tensor([own, failed], dtype=torch.int64), "checkpoint.saving").tolist()
    return Turn(sums[0]), sums[1] > 0


@dataclass(frozen=True)
class Saving:
    """What a rank needs to participate in saves.

    Args:
        state: state of the run.
        group: all ranks.
        writer: None on a rank that has nothing to save.
        before: called before each save, in the background, to flush to disk what the checkpoint
            relies on.
    """

    state: RunState
    group: Group
    writer: CheckpointWriter | None
    before: Callable[[], None]

    @property
    def shared(self) -> bool:
        """Whether every rank has something to save."""
        return bool(self.state.of_scope("local", "sharded"))


class SaveCheckpoints(Callback):
    """Save checkpoints on rank 0 while the other ranks continue; a step is saved only once.

    Args:
        grace_seconds: from a stop request until the ranks are killed; 0 = not known.
        timer: records the time spent here.
        punctual: no checkpoint that is due by steps is taken later.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        grace_seconds: float,
        saving: Saving,
        timer: PhaseTimer,
        punctual: bool = False,
    ) -> None:
        self._punctual = punctual
        self._timer = timer
        self._config = config
        self._grace = grace_seconds
        self._saving = saving
        self._writer = saving.writer
        self._decides = saving.group.rank == 0
        self._reported_failure_of = -1  # the step whose save has failed on this rank
        self._warned_about = -1  # the step whose save delayed the next one
        self.error: Exception | None = None  # why the run's last state is not saved

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if not loop.ranks_in_sync:
            return
        if loop.preempted or (loop.ending and self._config.enabled):
            with self._timer.inside("checkpoint"):
                self._save_last_together(loop)
        elif self._config.enabled and self._writer is not None:
            self._look(self._writer, loop.progress.step)

    def _look(self, writer: CheckpointWriter, step: int) -> None:
        every = self._config.every
        best = self._config.keep_best and is_best(self._saving.state.progress.evaluations, step)
        due = self._interval_elapsed(writer, step)
        punctual = self._punctual and every > 0 and step % every == 0
        unprepared = not writer.prepared and not writer.busy
        if best or due or punctual or unprepared or self._saving.shared:
            with self._timer.inside("checkpoint"):
                if punctual:
                    self.wait()
                self._save_or_prepare(writer, step, best, due)

    def _save_or_prepare(self, writer: CheckpointWriter, step: int, best: bool, due: bool) -> None:
        begin = self._decides and (due or best) and not writer.holds(step)
        if begin and best:
            # No later step has this state.
            writer.wait(time.monotonic() + _BEST_SECONDS)
        if self._saving.shared:
            # Each rank's writer must be free.
            failure = self._new_failure(writer)
            votes = count_votes(begin, writer.busy, failure is not None)
            if votes.failed:
                self._share_failures(writer, failure)
            if votes.begin and not votes.busy:
                self._begin(step)
                return
        elif begin and not writer.busy:
            self._begin(step)
            return
        if begin and due:
            self._warn(writer, step)
        elif begin:
            logger.warning(
                "the validation loss after step %d is the lowest so far, but the checkpoint of "
                "step %d is still being written after %g more s: it is not saved "
                "(checkpoint.keep_best)",
                step,
                writer.taken_step,
                _BEST_SECONDS,
            )
        elif not writer.prepared and not writer.busy:
            writer.prepare(self._saving.state.capture(self._saving.group))

    def _new_failure(self, writer: CheckpointWriter) -> Exception | None:
        """Error of this rank's writer on files for rank 0, unless already reported to the ranks."""
        failed = not self._decides and not writer.busy and writer.error is not None
        if not failed or self._reported_failure_of == writer.taken_step:
            return None
        self._reported_failure_of = writer.taken_step
        return writer.error

    def _share_failures(self, writer: CheckpointWriter, failure: Exception | None) -> None:
        """Make rank 0 stop waiting for files that a rank cannot write; every rank calls it."""
        group = self._saving.group
        own = None if failure is None else f"rank {group.rank}: {failure}"
        writer.fail([theirs for theirs in gather_json(own, "checkpoint.failed") if theirs])

    def _interval_elapsed(self, writer: CheckpointWriter, step: int) -> bool:
        every, seconds = self._config.every, self._config.every_seconds
        by_steps = every > 0 and step // every > writer.taken_step // every
        return by_steps or (seconds > 0 and time.monotonic() - writer.taken_at >= seconds)

    def _begin(self, step: int) -> None:
        """Begin a save on rank 0, or on every rank if all ranks have something to save."""
        directory = ""
        if self._saving.shared:
            directory = broadcast_json(
                hidden_name(Path(directory_name(step))).name, "checkpoint.directory"
            )
        writer = self._writer
        if writer is not None and not writer.busy:
            state, group = self._saving.state, self._saving.group
            writer.start(state.capture(group, directory), self._saving.before)

    def _warn(self, writer: CheckpointWriter, step: int) -> None:
        if self._warned_about != writer.taken_step:
            self._warned_about = writer.taken_step
            logger.warning(
                "a checkpoint is due at step %d, but the checkpoint of step %d is still being "
                "written (%.1f s so far); it will be saved afterwards",
                step,
                writer.taken_step,
                time.monotonic() - writer.taken_at,
            )

    def _save_last_together(self, loop: Loop) -> None:
        """Return when rank 0 has saved or given up; every rank calls it."""
        step = loop.progress.step
        if not self._decides:
            while self._take_turn(Turn.DONE, step) != Turn.DONE:
                pass
            return
        if self._writer is not None:
            limit = loop.asked_to_stop_at + self._grace if self._grace else math.inf
            deadline = limit if loop.preempted else math.inf
            self._save_last(self._writer, step, deadline)
        self._take_turn(Turn.DONE, step)

    def _take_turn(self, own: Turn, step: int) -> Turn:
        """Return rank 0's decision, and begin the save if it is BEGIN; every rank calls it.

        Args:
            own: see `agree_on_turn`.
        """
        writer = self._writer
        failure = None if writer is None else self._new_failure(writer)
        turn, failed = agree_on_turn(own, failure is not None)
        if failed and writer is not None:
            self._share_failures(writer, failure)
        if turn == Turn.BEGIN:
            self._begin(step)
        return turn

    def _save_last(self, writer: CheckpointWriter, step: int, deadline: float) -> None:
        """Save the run's last state if there is time, and wait until it is on disk.

        Rank 0 calls it; the other ranks take turns meanwhile.
        """
        in_time = writer.expected_seconds() <= deadline - time.monotonic()
        if not writer.holds(step) and in_time:
            self._wait(writer, step, deadline)
            if not writer.busy:
                self._take_turn(Turn.BEGIN, step)
        self._wait(writer, step, deadline)
        if writer.last_saved_step == step:
            return
        if writer.taken_step == step and writer.error is not None:
            self.error = writer.error
        elif deadline < math.inf:
            logger.warning(
                "the checkpoint of step %d does not fit into the remainder of %g s "
                "(preempt.grace_seconds); %s",
                step,
                self._grace,
                writer.newest(),
            )
        else:
            self.error = TimeoutError(
                f"the checkpoint of step {writer.taken_step} is still being written "
                f"({time.monotonic() - writer.taken_at:.0f} s so far)"
            )

    def _wait(self, writer: CheckpointWriter, step: int, deadline: float) -> None:
        """Wait for the save in progress until `deadline`; take a turn every second."""
        limit = min(deadline, time.monotonic() + writer.wait_limit())
        while not writer.wait(min(limit, time.monotonic() + _TURN_SECONDS)):
            if time.monotonic() >= limit:
                return
            self._take_turn(Turn.WAIT, step)

    def wait(self) -> None:
        """Wait until this rank has written the checkpoint in progress, with a timeout."""
        if self._writer is not None:
            with heartbeat.HEARTBEAT.waiting():
                self._writer.wait()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.give_up_others()
