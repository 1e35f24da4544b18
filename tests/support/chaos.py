"""Faults that are drawn at random, and the supervised job that they are done to."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.run_files.events_file import read_lines
from tests.support.cluster import Cluster, Process
from tests.support.faults import PACED, is_launcher
from tests.support.helped import HELPER
from tests.support.job import Finished, Job, poll
from tests.support.small_disk import SmallDisk

HOME, SECOND, GUEST = "node1", "node2", "node3"
SLOTS = 2
NO_STEP_SECONDS = 90.0  # so long without a step, and the run is lost
_STEPS_AGAIN = 10
_LEAST_RANKS = 3
_TAIL_BYTES = 8000


class ChaosJob:
    """`hvdtrain launch --controller gloo` on node1 and node2; node3 comes and goes.

    Args:
        folder: for what the hosts share; its disk, with the run's folder, is one of its own.
        steps: more than it can do.
    """

    def __init__(self, cluster: Cluster, folder: Path, steps: int) -> None:
        self.cluster = cluster
        self.disk = SmallDisk(cluster, [HOME, SECOND, GUEST], folder / "disk")
        self.run = self.disk.here / "case"
        self.run_on_hosts = folder / "disk/case"
        self._folder = folder
        self._hostfile = folder / "hostfile"
        self.list_hosts(HOME, SECOND)
        launch = f"launch --controller gloo --hostfile {self._hostfile} --max-np 6 --"
        run = f"--run.root {folder / 'disk'} --run.id case --train.steps {steps}"
        task = "--task tests.support.helped:Helped"
        self._command = f"python -m hvdtrain.cli {launch} {PACED} {run} {task}".split()
        self._jobs: list[Job] = []
        self.start()

    @property
    def job(self) -> Job:
        return self._jobs[-1]

    def start(self) -> None:
        """Also again, with the same command, when the supervisor was killed."""
        env = {"HVDTRAIN_TEST_CONTROL": str(self._folder), "OMP_NUM_THREADS": "1"}
        self._jobs.append(self.cluster.start(HOME, self._command, env))

    def list_hosts(self, *hosts: str) -> None:
        new = self._hostfile.with_suffix(".new")
        new.write_text("".join(f"{host} slots={SLOTS}\n" for host in hosts))
        new.rename(self._hostfile)

    def ranks(self, host: str | None = None) -> list[Process]:
        """Those that train, in an order that does not depend on their age."""
        found = [p for p in self.cluster.ranks(host) if _name(p.pid) not in (HELPER, None)]
        return sorted(found, key=lambda p: (p.host, p.pid))

    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far; a line that is being written is left out."""
        path = self.run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def starts(self) -> list[dict[str, Any]]:
        """The rounds so far, as events.jsonl has them."""
        path = self.run / "events.jsonl"
        lines = read_lines(path) if path.exists() else []
        return [line for line in lines if line["event"] == "start"]

    def launches(self) -> int:
        """How often the ranks were started from a checkpoint, or anew."""
        return sum(start["cause"] == "launch" for start in self.starts())

    def wait_for_steps(self, since: float) -> None:
        """Waits until steps are made again, and on enough ranks; `since`: unix.

        Raises:
            AssertionError: the job ended, or `NO_STEP_SECONDS` passed without a step, or without
                enough ranks.
        """
        newest, no_step = since, time.monotonic()
        began = time.monotonic()
        while True:
            lines = [line for line in self.lines() if line["time"] > since]
            enough = bool(lines) and lines[-1]["world_size"] >= _LEAST_RANKS
            if enough and len(lines) >= _STEPS_AGAIN:
                return
            if lines and lines[-1]["time"] > newest:
                newest, no_step = lines[-1]["time"], time.monotonic()
            assert self.job.running(), "the job ended"
            waited = time.monotonic() - no_step
            assert waited < NO_STEP_SECONDS, f"no step for {waited:.0f} s"
            waited = time.monotonic() - began
            assert waited < 2 * NO_STEP_SECONDS, f"too few ranks for {waited:.0f} s"
            time.sleep(0.2)

    def supervisor(self) -> Process:
        found = self.cluster.processes(HOME, containing="hvdtrain.cli launch")
        return next(p for p in found if p.command.startswith("python"))

    def launcher(self) -> Process:
        return next(p for p in self.cluster.processes(HOME) if is_launcher(p.command))

    def end(self) -> Finished:
        """Asks it to stop; it must end with 75 and a checkpoint."""
        os.kill(self.supervisor().pid, signal.SIGTERM)
        done = self.job.wait(120)
        assert done.returncode == EXIT_PREEMPTED, done
        return done

    def log(self) -> str:
        """The end of what was written to the screen, without the lines of steps."""
        lines = self.job.output().splitlines(keepends=True)
        return "".join(line for line in lines if " samples/s " not in line)[-_TAIL_BYTES:]

    def kill(self) -> None:
        for job in self._jobs:
            job.kill()


