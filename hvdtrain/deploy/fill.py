"""Lend idle nodes of a Slurm to a run, by short jobs whose agents join it (donors).

Each interval one `sinfo` and one `squeue` show which nodes are idle and which jobs are pending; the
number of donors that follows is submitted by one `sbatch`. Slurm decides when a donor starts and
when it must give way. The scheduler alone divides the nodes between several runs.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.agent import driver_file
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.run_files import owner_token
from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.owner_token import Token
from hvdtrain.streams import say
from hvdtrain.text import plural
from hvdtrain.untrusted import is_of, printable, real

_COMMAND_SECONDS = 60.0
_FILTERS = ("SQUEUE_", "SINFO_", "SCANCEL_")  # variables by which users show a part of the queue
_LOOK_SECONDS = 0.5  # while the run has no driver
_SILENT_SECONDS = 5.0  # a driver renews its token twice a second
# Reasons for which a job is pending that may start as soon as nodes are idle. If it has not for so
# long, Slurm has found that they do not suit it.
_STARTABLE = ("None", "Resources", "Priority")
_PASSED_OVER_SECONDS = 60.0
_MOST_AT_ONCE = 1000  # tasks of a job array: Slurm's default limit
_REFUSALS = 3  # before Slurm has accepted a donor
_GAIN = 1.02  # more samples per second than with fewer ranks: less is noise
_STEPS = 5  # of each number of ranks, before their speeds are compared


class SlurmError(Exception):
    """A command of Slurm failed; the message is one line."""


@dataclass(frozen=True)
class QueuedJob:
    """A pending or running job.

    Args:
        nodes: that it has or needs.
        partitions: in which it may run.
        reason: for which it is pending.
    """

    number: str
    user: int
    state: str
    reason: str
    nodes: int
    partitions: frozenset[str]
    name: str


@dataclass(frozen=True)
class Use:
    """What the run can use.

    Args:
        donors: nodes that have work in a step; None: not known.
        gains: whether its newest ranks have made it faster, as far as that is known.
    """

    donors: int | None = None
    gains: bool = True


@dataclass
class Fill:
    """Submits donors for a run until it ends.

    Args:
        run: run directory.
        script: of a donor.
        most: donors at the same time.
        every: seconds between two looks at Slurm's queue.
        wait: seconds to wait for the run's driver, at the start and whenever there is none.
    """

    run: Path
    script: Path
    most: int
    every: float
    wait: float
    _said: str = field(default="", init=False)
    _accepted: bool = field(default=False, init=False)  # by Slurm: a donor
    _refusals: int = field(default=0, init=False)
    _pending_since: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(str(self.run).encode()).hexdigest()[:6]
        # scancel separates names by commas.
        self._name = f"donor-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.run.name)}-{digest}"
        self._partitions, self._ranks = _read_script(self.script)

    def until_the_end(self) -> int:
        """Submit donors until the run ends; return its exit code.

        Raises:
            UserError: Slurm refuses the donors, or its commands are not installed.
        """
        driver = _Driver(self.run)
        try:
            while True:
                driver.look()
                code, silent = driver.exit_code, driver.silent_seconds()
                if driver.seen and code not in (None, EXIT_PREEMPTED):
                    self._report(f"the run has ended with exit code {code}")
                    return code
                if silent > self.wait:
                    self._report(f"no driver of {self.run} for {self.wait:.0f} s (--wait)")
                    return EXIT_CRASH if code is None else code
                if driver.seen and code is None and silent < _SILENT_SECONDS + self.every:
                    self._fill()
                    time.sleep(self.every)
                else:
                    self._report(f"waiting for the driver of {self.run}")
                    time.sleep(_LOOK_SECONDS)
        finally:
            with suppress(SlurmError):  # running donors end with the run, or at their time limit
                _slurm("scancel", "--state=PENDING", f"--name={self._name}")

    def _fill(self) -> None:
        try:
            idle = parse_nodes(_slurm("sinfo", "--Node", "--noheader", "--format=%t|%P|%N"))
            jobs = parse_jobs(
                _slurm("squeue", "--noheader", "--array", "--format=%i|%U|%T|%r|%D|%P|%j")
            )
            use = read_use(self.run, self._ranks)
            count, why = self.count(idle, jobs, use, time.monotonic())
            if count:
                array = [f"--array=1-{count}"] if count > 1 else []
                _slurm("sbatch", "--parsable", f"--job-name={self._name}", *array, str(self.script))
                why, self._accepted = f"{plural(count, 'donor')} submitted", True
        except SlurmError as error:
            self._refusals += str(error).startswith("sbatch")
            if self._refusals >= _REFUSALS and not self._accepted:
                raise UserError(str(error)) from None
            self._report(f"{error}; trying again")
            return
        running = sum(job.state != "PENDING" for job in self._own(jobs))
        self._report(f"{plural(running, 'donor')} running; {why}")

    def _own(self, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
        return [job for job in jobs if job.name == self._name and job.user == os.geteuid()]

    def count(
        self,
        idle: Mapping[str, frozenset[str]],
        jobs: Sequence[QueuedJob],
        use: Use,
        now: float,
    ) -> tuple[int, str]:
        """Return the number of donors to submit now, and why it is not larger.

        Args:
            idle: idle nodes and their partitions; the default one has a * after its name.
            now: time.monotonic().
        """
        own = self._own(jobs)
        usable = [parts for parts in idle.values() if self._lends(parts)]
        due = [job for job in own if job.state == "PENDING" and job.reason != "BeginTime"]
        limit, why = len(usable) - len(due), "no other node is idle"
        if (room := self.most - len(own)) < limit:
            limit, why = room, f"--most {self.most}"
        if use.donors is not None and (room := use.donors - len(own)) < limit:
            limit, why = room, "more ranks would have no work in a step"
        if limit > 0 and not use.gains:
            limit, why = 0, "the last ranks have not made the run faster"
        others = [job for job in jobs if job not in own]
        if limit > 0 and self._others_may_start(usable, others, now):
            limit, why = 0, "another job is pending that may start on the idle nodes"
        return max(0, min(limit, _MOST_AT_ONCE)), why

    def _lends(self, partitions: frozenset[str]) -> bool:
        """Whether donors may run on a node of these partitions."""
        if not self._partitions:
            return any(name.endswith("*") for name in partitions)
        return any(name.rstrip("*") in self._partitions for name in partitions)

    def _others_may_start(
        self, usable: Sequence[frozenset[str]], jobs: Sequence[QueuedJob], now: float
    ) -> bool:
        """Whether a job that Slurm has not passed over for a while fits on the idle nodes."""
        pending = [job for job in jobs if job.state == "PENDING" and job.reason in _STARTABLE]
        self._pending_since = {
            job.number: self._pending_since.get(job.number, now) for job in pending
        }
        for job in pending:
            recent = now - self._pending_since[job.number] < _PASSED_OVER_SECONDS
            fitting = sum(
                any(name.rstrip("*") in job.partitions for name in parts) for parts in usable
            )
            if recent and 0 < job.nodes <= fitting:
                return True
        return False

    def _report(self, text: str) -> None:
        """Print a line unless it is the last one again."""
        if text != self._said:
            say(f"hvdtrain fill: {text}")
        self._said = text


class _Driver:
    """Whether a run's driver is alive, and how the run has ended.

    Attributes:
        seen: a driver was alive.
        exit_code: of the run's newest job; None: it has not ended.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._token: Token | None = None
        self._moved_at = time.monotonic()
        self.seen = False
        self.exit_code: int | None = None

    def look(self) -> None:
        """Read the driver's token and file.

        Raises:
            UserError: the driver's file must not be trusted.
        """
        with suppress(OSError):  # as if nothing had changed
            before = self._token
            self._token = owner_token.read(owner_token.of_launch(self._run))
            if owner_token.moved(before, self._token):
                self.seen, self._moved_at = True, time.monotonic()
            found = driver_file.read(self._run)
            self.exit_code = None if found is None else found.exit_code

    def silent_seconds(self) -> float:
        """Seconds since the driver was seen to be alive, or since the first look."""
        return time.monotonic() - self._moved_at


