"""Which checkpoint a run resumes from, and which are kept."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from hvdtrain.checkpoint.format import (
    MARKER,
    Checkpoint,
    DamagedError,
    delete,
    folder_name,
    read,
    write,
)
from hvdtrain.errors import UserError
from hvdtrain.log import logger


class CheckpointManager:
    """The checkpoints of one run; only rank 0 has one.

    Args:
        root: RUN/checkpoints.
        keep: how many of the newest stay.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self.root = root
        self._keep = keep

    def finished(self) -> list[Path]:
        """Checkpoints that have their marker, oldest first."""
        return sorted(path.parent for path in self.root.glob(f"step_*/{MARKER}"))

    def save(self, checkpoint: Checkpoint) -> Path:
        """Writes one and removes those beyond `keep`.

        Raises:
            OSError: it could not be written; older ones are untouched.
        """
        folder = write(self.root, checkpoint)
        for old in self.finished()[: -self._keep]:
            delete(old)
        return folder

    def set_aside(self, after: int) -> None:
        """Renames the checkpoints of steps beyond `after`, from which the run goes on.

        They are damaged, or belong to a curve that the run has left: they must neither be
        resumed from nor count as kept.
        """
        for folder in self.finished():
            if folder.name > folder_name(after):
                aside = next(
                    name
                    for n in count(1)
                    if not (
                        name := self.root / f"left_{folder.name}{f'-{n}' if n > 1 else ''}"
                    ).exists()
                )
                folder.rename(aside)
                logger.warning("%s is now %s: the run goes on from before it", folder, aside.name)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None where none was ever finished.

        Damaged ones are named in the log and passed over.

        Raises:
            UserError: there are finished checkpoints, but every one is damaged.
        """
        damaged = []
        for folder in reversed(self.finished()):
            try:
                return read(folder)
            except DamagedError as error:
                logger.warning("%s; trying the one before it", error)
                damaged.append(folder.name)
        if damaged:
            raise UserError(
                f"no checkpoint in {self.root} is whole ({', '.join(damaged)}); to start over, "
                "use another run.id or move the folder away"
            )
        return None
