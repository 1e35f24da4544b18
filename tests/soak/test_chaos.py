"""Faults at random, of all kinds, against one supervised run: it loses no step and ends as asked.

HVDTRAIN_CHAOS_SEED: of the sequence of faults, printed (default: random).
HVDTRAIN_CHAOS_SECONDS: how long faults continue (default 300).
HVDTRAIN_CHAOS_FAULTS: only these of tests/support/chaos.py, separated by ";".
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos import (
    FAULTS,
    GUEST,
    HOME,
    SECOND,
    ChaosJob,
    Draw,
    Outcome,
    sequence,
    table,
)
from tests.support.cluster import Cluster
from tests.support.faults import PACED, assert_same_curve, pause
from tests.support.namespaces import why_not
from tests.support.runs import metrics, run

SECONDS = float(os.environ.get("HVDTRAIN_CHAOS_SECONDS", "300"))
SEED = int(os.environ.get("HVDTRAIN_CHAOS_SEED") or random.SystemRandom().randrange(1 << 32))
NAMES = [n for n in os.environ.get("HVDTRAIN_CHAOS_FAULTS", "").split(";") if n] or list(FAULTS)
# A step takes a tenth of a second at least.
STEPS = round(11 * (SECONDS + 200))

Say = Callable[[str], None]


@pytest.fixture
def three_hosts() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Cluster([HOME, SECOND, GUEST]) as cluster:
        yield cluster


@pytest.mark.timeout(10 * SECONDS + 900)
def test_some_sequence_of_faults_loses_a_step_or_the_run(
    three_hosts: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    say(f"\nHVDTRAIN_CHAOS_SEED={SEED} HVDTRAIN_CHAOS_SECONDS={SECONDS:g}")
    job = ChaosJob(three_hosts, three_hosts.shared, STEPS)
    outcomes: list[Outcome] = []
    try:
        began = time.time()
        job.wait_for_steps(began)
        say(f"training after {time.time() - began:.1f} s")
        _disturb(job, outcomes, say)
        job.end()
    finally:
        say(table(outcomes))
        job.kill()
    lines = job.lines()
    audit = [sys.executable, "-m", "hvdtrain.cli", "audit", str(job.run_on_hosts)]
    found = three_hosts.run(HOME, audit)
    said = [line for line in found.stdout.splitlines() if "clean" in line or "goodput" in line]
    say("\n".join([f"{len(lines)} steps", *said]))
    assert found.returncode == 0, found
    assert_same_curve(lines, _undisturbed(tmp_path))


def _disturb(job: ChaosJob, outcomes: list[Outcome], say: Say) -> None:
    end = time.monotonic() + SECONDS
    for draw in sequence(SEED, NAMES):
        time.sleep(draw.pause)
        if time.monotonic() > end:
            return
        outcomes.append(_one_fault(job, draw, say))


def _one_fault(job: ChaosJob, draw: Draw, say: Say) -> Outcome:
    before, launches, since = job.lines()[-1], job.launches(), time.time()
    victims = "?"
    try:
        victims = FAULTS[draw.name].inject(job, draw.choice)
        job.wait_for_steps(time.time())
    except Exception as error:
        raise AssertionError(
            f"{draw.name} ({victims}): {error}\nHVDTRAIN_CHAOS_SEED={SEED}\n{job.log()}"
        ) from error
    # After a restart from a checkpoint the lines of what is done again are gone.
    lines = [before, *(line for line in job.lines() if line["time"] > before["time"])]
    seconds = pause(lines, since)
    pairs = itertools.pairwise(lines)
    after = next(b for a, b in pairs if b["time"] - max(a["time"], since) >= seconds)
    restarts = job.launches() - launches
    outcome = Outcome(draw.name, seconds, before["world_size"], after["world_size"])
    say(f"{draw.name} ({victims}): {seconds:.2f} s, {outcome.before} > {outcome.after} ranks")
    assert restarts == FAULTS[draw.name].restarts, (
        f"{draw.name} ({victims}): started again {restarts} times\n"
        f"HVDTRAIN_CHAOS_SEED={SEED}\n{job.log()}"
    )
    return outcome


def _undisturbed(root: Path) -> list[dict[str, Any]]:
    """Losses of the same run on one process, without a launcher."""
    arguments = f"{PACED} --run.root {root} --run.id case --train.steps {STEPS}".split()
    done = run(root / "output", arguments, env={"HVDTRAIN_TEST_PACE": "0"}, timeout=900)
    assert done.returncode == 0, done
    return metrics(root / "case")
