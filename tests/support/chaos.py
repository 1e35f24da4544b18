"""Random faults, and the supervised job into which they are injected."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.run_files.events_file import read_lines
from tests.support.cluster import Cluster, Process
from tests.support.faults import PACED, is_launcher
from tests.support.helped import HELPER
from tests.support.job import Job, poll
from tests.support.runs import metrics
from tests.support.small_disk import SmallDisk

# The launcher's host has no ranks: a fault that hits this host alone must not end any.
HOME, GUEST = "head", "node3"
WORKERS = ("node1", "node2")
HOSTS = (HOME, *WORKERS, GUEST)
SLOTS = 2
NO_STEP_SECONDS = 90.0  # without a step for this long, the run counts as lost
_STEPS_AGAIN = 10
_LEAST_RANKS = 3
_TAIL_BYTES = 8000
_DISK_MIB = 192
# With a constant rate the undisturbed run needs no more steps than the disturbed run.
ALWAYS = "--schedule.name constant --train.replica_check_every 10 --runtime.threads 1"
_HANG_SECONDS = 20  # longer than any fault delays a rank, except the slow disk
# Reading the checkpoint's 8 MiB takes longer than `_HANG_SECONDS`.
_SLOW_BYTES_PER_SECOND = 280_000
_RESUME_SECONDS = 180.0
_END_SECONDS = 120.0
_OWN_ERROR = " ended (exit code "


@dataclass(frozen=True)
class Layout:
    """Layout of a chaos run.

    Args:
        arguments: flags of this run and of the undisturbed run that it is compared with.
        spread: flags of this run only: how its ranks share the model or the optimizer.
        min_np: minimum number of ranks; with fewer the run waits.
        tolerance: largest relative difference of a parameter at the end; 0: bitwise identical.
    """

    arguments: str
    spread: str
    min_np: int
    tolerance: float


LAYOUTS = {
    "whole": Layout("--task tests.support.helped:Helped --exchange.name exact", "", 3, 0.0),
    "mixture": Layout(
        "--task tests.support.helped:HelpedMixture --exchange.name exact", "", 3, 0.0
    ),
    "stream": Layout("--task tests.support.helped:HelpedStream --exchange.name exact", "", 3, 0.0),
    "tensor": Layout(
        "--task tests.support.helped:HelpedPerceptron", "--parallel.tensor 2", 2, 1e-4
    ),
    "zero": Layout("--task tests.support.helped:Helped", "--parallel.shard.stage 1", 1, 1e-4),
}


class ChaosJob:
    """`hvdtrain launch --controller gloo` with ranks on node1 and node2; node3 joins and leaves.

    A subclass starts the run in another way (agent_chaos.py).

    Args:
        directory: for files that the hosts share; the run directory is on a separate disk in it.
        steps: more steps than the run can complete.

    Attributes:
        hosts: all hosts that see the disk; the first has no ranks and stays up.
        train: configuration keys of the ranks.
        min_np: minimum number of ranks.
        env: of the launcher.
    """

    hosts: tuple[str, ...] = HOSTS

    def __init__(self, cluster: Cluster, directory: Path, layout: Layout, steps: int) -> None:
        self.cluster = cluster
        self.disk = SmallDisk(cluster, list(self.hosts), directory / "disk", _DISK_MIB)
        self.run = self.disk.here / "case"
        self.run_on_hosts = directory / "disk/case"
        self.hostfile = directory / "hostfile"
        self.listed: tuple[str, ...] = ()
        self._directory = directory
        self.list_hosts(*WORKERS)
        self.min_np = layout.min_np
        self.env = {"HVDTRAIN_TEST_CONTROL": str(directory), "OMP_NUM_THREADS": "1"}
        run = f"--run.root {directory / 'disk'} --run.id case --train.duration {steps}"
        run += f" --elastic.hang_seconds {_HANG_SECONDS}"
        self.train = f"{PACED} {ALWAYS} {layout.arguments} {layout.spread} {run}".split()
        self._jobs: list[Job] = []
        self.start()

    @property
    def job(self) -> Job:
        return self._jobs[-1]

    def start(self) -> None:
        """Start the supervisor, also again with the same command after it was killed."""
        launch = f"python -m hvdtrain.cli launch --controller gloo --hostfile {self.hostfile}"
        launch += f" --max-np 6 --min-np {self.min_np} --"
        self._jobs.append(self.cluster.start(HOME, [*launch.split(), *self.train], self.env))

    def running(self) -> bool:
        return self.job.running()

    def list_hosts(self, *hosts: str) -> None:
        """Set the content of the hostfile."""
        self.listed = hosts
        self.write_hostfile(*hosts)

    def write_hostfile(self, *hosts: str) -> None:
        new = self.hostfile.with_suffix(".new")
        new.write_text("".join(f"{host} slots={SLOTS}\n" for host in hosts))
        new.rename(self.hostfile)

    def ranks(self, host: str | None = None) -> list[Process]:
        """Return the processes that train, in an order that does not depend on their age."""
        found = [p for p in self.cluster.ranks(host) if _name(p.pid) not in (HELPER, None)]
        return sorted(found, key=lambda p: (p.host, p.pid))

    def holders(self) -> list[list[Process]]:
        """Return the ranks that hold each shard of the model, for shards with several holders."""
        by_shard: dict[str, list[Process]] = {}
        for process in self.ranks():
            file = self._directory / f"shard-{_number(process)}"
            if file.exists():
                by_shard.setdefault(file.read_text(), []).append(process)
        return [by_shard[shard] for shard in sorted(by_shard) if len(by_shard[shard]) > 1]

    def helpers(self) -> list[Process]:
        """Return the forked children of ranks, including children that outlived their ranks."""
        return [p for p in self.cluster.ranks() if _name(p.pid) == HELPER]

    def has_helper(self, rank: Process) -> bool:
        """Ask a rank to fork a process; False: it takes no step, such as a spare."""
        wish = self._directory / f"fork-{_number(rank)}"
        wish.touch()
        # The process may be starting, which takes a while on a busy machine.
        with suppress(AssertionError):
            poll(lambda: not wish.exists(), 90, "the helper process")
            return True
        wish.unlink(missing_ok=True)
        return False

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl so far."""
        return metrics(self.run)

    def starts(self) -> list[dict[str, Any]]:
        """Return the start events in events.jsonl so far."""
        path = self.run / "events.jsonl"
        lines = read_lines(path) if path.exists() else []
        return [line for line in lines if line["event"] == "start"]

    def launches(self) -> int:
        """Return how often a launcher was started."""
        return self.output().count("hvdtrain launch: starting ")

    def wait_for_steps(self, since: float) -> None:
        """Wait until steps are completed again, on enough ranks, after the unix time `since`.

        Raises:
            AssertionError: the job ended, or `NO_STEP_SECONDS` passed without a step or without
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
            assert self.running(), "the job ended"
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

    def end(self) -> float:
        """Request a stop; all processes must exit with 75, the ranks on their own. Return the
        seconds."""
        began, numbers = time.monotonic(), {_number(rank) for rank in self.ranks()}
        os.kill(self.supervisor().pid, signal.SIGTERM)
        done = self.job.wait(_END_SECONDS)
        # The last launcher prints this at its end, also for ranks that ended long before.
        codes = dict(re.findall(r"^Process (\d+) exit with status code (\d+)", done.stdout, re.M))
        wrong = {n: code for n in sorted(numbers) if (code := codes.get(n)) != str(EXIT_PREEMPTED)}
        assert done.returncode == EXIT_PREEMPTED, done
        assert not wrong, f"process: exit code {wrong}\n{self.log()}"
        return time.monotonic() - began

    def errors(self) -> list[str]:
        """Return the lines about ranks that ended with their own error."""
        return [line for line in self.output().splitlines() if _OWN_ERROR in line]

    def output(self) -> str:
        """Return everything that was written to the screen."""
        return "".join(job.output() for job in self._jobs)

    def log(self) -> str:
        """Return the end of the output, without the lines of steps."""
        lines = self.job.output().splitlines(keepends=True)
        return "".join(line for line in lines if "  ETA " not in line)[-_TAIL_BYTES:]

    def kill(self) -> None:
        for job in self._jobs:
            job.kill()


def _name(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return None


def _number(process: Process) -> str:
    """Return the launcher's number of a process; "" once it has ended."""
    try:
        return psutil.Process(process.pid).environ().get("HOROVOD_RANK", "")
    except psutil.Error:
        return ""


