"""A checkpoint every `checkpoint.every` steps, after the last step, and when asked to stop."""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.engine.loop import Loop, Record
from hvdtrain.log import logger


class SaveCheckpoints:
    """Rank 0 saves; the others go on and meet it in the next exchange.

    Args:
        capture: the run's state now.
        manager: None on ranks that do not save.
        before: called before each save, to bring to disk what the checkpoint relies on.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        capture: Callable[[], Checkpoint],
        manager: CheckpointManager | None,
        before: Callable[[], None],
    ) -> None:
        self._config = config
        self._capture = capture
        self._manager = manager
        self._before = before
        self.error: OSError | None = None  # of the latest save

    def on_step(self, loop: Loop, record: Record) -> None:
        every = self._config.every
        due = every > 0 and (loop.ending or loop.progress.step % every == 0)
        if self._manager is None or not (due or loop.preempted):
            return
        try:
            self._before()
            self._manager.save(self._capture())
            self.error = None
        except OSError as error:
            self.error = error
            logger.error(
                "checkpoint of step %d could not be written (%s); training goes on, older "
                "checkpoints are untouched",
                loop.progress.step,
                error,
            )

    def close(self) -> None:
        pass
