"""When a checkpoint is taken: every so many steps or seconds, at the end, and when asked to stop.

Nobody waits for one but the run's end: there all ranks wait in turns for rank 0's writer. While
one is being written, the next that is due is taken after the first step at which the writer is
free, with the state of that step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.engine.loop import Loop, StepRecord
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import sum_
from hvdtrain.runtime.phases import PhaseTimer

# At the run's end the ranks tell each other so often that rank 0 still saves: a collective that
# lasts as long as a slow disk would be taken for a rank that takes no part.
_TURN_SECONDS = 1.0


class SaveCheckpoints:
    """Rank 0 saves; the others continue. Two calls for one step save it once.

    Args:
        grace_seconds: from being asked to stop until being killed; 0 = not known.
        capture: the run's state now.
        writer: None on ranks that do not save.
        before: called before each save, in the background, to bring to disk what the
            checkpoint relies on.
        timer: told of the time that it takes here.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        grace_seconds: float,
        capture: Callable[[], Checkpoint],
        writer: CheckpointWriter | None,
        before: Callable[[], None],
        timer: PhaseTimer,
    ) -> None:
        self._timer = timer
        self._config = config
        self._grace = grace_seconds
        self._capture = capture
        self._writer = writer
        self._before = before
        self._warned_of = -1  # the step whose save was in the way of the next
        self.error: Exception | None = None  # why the run's last state is not saved

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.preempted or (loop.ending and self._config.enabled):
            with self._timer.inside("checkpoint"):
                self._save_last_together(loop)
        elif self._config.enabled and self._writer is not None:
            with self._timer.inside("checkpoint"):
                self._look(self._writer, loop.progress.step)

    def _look(self, writer: CheckpointWriter, step: int) -> None:
        if self._due(writer, step) and not writer.holds(step):
            self._save(writer, step)
        elif not writer.prepared and not writer.busy:
            writer.prepare(self._capture())

    def _due(self, writer: CheckpointWriter, step: int) -> bool:
        every, seconds = self._config.every, self._config.every_seconds
        by_steps = every > 0 and step // every > writer.taken_step // every
        return by_steps or (seconds > 0 and time.monotonic() - writer.taken_at >= seconds)

    def _save(self, writer: CheckpointWriter, step: int) -> None:
        if not writer.busy:
            writer.start(self._capture(), self._before)
        elif self._warned_of != writer.taken_step:
            self._warned_of = writer.taken_step
            logger.warning(
                "a checkpoint is due at step %d, but that of step %d is still being written, for "
                "%.1f s now; it is taken when that is done",
                step,
                writer.taken_step,
                time.monotonic() - writer.taken_at,
            )

    def _save_last_together(self, loop: Loop) -> None:
        """Every rank calls it, and none returns before rank 0 has saved or given up."""
        turns: Iterator[bool] = iter(())
        if self._writer is not None:
            limit = loop.asked_to_stop_at + self._grace if self._grace else math.inf
            deadline = limit if loop.preempted else math.inf
            turns = self._save_last(self._writer, loop.progress.step, deadline)
        while sum_(torch.tensor(float(next(turns, False))), "checkpoint.saving"):
            pass

    def _save_last(self, writer: CheckpointWriter, step: int, deadline: float) -> Iterator[bool]:
        """Saves the run's last state if there is time to, and waits until it is on disk.

        Yields True after each turn in which it is not.
        """
        in_time = writer.expected_seconds() <= deadline - time.monotonic()
        if not writer.holds(step) and in_time:
            yield from _turns(writer, deadline)
            if not writer.busy:
                writer.start(self._capture(), self._before)
        yield from _turns(writer, deadline)
        if writer.last_saved_step == step:
            return
        if writer.taken_step == step and writer.error is not None:
            self.error = writer.error
        elif deadline < math.inf:
            logger.warning(
                "the checkpoint of step %d does not fit into what is left of %g s "
                "(preempt.grace_seconds); %s",
                step,
                self._grace,
                writer.newest(),
            )
        else:
            self.error = TimeoutError(
                f"that of step {writer.taken_step} is still being written, for "
                f"{time.monotonic() - writer.taken_at:.0f} s now"
            )

    def close(self) -> None:
        pass


def _turns(writer: CheckpointWriter, deadline: float) -> Iterator[bool]:
    """Waits for the save in progress, not beyond `deadline`; yields True after each turn."""
    limit = min(deadline, time.monotonic() + writer.patience())
    while not writer.wait(min(limit, time.monotonic() + _TURN_SECONDS)):
        if time.monotonic() >= limit:
            return
        yield True
