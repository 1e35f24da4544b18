"""Selection of the checkpoint to resume from, and of those to keep."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from hvdtrain.checkpoint.format import Checkpoint, read, write, write_own_files
from hvdtrain.checkpoint.layout import (
    MARKER,
    DamagedError,
    delete,
    directory_name,
    finished,
    leftovers,
    loss_of,
    move,
    named,
    retained,
    step_of,
)
from hvdtrain.checkpoint.mirror import Mirror
from hvdtrain.errors import UserError
from hvdtrain.log import logger


class CheckpointManager:
    """The checkpoints of one run; exists only on rank 0.

    Args:
        root: RUN/checkpoints.
        keep: how many of the newest are kept.
        confirm: raises OSError if this process may not write, see Ownership.confirm.
        keep_best: also keep the one with the lowest validation loss.
        mirror: receives each finished checkpoint.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        confirm: Callable[[], None] = lambda: None,
        keep_best: bool = False,
        mirror: Mirror | None = None,
    ) -> None:
        self.root = root
        self._mirror = mirror
        self._keep_best = keep_best
        self._keep = keep
        self._confirm = confirm

    def finished(self) -> list[Path]:
        """Checkpoints that have their marker, oldest first."""
        return finished(self.root)

    def newest_step(self) -> int:
        """Step of the newest finished checkpoint; 0 if there is none."""
        finished = self.finished()
        return step_of(finished[-1]) if finished else 0

    def has(self, step: int) -> bool:
        """Whether the checkpoint of this step is finished."""
        return (self.root / directory_name(step) / MARKER).exists()

    def save(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and remove those beyond `keep`.

        Raises:
            OSError: it could not be written; older ones are untouched.
        """
        self._confirm()
        _delete_each(lambda: leftovers(self.root))
        directory = write(self.root, checkpoint, self._confirm)
        _delete_each(self._superfluous)
        if self._mirror is not None:
            self._mirror.notify()
        return directory

    def _superfluous(self) -> Iterable[Path]:
        losses = {path: loss_of(path) if self._keep_best else None for path in self.finished()}
        uploading = self._mirror.uploading if self._mirror is not None else None
        return losses.keys() - retained(losses, self._keep) - {uploading}

    def supersede(self, after: int) -> None:
        """Rename the checkpoints of steps after `after`, from which the run continues.

        They are damaged, or belong to a discarded part of the run: they must neither be resumed
        from nor count as kept.
        """
        for directory in named(self.root):
            if directory.name > directory_name(after):
                aside = next(
                    name
                    for n in count(1)
                    if not (
                        name := self.root / f"left_{directory.name}{f'-{n}' if n > 1 else ''}"
                    ).exists()
                )
                move(directory, aside)
                logger.warning(
                    "%s is now %s: the run resumes from before it", directory, aside.name
                )
                if self._mirror is not None:
                    self._mirror.supersede(after)

    def newest(self, every: int = 0) -> Checkpoint | None:
        """The newest undamaged checkpoint, or None if there is no checkpoint.

        Damaged checkpoints are logged and skipped, unless the mirror has an intact copy. A
        checkpoint without its marker counts as damaged, because the marker is written before the
        checkpoint gets its name.

        Args:
            every: prefer checkpoints of steps that are multiples of this; 0 = all are equal.

        Raises:
            UserError: there are checkpoints, but all are damaged.
        """
        damaged = []
        newest_first = named(self.root)[::-1]
        if every:
            newest_first.sort(key=lambda directory: step_of(directory) % every > 0)
        for directory in newest_first:
            try:
                return self._read(directory)
            except DamagedError as error:
                logger.warning("%s; trying the one before it", error)
                damaged.append(directory.name)
        if damaged:
            raise UserError(
                f"no checkpoint in {self.root} is intact ({', '.join(damaged)}); to start over, "
                "use another run.id or move the directory away"
            )
        return None

    def _read(self, directory: Path) -> Checkpoint:
        try:
            return read(directory)
        except DamagedError as error:
            if self._mirror is None:
                raise
            logger.warning("%s; trying its copy in %s", error, self._mirror.url)
            if not self._mirror.replace(directory):
                raise
            return read(directory)


class FilesOfRank:
    """Files that a rank other than 0 adds to the checkpoints of a run.

    Args:
        root: RUN/checkpoints.
        check: raises OSError if nothing must be written there now.
    """

    def __init__(self, root: Path, check: Callable[[], None] = lambda: None) -> None:
        self._root, self._check = root, check

    def has(self, step: int) -> bool:
        """Always False: rank 0 does not request a save of an existing checkpoint."""
        return False

    def save(self, checkpoint: Checkpoint) -> None:
        """Write this rank's files of a checkpoint that rank 0 is writing.

        Raises:
            OSError: they could not be written.
        """
        self._check()
        write_own_files(self._root, checkpoint)


class NoFiles:
    """Stands for the checkpoints of a run whose directory is not there: each save fails."""

    def has(self, step: int) -> bool:
        return False

    def save(self, checkpoint: Checkpoint) -> None:
        raise OSError(errno.ENODEV, "the disk of the run directory is not mounted")


def _delete_each(find: Callable[[], Iterable[Path]]) -> None:
    """Delete checkpoints. What fails is logged; it prevents neither a checkpoint nor the others."""
    with _only_warning():
        for old in find():
            with _only_warning():
                delete(old)


@contextmanager
def _only_warning() -> Iterator[None]:
    """Log a failed deletion, which must not prevent a checkpoint."""
    try:
        yield
    except OSError as error:
        logger.warning("an old checkpoint could not be deleted: %s", error)
