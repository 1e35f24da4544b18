"""The directory of one run: RUN/config.yaml, manifest.json, metrics.jsonl, logs, checkpoints."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.files import opened_directory, write_atomic
from hvdtrain.log import logger
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership
from hvdtrain.untrusted import is_of, read_json, read_regular


class RunDirectory:
    """Paths of a run, and its small files.

    Args:
        path: run.root / run.id
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.data_files = path / "data_files.json"
        self.metrics = path / "metrics.jsonl"
        self.superseded_metrics = path / "left_metrics.jsonl"
        self.ranks = path / "ranks.jsonl"
        self.events = path / "events.jsonl"
        self.targets = path / "targets.json"
        self.profile = path / "profile"
        self.ownership = Ownership(path)
        # Prometheus allows a * only in the last part of a path, so all runs share this directory.
        self.listed_targets = path.parent / ".targets" / f"{path.name}.json"

    def prepare(self, fresh: bool, claim: Claim, tolerate_errors: bool = False) -> None:
        """Create the directory, check that it can be written, and take ownership of the run.

        Args:
            fresh: the run must not have begun before (run.resume never).
            claim: claim of this process.
            tolerate_errors: see Ownership.acquire.

        Raises:
            UserError: it cannot be written, another process trains this run, or it contains a
                run although `fresh` is set.
        """
        if fresh and (self.metrics.exists() or self.checkpoints.exists()):
            raise UserError(
                f"{self.path} already contains a run, and run.resume is never; choose "
                "another --run.id, or omit run.resume to resume it"
            )
        try:
            self.ownership.acquire(claim, tolerate_errors)
        except OSError as error:
            raise UserError(
                f"run.root: {self.path} cannot be written ({error.strerror}); "
                "choose another with --run.root"
            ) from None

    def write_config(self, resolved: str) -> None:
        content = resolved.encode()
        # Later generations of a job have the same content, and a full disk has no room for a copy.
        if not self.config.exists() or read_regular(self.config) != content:
            write_atomic(self.config, content)

    def starts(self) -> list[dict[str, Any]]:
        """One entry for each start of this run so far, from its manifest."""
        try:
            return configured(read_json(self.manifest)["starts"])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Write manifest.json, omitting configurations that equal the previous start's."""
        starts, config = [], None
        for start in manifest.get("starts", ()):
            kept = dict(start)
            if "config" in kept and kept["config"] == config:
                del kept["config"]
            config = start.get("config", config)
            starts.append(kept)
        content = {**manifest, "starts": starts}
        write_atomic(self.manifest, (json.dumps(content, indent=1) + "\n").encode())

    def known_data_files(self) -> list[list[Any]]:
        """What `write_data_files` has written; empty: nothing, or another version did."""
        try:
            found = read_json(self.data_files)["files"]
            return found if is_of(found, list[list[Any]]) else []
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def write_data_files(self, files: Sequence[Sequence[Any]]) -> None:
        """Write data_files.json: the files of the training data, with their properties."""
        rows = [json.dumps(file, ensure_ascii=False) for file in files]
        content = ('{"files": [\n' + ",\n".join(rows) + "\n]}\n").encode()
        if not self.data_files.exists() or read_regular(self.data_files) != content:
            write_atomic(self.data_files, content)

    def list_targets(self) -> None:
        """Copy RUN/targets.json to the directory with the targets of all runs of run.root.

        A failure is only logged: the directory may belong to another user, who could otherwise
        choose which file is overwritten.
        """
        try:
            self.listed_targets.parent.mkdir(exist_ok=True)
            write_atomic(self.listed_targets, self.targets.read_bytes(), shared=True)
        except OSError as error:
            logger.warning(
                "%s is not written (%s): Prometheus finds this run by %s only",
                self.listed_targets,
                error.strerror,
                self.targets,
            )

    def remove_targets(self) -> None:
        """Remove the run's targets, so that Prometheus drops the run."""
        with suppress(OSError):
            self.targets.unlink()
        shared = self.listed_targets
        with suppress(OSError), opened_directory(shared.parent, follow=False) as directory:
            os.unlink(shared.name, dir_fd=directory)


def configured(starts: Any) -> list[dict[str, Any]]:
    """The starts of a manifest, each with its configuration: see `RunDirectory.write_manifest`.

    Raises:
        TypeError, ValueError: they do not have hvdtrain's format.
    """
    found: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    for start in starts:
        config = {"config": start["config"]} if "config" in start else config
        found.append({**start, **config})
    return found


def default_id(task: str) -> str:
    """An id such as 20240131-235959-language_model."""
    return time.strftime("%Y%m%d-%H%M%S-") + task.replace(":", ".").rpartition(".")[2]


def new_directory(root: Path, name: str) -> Path:
    """Create a new directory. Several runs may start in one second and share `name`."""
    directory = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(2):
            try:
                directory.mkdir()
                break
            except FileExistsError:
                directory = root / f"{name}-{number}"
    except OSError:
        pass  # the run reports the error
    return directory
