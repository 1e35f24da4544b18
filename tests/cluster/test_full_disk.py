"""A full disk while ranks die: training continues with the state that survives."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.checkpoint.layout import finished
from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob


@contextmanager
def _small_disk(cluster: Cluster, run: Path) -> Iterator[Path]:
    """A disk of 1 MB for the run, on node1 only; yields the directory as this process sees it."""
    run.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run)]
    assert cluster.run("node1", mount).returncode == 0
    try:
        yield cluster.file("node1", str(run))
    finally:
        cluster.run("node1", ["umount", "--lazy", str(run)])


def _shown(running: ElasticJob) -> int:
    """Return the last step on rank 0's screen, because its files are not written."""
    return max(map(int, re.findall(r"hvdtrain: step (\d+)/", running.job.output())), default=0)


def _wait_for_more(running: ElasticJob) -> None:
    target = _shown(running) + 15
    running.wait_until(lambda: _shown(running) >= target, 40, f"step {target}")


def test_run_with_a_full_disk_survives_the_deaths_of_ranks(
    cluster: Cluster, job: Callable[..., ElasticJob], runs: Path, reference: list[dict[str, Any]]
) -> None:
    with _small_disk(cluster, runs / "case") as run:
        running = job(hosts="node1:2 node2:1", np=3, arguments="--checkpoint.every 15")
        running.run = run
        running.wait_for_step(20)
        with suppress(OSError), open(run / "ballast", "wb", buffering=0) as file:
            while True:
                file.write(bytes(64))
        running.kill(2)
        _wait_for_more(running)
        running.kill(0)
        _wait_for_more(running)
        (run / "ballast").unlink()
        free_at, shown = time.time(), _shown(running)
        name = f"step_{shown + 15:08}"
        running.wait_until(lambda: finished(run / "checkpoints")[-1].name > name, 40, name)
        done = running.job
        output = done.output()
        assert 1 <= output.count("manifest.json cannot be written") <= 2, output
        assert output.count("config.yaml cannot be written") == 0, output
        last = running.last()
        assert last["time"] > free_at and (run / "manifest.json").stat().st_mtime > free_at
        # Lines that waited for space are written by the next rank 0.
        lines = running.lines()
        assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
        for line in lines:
            assert line["loss"] == pytest.approx(reference[line["step"] - 1]["loss"], rel=1e-4)
        running.job.kill()
