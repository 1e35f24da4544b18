"""`hvdtrain.Run`: read the files of a finished or running run from a notebook or a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint.layout import finished, step_of
from hvdtrain.config_files import read_yaml
from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import each_line
from hvdtrain.run_files.run_directory import RunDirectory, configured
from hvdtrain.untrusted import read_json

if TYPE_CHECKING:
    from torch import nn


class Run:
    """The files of one run. Each property reads its file again, as the run may still be active.

    Args:
        directory: RUN/, or a copy of it.

    Attributes:
        directory: the absolute path of `directory`.

    Raises:
        UserError: `directory` is not a run directory. Properties raise it if a file is damaged.

    Example:
        >>> run = hvdtrain.Run("runs/a")
        >>> len(run.columns()["loss"]), [*run.checkpoints]
        (2, [2])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).absolute()
        self._files = RunDirectory(self.directory)
        if not self._files.config.is_file():
            raise UserError(f"{directory} is not a run directory: it has no config.yaml")

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return read_yaml(self._files.config)

    @property
    def manifest(self) -> dict[str, Any]:
        """Versions, hosts and their ranks, starts, dataset fingerprint."""
        try:
            found = read_json(self._files.manifest)
            return {**found, "starts": configured(found.get("starts", []))}
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{self._files.manifest} cannot be read: {error}") from None

    @property
    def events(self) -> list[dict[str, Any]]:
        """Starts, checkpoints, stragglers and the end, in order; "time" is Unix time."""
        return list(_lines(self._files.events))

    @property
    def metrics(self) -> Any:
        """metrics.jsonl, one row per logged step: a DataFrame if pandas is installed, else
        `columns()`."""
        try:
            from pandas import DataFrame
        except ImportError:
            return self.columns()
        return DataFrame(self.columns())

    def columns(self) -> dict[str, list[Any]]:
        """Each metric of metrics.jsonl by name, one value per logged step; None if missing."""
        columns: dict[str, list[Any]] = {}
        rows = 0
        for line in _lines(self._files.metrics):
            if not isinstance(line.get("step"), int):
                continue
            for name in line:
                columns.setdefault(name, [None] * rows)
            for name, column in columns.items():
                column.append(line.get(name))
            rows += 1
        return columns

    def newest(self) -> dict[str, Any]:
        """The newest value of each metric of metrics.jsonl, by name."""
        found: dict[str, Any] = {}
        for line in _lines(self._files.metrics):
            found |= line
        return found

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints: step -> directory, oldest first."""
        directories = finished(self._files.checkpoints)
        return {step_of(directory): directory for directory in directories}

    def model(self) -> nn.Module:
        """The task's model with the weights of the newest complete checkpoint, on the CPU, in eval
        mode. The model is unsharded, however many ranks it was sharded over.

        A language model is built from the weights alone. Other tasks read their data first, as in
        training, so the data must be available.

        Raises:
            UserError: there is no checkpoint, it is damaged, or the task or its data is missing.
        """
        from hvdtrain.api.model import load_model

        return load_model(self.directory)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, skipping torn lines; nothing if the file does not exist yet."""
    return (line for line in (each_line(path) if path.exists() else ()) if line is not None)
