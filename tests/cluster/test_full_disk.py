"""A disk that is full or not mounted while ranks die: training continues with the state."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.checkpoint.layout import finished
from tests.support.cluster import Cluster
from tests.support.faults import ElasticJob, assert_clean
from tests.support.small_disk import SmallDisk


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


def test_run_is_not_begun_in_a_mount_point_by_a_new_rank_0(
    cluster: Cluster, job: Callable[..., ElasticJob], runs: Path
) -> None:
    mount = runs / "disk"
    disk = SmallDisk(cluster, ["node1", "node2"], mount)
    arguments = f"--checkpoint.every 15 --run.root {mount}"
    running = job(hosts="node1:1 node2:2", np=3, arguments=arguments)
    running.run = disk.here / "case"
    running.wait_for_step(20)
    kept = os.open(disk.here, os.O_RDONLY)  # the disk exists as long as someone uses it
    for host in ("node1", "node2"):
        assert cluster.run(host, ["umount", "--lazy", str(mount)], cwd=Path("/")).returncode == 0
    running.kill(0)
    running.job.wait_for("disk of the run directory is not mounted; training continues", 60)
    running.wait_until(lambda: len(running.numbers()) == 3, 60, "a process that joins")
    _wait_for_more(running)
    assert "not be written (OSError: [Errno 19] the disk" in running.job.output()
    assert not list(mount.iterdir()), "a part of the run is in the mount point"
    for host in ("node1", "node2"):
        disk.mount(host)
    os.close(kept)
    name = f"step_{_shown(running) + 30:08}"
    running.wait_until(lambda: finished(running.run / "checkpoints")[-1].name > name, 60, name)
    running.job.kill()
    lines = running.lines()
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert_clean(running.run)
    for host in ("node1", "node2"):
        cluster.run(host, ["umount", "--lazy", str(mount)], cwd=Path("/"))