def named(process: Process) -> str:
    """Return how a victim is reported."""
    return f"process {process.pid} on {process.host}"


# --- the table of faults ---------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault that can be injected into a job.

    Args:
        inject: injects it into a ChaosJob, choosing with the given generator; returns its victims.
            Afterwards nothing prevents the job from continuing.
        restarts: the supervisor has to restart the ranks. After all other faults the remaining
            ranks continue.
        harmless: no rank may be lost.
        errors: ranks may end with their own error.
        guest: node3 must take part (True), or must not (False).
    """

    inject: Callable[[Any, random.Random], str]
    restarts: bool = False
    harmless: bool = False
    errors: bool = False
    guest: bool | None = None


def _kill(job: ChaosJob, choice: random.Random) -> str:
    victim = choice.choice(job.ranks())
    job.cluster.kill([victim])
    return named(victim)


def _kill_with_helper(job: ChaosJob, choice: random.Random) -> str:
    ranks = job.ranks()
    victim = next(rank for rank in choice.sample(ranks, len(ranks)) if job.has_helper(rank))
    job.cluster.kill([victim])
    return named(victim)


def _kill_in_a_rendezvous(job: ChaosJob, choice: random.Random) -> str:
    return _kill_in_turn(job, choice, choice.sample(job.ranks(), 2))


def _kill_two_holders(job: ChaosJob, choice: random.Random) -> str:
    """Kill two holders of the same shard; every rank holds a whole model."""
    poll(lambda: bool(job.holders()), NO_STEP_SECONDS, "two ranks that hold the same shard")
    return _kill_in_turn(job, choice, choice.sample(choice.choice(job.holders()), 2))


def _kill_in_turn(job: ChaosJob, choice: random.Random, victims: Sequence[Process]) -> str:
    for victim in victims:
        job.cluster.kill([victim])
        time.sleep(choice.uniform(0, 0.5))
    return ", ".join(map(named, victims))


def _stop(job: ChaosJob, choice: random.Random) -> str:
    victim = choice.choice(job.ranks())
    os.kill(victim.pid, signal.SIGSTOP)
    return named(victim)


def _kill_a_watchdog(job: ChaosJob, choice: random.Random) -> str:
    """Then kill another rank: the rank without a watchdog must survive the next rendezvous."""
    alone, victim = choice.sample(job.ranks(), 2)
    watchdogs = psutil.Process(alone.pid).children()
    for process in watchdogs:
        if "hvdtrain.elastic.watchdog" in process.cmdline():
            process.kill()
    time.sleep(2)
    job.cluster.kill([victim])
    return f"the watchdog of {named(alone)}, then {named(victim)}"


def _cut_a_link(job: ChaosJob, choice: random.Random) -> str:
    return _cut(job, _host_with_ranks(job, choice), choice.uniform(1, 12))


def _cut_the_launchers_link(job: ChaosJob, choice: random.Random) -> str:
    return _cut(job, HOME, choice.uniform(1, 5))


def _cut(job: ChaosJob, host: str, seconds: float) -> str:
    job.cluster.link(host, up=False)
    time.sleep(seconds)
    job.cluster.link(host, up=True)
    return f"{host} for {seconds:.1f} s"


def _lose_the_host_list(job: ChaosJob, choice: random.Random) -> str:
    """Remove a host from the hostfile, empty it, or delete it, so that discovery fails."""
    kind, seconds = choice.choice(["lacks a host", "empty", "not there"]), choice.uniform(2, 12)
    if kind == "lacks a host":
        missing = _host_with_ranks(job, choice)
        job.write_hostfile(*(host for host in job.listed if host != missing))
    elif kind == "empty":
        job.write_hostfile()
    else:
        job.hostfile.unlink()
    time.sleep(seconds)
    job.write_hostfile(*job.listed)
    return f"{kind} for {seconds:.1f} s"


def _lose_host_names(job: ChaosJob, choice: random.Random) -> str:
    """Make the name of one host, or of all hosts with ranks, unresolvable: they do not respond."""
    lost = choice.choice([[_host_with_ranks(job, choice)], [*WORKERS, GUEST]])
    seconds = choice.uniform(6, 12)
    job.cluster.resolve([host for host in HOSTS if host not in lost])
    time.sleep(seconds)
    job.cluster.resolve(HOSTS)
    return f"{' '.join(lost)} for {seconds:.1f} s"


def _cut_the_power(job: ChaosJob, choice: random.Random) -> str:
    host, seconds = _host_with_ranks(job, choice), choice.uniform(1, 12)
    job.cluster.kill_host(host)
    time.sleep(seconds)
    job.cluster.boot(host)
    job.disk.mount(host)
    return f"{host} for {seconds:.1f} s"


def _host_with_ranks(job: ChaosJob, choice: random.Random) -> str:
    return choice.choice(sorted({p.host for p in job.ranks()}) or [*WORKERS])


def _block_the_disk(job: ChaosJob, choice: random.Random) -> str:
    seconds = choice.uniform(2, 12)
    job.disk.block(seconds)
    return f"for {seconds:.1f} s"


def _fill_the_disk(job: ChaosJob, choice: random.Random) -> str:
    seconds = choice.uniform(2, 12)
    with job.disk.full():
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


def _take_the_disk_away(job: ChaosJob, choice: random.Random) -> str:
    seconds = choice.uniform(2, 10)
    with job.disk.gone():
        time.sleep(seconds)
    return f"for {seconds:.1f} s"


def _make_the_disk_read_only(job: ChaosJob, choice: random.Random) -> str:
    """As a file server fails over: the ranks train on meanwhile."""
    seconds = choice.uniform(10, 25)
    with job.disk.read_only():
        began = time.time()
        time.sleep(seconds)
        end = time.time()
    poll(lambda: job.lines()[-1]["time"] > end, NO_STEP_SECONDS, "a step on a writable disk")
    steps = [began, *(t for line in job.lines() if began < (t := line["time"]) < end), end]
    longest = max(after - before for before, after in itertools.pairwise(steps))
    assert longest < seconds / 2, f"no step for {longest:.1f} of {seconds:.1f} s"
    return f"for {seconds:.1f} s"


def _kill_on_a_full_disk(job: ChaosJob, choice: random.Random) -> str:
    victim = choice.choice(job.ranks())
    with job.disk.full():
        time.sleep(1)
        job.cluster.kill([victim])
        time.sleep(8)
    return named(victim)


def _add_a_host(job: ChaosJob, choice: random.Random) -> str:
    job.list_hosts(*WORKERS, GUEST)
    poll(lambda: GUEST in job.starts()[-1]["hosts"], NO_STEP_SECONDS, "ranks on a new host")
    return GUEST


def _remove_a_host(job: ChaosJob, choice: random.Random) -> str:
    job.list_hosts(*WORKERS)
    poll(lambda: GUEST not in job.starts()[-1]["hosts"], NO_STEP_SECONDS, "a host's leave")
    return GUEST


def _kill_the_launcher(job: ChaosJob, choice: random.Random) -> str:
    job.cluster.kill([job.launcher()])
    return "horovodrun"


def _restart_on_a_slow_disk(job: ChaosJob, choice: random.Random) -> str:
    """Restart with a disk on which reading the checkpoint exceeds the hang timeout."""
    starts, began = len(job.starts()), time.monotonic()

    def resumed() -> bool:
        return any(start["source"] == "checkpoint" for start in job.starts()[starts:])

    with job.disk.slow(_SLOW_BYTES_PER_SECOND):
        job.cluster.kill([job.launcher()])
        poll(resumed, _RESUME_SECONDS, "a start from a slow disk")
    return f"horovodrun, resumed after {time.monotonic() - began:.0f} s"


def _kill_the_supervisor(job: ChaosJob, choice: random.Random) -> str:
    job.cluster.kill([job.supervisor()])
    poll(lambda: not job.ranks(), 30, "the end of a killed supervisor's ranks")
    job.start()
    return "hvdtrain launch"


def _ask_everything_to_stop(job: ChaosJob, choice: random.Random) -> str:
    """As a batch system does: also forked children, such as data workers; then start again."""
    ranks = [psutil.Process(rank.pid) for rank in job.ranks()]
    asked = [*ranks, *(child for rank in ranks for child in rank.children(recursive=True))]
    for process in [psutil.Process(job.supervisor().pid), *asked]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    done = job.job.wait(_END_SECONDS)
    assert done.returncode == EXIT_PREEMPTED, done
    job.start()
    return f"{len(asked)} processes"


FAULTS = {
    "kill a rank": Fault(_kill),
    "kill a rank with a helper process": Fault(_kill_with_helper),
    "kill a second rank in the rendezvous": Fault(_kill_in_a_rendezvous),
    "kill two holders of one shard": Fault(_kill_two_holders),
    "stop a rank": Fault(_stop),
    "kill a watchdog, then a rank": Fault(_kill_a_watchdog),
    "cut a link": Fault(_cut_a_link, errors=True),
    "cut the launcher's link": Fault(_cut_the_launchers_link, harmless=True),
    "cut the power of a host": Fault(_cut_the_power, errors=True),
    "block the disk": Fault(_block_the_disk),
    "fill the disk": Fault(_fill_the_disk),
    "take the disk away": Fault(_take_the_disk_away),
    "make the disk read-only": Fault(_make_the_disk_read_only, harmless=True),
    "kill a rank on a full disk": Fault(_kill_on_a_full_disk),
    "lose the host list": Fault(_lose_the_host_list),
    "lose host names": Fault(_lose_host_names),
    "add a host": Fault(_add_a_host, guest=False),
    "remove a host": Fault(_remove_a_host, guest=True),
    "kill the launcher": Fault(_kill_the_launcher, restarts=True),
    "restart on a slow disk": Fault(_restart_on_a_slow_disk, restarts=True),
    "kill the supervisor": Fault(_kill_the_supervisor, restarts=True),
    "ask everything to stop": Fault(_ask_everything_to_stop, restarts=True),
}


@dataclass(frozen=True)
class Draw:
    """A fault of the sequence, `pause` seconds after the last one; `choice` selects its victims."""

    pause: float
    name: str
    choice: random.Random


def sequence(seed: int, faults: Mapping[str, Fault]) -> Iterator[Draw]:
    """Yield faults without end, identical for one seed, however long each recovery takes.

    No fault occurs twice before all have occurred once, and so on. The victims are identical only
    as far as the same ranks exist.
    """
    choice, guest, drawn = random.Random(seed), False, Counter[str]()
    while True:
        possible = [name for name, fault in faults.items() if fault.guest in (None, guest)]
        fewest = min(drawn[name] for name in possible)
        name = choice.choice([name for name in possible if drawn[name] == fewest])
        drawn[name] += 1
        if faults[name].guest is not None:
            guest = not guest
        yield Draw(choice.uniform(10, 20), name, random.Random(choice.random()))


# --- outcomes -----------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Cost of a fault.

    Args:
        seconds: from the fault to the end of the next step, or the longest pause between two steps
            until training was steady again, if that was longer.
        before: ranks of the last step before it.
        after: ranks of the first step after that pause.
    """

    name: str
    seconds: float
    before: int
    after: int


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Return the largest difference of two elements, relative to their tensor's largest element.

    It is 0 only if all tensors are bitwise identical.

    Raises:
        AssertionError: the names or shapes of the tensors differ.
    """
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    largest = 0.0
    for name, expected in wanted.items():
        tensor = found[name]
        assert tensor.shape == expected.shape, name
        if tensor.numpy().tobytes() != expected.numpy().tobytes():
            error = (tensor.double() - expected.double()).abs().max().item()
            scale = expected.double().abs().max().item() or 1.0
            largest = max(largest, error / scale, sys.float_info.min)
    return largest


def table(outcomes: Sequence[Outcome], faults: Iterable[str]) -> str:
    """Format one line per fault: its number, its cost, and ranks before > after with counts."""
    lines = [f"{'fault':38} {'count':>5} {'median s':>9} {'longest s':>9}  ranks"]
    for name in faults:
        same = [outcome for outcome in outcomes if outcome.name == name]
        if same:
            seconds = sorted(outcome.seconds for outcome in same)
            ranks = [f"{outcome.before}>{outcome.after}" for outcome in same]
            counts = ", ".join(f"{r} ({ranks.count(r)})" for r in sorted(set(ranks)))
            median = seconds[len(seconds) // 2]
            lines.append(f"{name:38} {len(same):5} {median:9.2f} {seconds[-1]:9.2f}  {counts}")
    return "\n".join(lines)