def read_use(run: Path, slots: int) -> Use:
    """Return what a run can use, from its newest start and its last steps.

    Args:
        slots: ranks per donor.
    """
    start: dict[str, Any] = {}
    for event in last_lines(run / "events.jsonl", "start"):
        start = event if event.get("event") == "start" else start
    useful, hosts = start.get("useful_ranks"), start.get("hosts")
    borrowed, donors = start.get("borrowed", {}), None
    if isinstance(useful, int) and is_of(hosts, dict[str, list[int]]) and is_of(borrowed, dict):
        own = sum(len(ranks) for host, ranks in (hosts or {}).items() if host not in borrowed)
        donors = math.ceil(max(0.0, min(useful, _most_ranks(run)) - own) / slots)
    return Use(donors, gains(last_lines(run / "metrics.jsonl")))


def _most_ranks(run: Path) -> float:
    """Return --max-np of the run's launch."""
    with suppress(OSError):
        plan = (driver_file.read_state(run) or {}).get("plan")
        return real(plan.get("max_np") if isinstance(plan, dict) else None) or math.inf
    return math.inf


def gains(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the ranks of the last step are faster than fewer ranks were; True: unknown.

    Args:
        lines: the last ones of metrics.jsonl. After a while none is left of fewer ranks, so that
            more are tried again.
    """
    speeds: dict[int, list[float]] = {}
    size = 0
    for line in lines:
        size, speed = int(real(line.get("world_size")) or 0), real(line.get("samples_per_second"))
        if speed is not None:
            speeds.setdefault(size, []).append(speed)
    measured = {ranks: median(found) for ranks, found in speeds.items() if len(found) >= _STEPS}
    fewer = [speed for ranks, speed in measured.items() if ranks < size]
    return size not in measured or not fewer or measured[size] > _GAIN * max(fewer)


# --- Slurm --------------------------------------------------------------------------------------


def _slurm(*command: str) -> str:
    """Return the output of a command of Slurm.

    Raises:
        SlurmError: it failed.
        UserError: it is not installed here.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, env=env, check=False
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]} is not installed here: start fill where Slurm is") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise SlurmError(f"{command[0]}: {type(error).__name__}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SlurmError(f"{command[0]}: {printable(lines[-1].removeprefix(f'{command[0]}: '))}")
    return done.stdout