def _name(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def _named(process: Process) -> str:
    return f"process {process.pid} on {process.host}"


# --- the table of faults ---------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What can be done to a job.

    Args:
        inject: does it, chooses by the given generator, returns to whom it was done; after it
            has returned nothing keeps the job from its work.
        restarts: the supervisor has to start the ranks again. After all others the ranks that
            are left continue.
        guest: node3 must take part (True), or must not (False).
    """

    inject: Callable[[ChaosJob, random.Random], str]
    restarts: bool = False
    guest: bool | None = None


def _kill(job: ChaosJob, choice: random.Random) -> str:
    victim = choice.choice(job.ranks())
    job.cluster.kill([victim])
    return _named(victim)


def _kill_with_helper(job: ChaosJob, choice: random.Random) -> str:
    victim = choice.choice(job.ranks())
    number = psutil.Process(victim.pid).environ()["HOROVOD_RANK"]
    wish = job.run_on_hosts.parents[1] / f"fork-{number}"
    wish.touch()
    # It may be one that is only starting, which takes its time on a busy machine.
    poll(lambda: not wish.exists(), 90, "the helper process")
    job.cluster.kill([victim])
    return _named(victim)


def _kill_in_a_rendezvous(job: ChaosJob, choice: random.Random) -> str:
    first, second = choice.sample(job.ranks(), 2)
    job.cluster.kill([first])
    time.sleep(choice.uniform(0, 0.5))
    job.cluster.kill([second])
    return f"{_named(first)}, {_named(second)}"


def _stop(job: ChaosJob, choice: random.Random) -> str:
    victim = choice.choice(job.ranks())
    os.kill(victim.pid, signal.SIGSTOP)
    return _named(victim)


def _kill_a_watchdog(job: ChaosJob, choice: random.Random) -> str:
    """Then another rank: the one without a watchdog must get through the next rendezvous."""
    alone, victim = choice.sample(job.ranks(), 2)
    watchdogs = psutil.Process(alone.pid).children()
    for process in watchdogs:
        if "hvdtrain.elastic.watchdog" in process.cmdline():
            process.kill()
    time.sleep(2)
    job.cluster.kill([victim])
    return f"the watchdog of {_named(alone)}, then {_named(victim)}"


def _cut_a_link(job: ChaosJob, choice: random.Random) -> str:
    host, seconds = _away_from_home(job, choice), choice.uniform(1, 12)
    job.cluster.link(host, up=False)
    time.sleep(seconds)
    job.cluster.link(host, up=True)
    return f"{host} for {seconds:.1f} s"


def _cut_the_power(job: ChaosJob, choice: random.Random) -> str:
    host, seconds = _away_from_home(job, choice), choice.uniform(1, 12)
    job.cluster.kill_host(host)
    time.sleep(seconds)
    job.cluster.boot(host)
    job.disk.mount(host)
    return f"{host} for {seconds:.1f} s"


def _away_from_home(job: ChaosJob, choice: random.Random) -> str:
    """A host with ranks that is not the supervisor's."""
    return choice.choice(sorted({p.host for p in job.ranks()} - {HOME}) or [SECOND])


def _block_the_disk(job: ChaosJob, choice: random.Random) -> str:
    seconds = choice.uniform(2, 12)
    job.disk.block(seconds)
    return f"for {seconds:.1f} s"


def _fill_the_disk(job: ChaosJob, choice: random.Random) -> str:
    seconds = choice.uniform(2, 12)
    with job.disk.full():
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


def _kill_on_a_full_disk(job: ChaosJob, choice: random.Random) -> str:
    """Not rank 0: the lines of metrics that the disk does not take are kept in its memory."""
    writer = _holder(job, "metrics.jsonl")
    victim = choice.choice([p for p in job.ranks() if p.pid != writer])
    with job.disk.full():
        time.sleep(1)
        job.cluster.kill([victim])
        time.sleep(8)
    return _named(victim)


def _holder(job: ChaosJob, name: str) -> int:
    """The process that has a file of the run open: rank 0."""
    wanted = str(job.run_on_hosts / name)
    for process in job.ranks():
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            if os.readlink(link) == wanted:
                return process.pid
    raise LookupError(f"nobody has {wanted} open")


def _add_a_host(job: ChaosJob, choice: random.Random) -> str:
    job.list_hosts(HOME, SECOND, GUEST)
    poll(lambda: GUEST in job.starts()[-1]["hosts"], NO_STEP_SECONDS, "ranks on a new host")
    return GUEST


def _remove_a_host(job: ChaosJob, choice: random.Random) -> str:
    job.list_hosts(HOME, SECOND)
    poll(lambda: GUEST not in job.starts()[-1]["hosts"], NO_STEP_SECONDS, "a host's leave")
    return GUEST


def _kill_the_launcher(job: ChaosJob, choice: random.Random) -> str:
    job.cluster.kill([job.launcher()])
    return "horovodrun"


def _kill_the_supervisor(job: ChaosJob, choice: random.Random) -> str:
    job.cluster.kill([job.supervisor()])
    poll(lambda: not job.ranks(), 30, "the end of a killed supervisor's ranks")
    job.start()
    return "hvdtrain launch"


FAULTS = {
    "kill a rank": Fault(_kill),
    "kill a rank with a helper process": Fault(_kill_with_helper),
    "kill a second rank in the rendezvous": Fault(_kill_in_a_rendezvous),
    "stop a rank": Fault(_stop),
    "kill a watchdog, then a rank": Fault(_kill_a_watchdog),
    "cut a link": Fault(_cut_a_link),
    "cut the power of a host": Fault(_cut_the_power),
    "block the disk": Fault(_block_the_disk),
    "fill the disk": Fault(_fill_the_disk),
    "kill a rank on a full disk": Fault(_kill_on_a_full_disk),
    "add a host": Fault(_add_a_host, guest=False),
    "remove a host": Fault(_remove_a_host, guest=True),
    "kill the launcher": Fault(_kill_the_launcher, restarts=True),
    "kill the supervisor": Fault(_kill_the_supervisor, restarts=True),
}


@dataclass(frozen=True)
class Draw:
    """A fault of the sequence: `pause` seconds after the last one, its victims by `choice`."""

    pause: float
    name: str
    choice: random.Random


def sequence(seed: int, names: Sequence[str]) -> Iterator[Draw]:
    """Faults without end: the same for the same seed, however long each takes to recover.

    Whom they hit is the same only as far as the same ranks are there.
    """
    choice, guest = random.Random(seed), False
    while True:
        possible = [name for name in names if FAULTS[name].guest in (None, guest)]
        name = choice.choice(possible)
        if FAULTS[name].guest is not None:
            guest = not guest
        yield Draw(choice.uniform(10, 20), name, random.Random(choice.random()))


# --- what came of them -----------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a fault cost.

    Args:
        seconds: from the fault to the end of the next step, or the longest pause between two
            steps until training was steady again, if that was longer.
        before: ranks of the last step before it.
        after: ranks of the first step after that pause.
    """

    name: str
    seconds: float
    before: int
    after: int


def table(outcomes: Sequence[Outcome]) -> str:
    """One line a fault: how often, what it cost, and ranks before > after (how often)."""
    lines = [f"{'fault':38} {'count':>5} {'median s':>9} {'longest s':>9}  ranks"]
    for name in FAULTS:
        same = [outcome for outcome in outcomes if outcome.name == name]
        if same:
            seconds = sorted(outcome.seconds for outcome in same)
            ranks = [f"{outcome.before}>{outcome.after}" for outcome in same]
            counts = ", ".join(f"{r} ({ranks.count(r)})" for r in sorted(set(ranks)))
            median = seconds[len(seconds) // 2]
            lines.append(f"{name:38} {len(same):5} {median:9.2f} {seconds[-1]:9.2f}  {counts}")
    return "\n".join(lines)
