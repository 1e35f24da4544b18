"""Random faults of all kinds in one supervised run: it loses no step and ends as requested.

HVDTRAIN_CHAOS_SEED: seed of the sequence of faults, printed (default: random).

HVDTRAIN_CHAOS_SECONDS: duration of the faults (default 300).

HVDTRAIN_CHAOS_LAUNCHER: ssh (default), or agents: `hvdtrain launch` without hosts, see
tests/support/agent_chaos.py.

HVDTRAIN_CHAOS_LAYOUT: whole (default), mixture, stream, tensor or zero: see LAYOUTS of
tests/support/chaos.py.

HVDTRAIN_CHAOS_FAULTS: only these, separated by ";".
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hvdtrain.checkpoint.weights import read_weights
from tests.support.agent_chaos import AGENT_FAULTS, AgentChaosJob
from tests.support.chaos import (
    ALWAYS,
    FAULTS,
    HOME,
    LAYOUTS,
    ChaosJob,
    Draw,
    Outcome,
    difference,
    sequence,
    table,
)
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.faults import PACED, assert_same_curve, pause
from tests.support.job import poll
from tests.support.namespaces import why_not
from tests.support.runs import metrics, run
from tests.support.small_disk import SmallDisk

SECONDS = float(os.environ.get("HVDTRAIN_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("HVDTRAIN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
LAUNCHER = os.environ.get("HVDTRAIN_CHAOS_LAUNCHER") or "ssh"
LAUNCHERS = {"ssh": (ChaosJob, FAULTS), "agents": (AgentChaosJob, AGENT_FAULTS)}
JOB, ALL_FAULTS = LAUNCHERS[LAUNCHER]
NAMES = [n for n in os.environ.get("HVDTRAIN_CHAOS_FAULTS", "").split(";") if n] or list(ALL_FAULTS)
LAYOUT = os.environ.get("HVDTRAIN_CHAOS_LAYOUT") or "whole"
# Settings that repeat this run.
SAME = (
    f"HVDTRAIN_CHAOS_LAUNCHER={LAUNCHER} HVDTRAIN_CHAOS_LAYOUT={LAYOUT}"
    f" HVDTRAIN_CHAOS_SEED={SEED} HVDTRAIN_CHAOS_SECONDS={SECONDS:g}"
    + (f" HVDTRAIN_CHAOS_FAULTS='{';'.join(NAMES)}'" if list(ALL_FAULTS) != NAMES else "")
)
# A step takes a tenth of a second at least.
STEPS = round(11 * (SECONDS + 200))
# The directory for a failed run, without its checkpoints, and its launchers' output.
LEFT = REPOSITORY / "build/chaos"

Say = Callable[[str], None]


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(JOB.hosts, sshd=LAUNCHER == "ssh") as cluster:
        yield cluster


@pytest.mark.timeout(10 * SECONDS + 900)
def test_run_survives_random_faults_and_has_the_undisturbed_parameters(
    hosts: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    say(f"\n{SAME}")
    layout = LAYOUTS[LAYOUT]
    job = JOB(hosts, hosts.shared, layout, STEPS)
    outcomes: list[Outcome] = []
    try:
        began = time.time()
        job.wait_for_steps(began)
        say(f"training after {time.time() - began:.1f} s")
        _disturb(job, outcomes, say)
        say(f"ended after {job.end():.1f} s")
        poll(lambda: not job.helpers(), 20, "the end of forked processes")
    except BaseException:
        _keep(job)
        raise
    finally:
        say(table(outcomes, ALL_FAULTS))
        job.kill()
    lines = job.lines()
    audit = [sys.executable, "-m", "hvdtrain.cli", "audit", str(job.run_on_hosts)]
    found = hosts.run(HOME, audit)
    said = [line for line in found.stdout.splitlines() if "clean" in line or "goodput" in line]
    say("\n".join([f"{len(lines)} steps", *said]))
    try:
        assert found.returncode == 0, found
        undisturbed = _undisturbed(tmp_path, len(lines))
        assert_same_curve(lines, metrics(undisturbed))
        largest = difference(*(read_weights(path).tensors for path in (job.run, undisturbed)))
        bits = "bitwise identical" if largest == 0 else f"largest difference {largest:.1e}"
        say(f"parameters compared with an undisturbed run: {bits}")
        assert largest <= layout.tolerance
    except BaseException:
        _keep(job)
        raise


def _keep(job: ChaosJob) -> None:
    shutil.rmtree(LEFT, ignore_errors=True)
    with suppress(OSError, shutil.Error):  # the run may still write
        shutil.copytree(job.run, LEFT, ignore=shutil.ignore_patterns("checkpoints"))
    LEFT.mkdir(parents=True, exist_ok=True)
    (LEFT / "launchers.txt").write_text(job.output())


def _disturb(job: ChaosJob, outcomes: list[Outcome], say: Say) -> None:
    names = NAMES
    if "restart on a slow disk" in names and not SmallDisk.can_be_slow():
        names = [name for name in names if name != "restart on a slow disk"]
        say("no restart on a slow disk: cgroup v1 cannot be written here")
    end = time.monotonic() + SECONDS
    for draw in sequence(SEED, {name: ALL_FAULTS[name] for name in names}):
        time.sleep(draw.pause)
        if time.monotonic() > end:
            return
        outcomes.append(_one_fault(job, draw, say))


def _one_fault(job: ChaosJob, draw: Draw, say: Say) -> Outcome:
    fault = ALL_FAULTS[draw.name]
    before, since = job.lines()[-1], time.time()
    launches, errors = job.launches(), len(job.errors())
    victims = "?"
    try:
        victims = fault.inject(job, draw.choice)
        job.wait_for_steps(time.time())
    except Exception as error:
        raise AssertionError(f"{draw.name} ({victims}): {error}\n{SAME}\n{job.log()}") from error
    # After a restart from a checkpoint the lines of repeated steps are gone.
    lines = [before, *(line for line in job.lines() if line["time"] > before["time"])]
    seconds = pause(lines, since)
    pairs = itertools.pairwise(lines)
    after = next(b for a, b in pairs if b["time"] - max(a["time"], since) >= seconds)
    outcome = Outcome(draw.name, seconds, before["world_size"], after["world_size"])
    say(f"{draw.name} ({victims}): {seconds:.2f} s, {outcome.before} > {outcome.after} ranks")
    restarts, said = job.launches() - launches, job.errors()[errors:]
    failed = [s for s in job.starts() if s["time"] > since and s["cause"] == "failure"]
    problems = {
        f"started again {restarts} times": restarts != fault.restarts,
        f"ranks were lost: {failed}": fault.harmless and failed,
        f"ranks ended with an error: {said}": said and not fault.errors,
    }
    found = [problem for problem, is_so in problems.items() if is_so]
    assert not found, f"{draw.name} ({victims}): {found}\n{SAME}\n{job.log()}"
    return outcome


def _undisturbed(root: Path, steps: int) -> Path:
    """Run the same on one process, without a launcher; return its directory."""
    arguments = (
        f"{PACED} {ALWAYS} {LAYOUTS[LAYOUT].arguments} --run.root {root} --run.id case"
        f" --train.duration {steps} --checkpoint.every {steps}"
    )
    env = {"HVDTRAIN_TEST_PACE": "0", "HVDTRAIN_TEST_CONTROL": str(root)}
    done = run(root / "output", arguments.split(), env=env, timeout=60 + steps / 10)
    assert done.returncode == 0, done
    return root / "case"
