"""`hvdtrain.Run`: what a run has left, or writes now, for a notebook or a script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint.layout import finished
from hvdtrain.config_files import read_yaml
from hvdtrain.errors import UserError
from hvdtrain.run_files.events_file import each_line
from hvdtrain.run_files.folder import RunFolder, configured
from hvdtrain.untrusted import read_json

if TYPE_CHECKING:
    from torch import nn


class Run:
    """The files of one run. Each property reads them anew: the run may still go on.

    Args:
        folder: RUN/, or a copy of it.

    Attributes:
        folder: the same, absolute.

    Raises:
        UserError: it is no folder of a run. Its properties raise it where a file is damaged.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).absolute()
        self._files = RunFolder(self.folder)
        if not self._files.config.is_file():
            raise UserError(f"{folder} is no folder of a run: it has no config.yaml")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return read_yaml(self._files.config)

    @property
    def manifest(self) -> dict[str, Any]:
        """Versions, hosts and their ranks, starts, fingerprint of the data."""
        try:
            found = read_json(self._files.manifest)
            return {**found, "starts": configured(found.get("starts", []))}
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{self._files.manifest} cannot be read: {error}") from None

    @property
    def events(self) -> list[dict[str, Any]]:
        """Starts, checkpoints, stragglers and the end, in their order; "time" is unix time."""
        return list(_lines(self._files.events))

    @property
    def metrics(self) -> Any:
        """metrics.jsonl, a row a logged step: a DataFrame where pandas is installed, else
        `columns()`."""
        try:
            from pandas import DataFrame
        except ImportError:
            return self.columns()
        return DataFrame(self.columns())

    def columns(self) -> dict[str, list[Any]]:
        """Each figure of metrics.jsonl by name, a value a logged step; None where it had none."""
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
        """The newest value of each figure of metrics.jsonl, by name."""
        found: dict[str, Any] = {}
        for line in _lines(self._files.metrics):
            found |= line
        return found

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Those that are complete: step -> folder, oldest first."""
        folders = finished(self._files.checkpoints)
        return {int(folder.name.removeprefix("step_")): folder for folder in folders}

    def model(self) -> nn.Module:
        """The task's model with the weights of the newest complete checkpoint, on the CPU, in eval
        mode; whole, whatever number of ranks it was spread over.

        A language model is made from the weights alone. Other tasks look at their data first, as
        when training, so that has to be there.

        Raises:
            UserError: there is no checkpoint, it is damaged, or the task or its data is not there.
        """
        from hvdtrain.api.model import load_model

        return load_model(self.folder)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """None where there is no file yet; torn lines are passed over."""
    return (line for line in (each_line(path) if path.exists() else ()) if line is not None)