def parse_nodes(text: str) -> dict[str, frozenset[str]]:
    """Return the idle nodes and their partitions from the lines state|partition|node of sinfo.

    Nodes that are off, drained, or planned for a pending job have other states.
    """
    nodes: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        state, _, rest = line.partition("|")
        partition, _, node = rest.partition("|")
        if state.strip() == "idle" and node:
            name = node.strip()
            nodes[name] = nodes.get(name, frozenset()) | {partition.strip()}
    return nodes


def parse_jobs(text: str) -> list[QueuedJob]:
    """Return the jobs in the lines number|user|state|reason|nodes|partitions|name of squeue."""
    jobs = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split("|", 6)]  # a name may contain any character
        if len(fields) < 7 or not fields[1].isdecimal():
            continue
        number, user, state, reason, nodes, partitions, name = fields
        found = re.match(r"(\d+)(K?)", nodes)  # 1K: 1024
        count = int(found[1]) * (1024 if found[2] else 1) if found else 0
        parts = frozenset(partitions.split(","))
        jobs.append(QueuedJob(number, int(user), state, reason, count, parts, name))
    return jobs


def _read_script(path: Path) -> tuple[frozenset[str], int]:
    """Return the partitions and the ranks of a donor's script.

    Raises:
        UserError: it cannot be read.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"--donor {path} cannot be read; `hvdtrain deploy malleable` writes it"
        ) from None
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.MULTILINE))
    ranks = options.get("ntasks-per-node", "1")
    partitions = options.get("partition", "").split(",")
    return frozenset(filter(None, partitions)), max(1, int(ranks) if ranks.isdecimal() else 1)
