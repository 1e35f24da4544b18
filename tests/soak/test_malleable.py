"""A run borrows the idle nodes of a real Slurm while a fixed trace of rigid jobs comes and goes.

Figures are printed, and only coarse limits are asserted, because all nodes share the cores of this
machine: the share of the idle node-seconds in which the run trained (aim: 90%), the time from a
donor's start to its first step (aim: 3 s more than the import of torch), and how long the rigid
jobs waited (aim: as if they preempted jobs that end at once). No step may be lost, and the loss
curve must equal an undisturbed run's.

HVDTRAIN_TRACE_REPEATS: how often the trace is played with donors (default 3).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support import namespaces
from tests.support import slurm as support
from tests.support.agent_job import undisturbed_losses
from tests.support.cluster import Cluster
from tests.support.job import poll
from tests.support.malleable import LOST, TRAIN, MalleableRun
from tests.support.slurm import Slurm

pytestmark = pytest.mark.soak

HOSTS = ["node1", "node2", "node3", "node4"]
# Rigid jobs: seconds after the begin, duration, nodes.
TRACE = [(120, 45, 1), (210, 45, 2), (330, 30, 1)]
LENGTH = 420
REPEATS = int(os.environ.get("HVDTRAIN_TRACE_REPEATS", "3"))
LEAST_SHARE, MOST_DELAY, MOST_START = 0.8, 5.0, 10.0
PACE = 0.1  # seconds per micro-batch: a step of four takes 0.1 s on 4 ranks, 0.4 s on one
STEPS = 20_000
IMPORT = "import time; began = time.time(); import torch; print(time.time() - began)"


@dataclass
class Traced:
    """A run of the trace. Times are seconds from its begin.

    Args:
        delays: from the submission of each rigid job to its first command.
        busy: intervals in which rigid jobs had nodes (whole seconds, of Slurm), and how many.
    """

    began: float
    delays: list[float]
    busy: list[tuple[float, float, int]]


def _play(slurm: Slurm, pace: float = 1.0) -> Traced:
    """Submit the rigid jobs of the trace at their times, and wait for its end.

    Args:
        pace: factor of all times.
    """
    began = time.time()
    jobs = []
    for at, seconds, nodes in [(pace * at, pace * seconds, nodes) for at, seconds, nodes in TRACE]:
        time.sleep(max(0.0, began + at - time.time()))
        options = [f"--nodes={nodes}", "--exclusive", "--partition=high"]
        options.append(f"--output={slurm.cluster.shared}/rigid-%j")
        wrap = f"--wrap=date +%s.%N; sleep {seconds}"
        submitted = time.time()
        jobs.append((slurm.sbatch([*options, "--job-name=rigid", wrap]), submitted, nodes))
    time.sleep(max(0.0, began + pace * LENGTH - time.time()))
    delays, busy = [], []
    for job, submitted, nodes in jobs:
        first = float((slurm.cluster.shared / f"rigid-{job}").read_text())
        delays.append(round(first - submitted, 1))
        start, end = (_at(slurm, job, name) for name in ("StartTime", "EndTime"))
        busy.append((start - began, end - began, nodes))
    return Traced(began, delays, busy)


def _at(slurm: Slurm, job: int, name: str) -> float:
    return time.mktime(time.strptime(slurm.field(job, name), "%Y-%m-%dT%H:%M:%S"))


def _used(run: MalleableRun, traced: Traced) -> tuple[float, float]:
    """Return the idle node-seconds of the trace, and those of them in which the run trained."""
    span = [line for line in run.lines() if 0 < line["time"] - traced.began <= LENGTH]
    used = sum(line["step_seconds"] * (line["world_size"] - 1) for line in span)
    taken = sum((min(end, LENGTH) - start) * nodes for start, end, nodes in traced.busy)
    return LENGTH * (len(HOSTS) - 1) - taken, used


def _events(run: MalleableRun, name: str) -> list[dict[str, Any]]:
    lines = (run.run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def _starts_of_donors(run: MalleableRun, since: float) -> list[float]:
    """Return the seconds from the start of each donor job to the first step with its node."""
    shown = run.slurm.run("scontrol", "--oneliner", "show", "job").stdout.splitlines()
    found = []
    for line in shown:
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if not facts["JobName"].startswith("donor-") or facts["StartTime"] == "Unknown":
            continue
        start = time.mktime(time.strptime(facts["StartTime"], "%Y-%m-%dT%H:%M:%S"))
        joined = [
            event["time"]
            for event in _events(run, "start")
            if event["time"] > start and facts["NodeList"] in event["hosts"]
        ]
        if start > since and joined:
            found.append(next(x["time"] for x in run.lines() if x["time"] > joined[0]) - start)
    return found


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if reason := namespaces.why_not() or support.why_not():
        pytest.skip(reason)
    with Cluster(HOSTS, sshd=False) as cluster:
        yield Slurm(cluster)


@pytest.mark.timeout(3600)
def test_run_uses_idle_nodes_and_delays_no_rigid_job(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = slurm.cluster
    # Bitwise identical losses on any number of ranks, and on a shorter run.
    train = [*TRAIN, "--exchange.name", "exact", "--runtime.threads", "1"]
    train += ["--schedule.name", "constant"]
    run = MalleableRun(cluster, slurm, [*train, "--train.duration", str(STEPS)], PACE)
    run.wait_for_world(1)
    alone = _play(slurm, 0.2)
    # What a preemption costs by itself: jobs that end at once, on all nodes, as often as preempted.
    plain = [slurm.sbatch(["--exclusive", "--wrap=srun sleep 3600"]) for _ in HOSTS[1:]]
    preempting = _play(slurm, 0.2)
    slurm.run("scancel", *map(str, plain))
    shares, delays, starts = list[float](), list[list[float]](), list[float]()
    imports = []
    for _ in range(REPEATS):
        fill = run.fill("--most", "8")
        traced = _play(slurm)
        idle, used = _used(run, traced)
        shares.append(used / idle)
        delays.append(traced.delays)
        starts += _starts_of_donors(run, traced.began)
        # As the ranks of donors that start together do.
        started = [cluster.start(host, [sys.executable, "-c", IMPORT]) for host in HOSTS[1:]]
        imports += [float(one.wait(60).stdout) for one in started]
        fill.kill()
        slurm.run("scancel", "--state=PENDING", "--partition=low")
        slurm.run("scancel", "--partition=low")
        run.wait_for_world(1, time.time())
        poll(lambda: "low" not in slurm.run("squeue").stdout, 60, "no donor")
    slurm.run("scancel", str(run.job))
    slurm.wait(run.job, "CANCELLED", 60)
    lines = run.lines()
    changes = len(_events(run, "start")) - 1
    lost = sum(event.get("lost_steps", 0) for event in _events(run, "start"))
    with capsys.disabled():
        print(f"\nidle node-seconds used: {[f'{share:.1%}' for share in shares]}")
        print(f"rigid jobs started after, s: {delays}; without donors: {alone.delays}")
        print(f"if they preempt jobs that end at once, s: {preempting.delays}")
        print(f"donor's start to its first step, s: {[f'{one:.1f}' for one in sorted(starts)]}")
        print(f"import of torch, s: {[f'{one:.1f}' for one in imports]}")
        print(f"steps {len(lines)}, lost {lost}, changes {changes}")
        print(fill.output())
        print(run.output()[-6000:])
    train += ["--train.duration", str(len(lines))]
    expected = undisturbed_losses(tmp_path, train, timeout=600)
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert [line["loss"] for line in lines] == expected
    assert lost == 0
    assert not re.search(LOST, run.output())
    assert median(shares) > LEAST_SHARE
    assert median(one for each in delays for one in each) - median(preempting.delays) < MOST_DELAY
    assert median(starts) < median(imports) + MOST_START
