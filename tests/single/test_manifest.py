"""RUN/manifest.json stores each configuration once, for any number of generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdtrain.api.run import Run
from hvdtrain.audit.ledger import read
from hvdtrain.run_files.run_directory import RunDirectory
from tests.support.history import History


def test_manifest_stores_unchanged_configuration_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.config.touch()
    first, second = "train: {log_every: 1}\n" + "#" * 4000, "train: {log_every: 2}\n"
    configs = [first] * 100 + [second] * 100 + [first]
    starts = [{"time": float(n), "config": config} for n, config in enumerate(configs)]
    directory.write_manifest({"starts": starts})
    assert directory.manifest.read_text().count("#" * 4000) == 2
    assert directory.starts() == starts == Run(directory.path).manifest["starts"]
    directory.manifest.write_text(json.dumps({"starts": starts}))  # as older versions wrote it
    assert directory.starts() == starts == Run(directory.path).manifest["starts"]
    directory.write_manifest({"starts": directory.starts()})
    assert directory.manifest.stat().st_size < 20_000


def test_audit_reads_log_interval_of_older_run_from_manifest(tmp_path: Path) -> None:
    """Its start events have no log_every; both starts have the same configuration."""
    history = History(tmp_path / "run", log_every=2)
    directory = RunDirectory(history.directory)
    starts: list[dict[str, Any]] = []
    for _ in range(2):
        history.launch(2)
        history.steps(6)
        starts.append({"time": history.clock - 7, "config": "train: {log_every: 2}\n"})
    directory.write_manifest({"starts": starts})
    assert "config" not in json.loads(directory.manifest.read_text())["starts"][-1]
    events = directory.events.read_text().replace('"log_every": 2', '"micro_size": 2')
    directory.events.write_text(events)
    assert [generation.log_every for generation in read(history.directory).generations] == [2, 2]
