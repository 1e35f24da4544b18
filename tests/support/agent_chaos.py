"""Chaos with agents: a run of `hvdtrain launch` without hosts, and the faults that can hit it.

There is no supervisor, no launcher and no list of hosts, so the faults that need one are missing.
Any host may have the driver and ranks; a host without a task holds the disk, and another one is
lent to the run now and then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.agent import driver_file
from hvdtrain.agent.agent import DRIVER_NAME
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.run_files import owner_token
from tests.support.chaos import FAULTS, HOME, NO_STEP_SECONDS, SLOTS, ChaosJob, Fault, named
from tests.support.cluster import Process
from tests.support.job import Job, poll

# The tasks have fewer slots than the run may use, so that a donor's ranks train.
_TASK_SLOTS = {"node1": SLOTS, "node2": SLOTS, "node3": 1}
TASK_HOSTS = tuple(_TASK_SLOTS)
_DONOR = "node4"
_MOST_RANKS = 6
_DRIVER_SECONDS = 30.0
_END_SECONDS = 60.0
_TAIL_BYTES = 6000
_KEEPER = "hvdtrain-keeper"
_AGENT = "hvdtrain-agent"
_CLI = ["python", "-m", "hvdtrain.cli"]
# Another process reads the output, as a pager does, and can be stopped.
_READER = "chaos-reader"
_READ = f'set -o pipefail; "$@" 2>&1 | (exec -a {_READER} cat)'


class AgentChaosJob(ChaosJob):
    """A task of `hvdtrain launch` on each of three hosts; a fourth host has a donor at times."""

    hosts = (HOME, *TASK_HOSTS, _DONOR)

    def start(self) -> None:
        self._tasks: dict[str, Job] = {}
        for number, host in enumerate(TASK_HOSTS):
            env = {
                "PMI_RANK": str(number),
                "PMI_SIZE": str(len(TASK_HOSTS)),
                "MPI_LOCALRANKID": "0",
            }
            options = f"launch --slots {_TASK_SLOTS[host]} --max-np {_MOST_RANKS}"
            words = [*options.split(), "--min-np", str(self.min_np), "--", *self.train]
            self._tasks[host] = self._start(host, words, env)

    def _start(self, host: str, words: Sequence[str], env: dict[str, str]) -> Job:
        command = ["bash", "-c", _READ, "bash", *_CLI, *words]
        self._jobs.append(self.cluster.start(host, command, self.env | env))
        return self._jobs[-1]

    def start_again(self, host: str) -> None:
        """Start a task again, after its host or the task was killed."""
        self._tasks[host] = self.start_agent(host, _TASK_SLOTS[host])

    def start_agent(self, host: str, slots: int) -> Job:
        """Start an agent on a host that the run can do without."""
        words = ["agent", "--slots", str(slots), "--run", str(self.run_on_hosts)]
        return self._start(host, words, {})

    def running(self) -> bool:
        return all(task.running() for task in self._tasks.values())

    def log(self) -> str:
        texts = []
        for host, task in self._tasks.items():
            lines = [line for line in task.output().splitlines(True) if "  ETA " not in line]
            texts.append(f"--- {host}\n" + "".join(lines)[-_TAIL_BYTES:])
        return "\n".join(texts)

    def driver(self) -> Process:
        """The process that has the token of the driver and has published its address."""
        found: list[Process] = []

        def exists() -> bool:
            token = owner_token.read(self.run / f"{owner_token.LAUNCH}owner")
            host = token.host if token is not None else HOME
            found[:] = [p for p in self.cluster.processes(host) if _name(p) == DRIVER_NAME][-1:]
            return bool(found) and token is not None and not token.ended

        poll(exists, _DRIVER_SECONDS, "a driver")
        return found[0]

    def process(self, host: str, name: str) -> Process:
        """The oldest process of that name on a host: the host's keeper or agent."""
        found: list[Process] = []

        def exists() -> bool:
            found[:] = [p for p in self.cluster.processes(host) if _name(p) == name]
            return bool(found)

        poll(exists, _DRIVER_SECONDS, f"{name} on {host}")
        return found[0]

    def end(self) -> float:
        began = time.monotonic()
        # SIGTERM to an agent that was started again, without a launcher, would end its host only.
        os.kill(self.process(TASK_HOSTS[0], _KEEPER).pid, signal.SIGUSR1)
        for host, task in self._tasks.items():
            done = task.wait(_END_SECONDS)
            assert done.returncode == EXIT_PREEMPTED, f"{host}: {done}"
        assert self.content()["exit_code"] == EXIT_PREEMPTED
        poll(lambda: not self.cluster.ranks(), 10, "the end of all ranks")
        return time.monotonic() - began

    def content(self) -> dict[str, Any]:
        """The driver's file."""
        found: dict[str, Any] = json.loads((self.run / driver_file.NAME).read_text())
        return found


def _name(process: Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/comm").read_text().strip()
    except OSError:
        return ""


# --- faults --------------------------------------------------------------------------------------


def _kill_the_driver(job: AgentChaosJob, choice: random.Random) -> str:
    driver = job.driver()
    job.cluster.kill([driver])
    return named(driver)


def _kill_the_driver_twice(job: AgentChaosJob, choice: random.Random) -> str:
    """Kill the driver, and the one that replaces it while it takes over."""
    first = job.driver()
    job.cluster.kill([first])
    poll(lambda: job.driver().pid != first.pid, _DRIVER_SECONDS, "another driver")
    time.sleep(choice.uniform(0, 2))
    return f"{named(first)}, {_kill_the_driver(job, choice)}"


def _stop_the_driver(job: AgentChaosJob, choice: random.Random) -> str:
    driver, seconds = job.driver(), choice.uniform(1, 10)
    os.kill(driver.pid, signal.SIGSTOP)
    time.sleep(seconds)
    if psutil.pid_exists(driver.pid):
        os.kill(driver.pid, signal.SIGCONT)
    return f"{named(driver)} for {seconds:.1f} s"


def _cut_the_drivers_power(job: AgentChaosJob, choice: random.Random) -> str:
    return _cut_the_power(job, job.driver().host, choice.uniform(1, 12))


def _cut_a_hosts_power(job: AgentChaosJob, choice: random.Random) -> str:
    host = choice.choice(sorted({p.host for p in job.ranks()}))
    return _cut_the_power(job, host, choice.uniform(1, 12))


def _cut_the_power(job: AgentChaosJob, host: str, seconds: float) -> str:
    job.cluster.kill_host(host)
    time.sleep(seconds)
    job.cluster.boot(host)
    job.disk.mount(host)
    job.start_again(host)
    return f"{host} for {seconds:.1f} s"


def _cut_the_drivers_link(job: AgentChaosJob, choice: random.Random) -> str:
    host, seconds = job.driver().host, choice.uniform(1, 12)
    job.cluster.link(host, up=False)
    time.sleep(seconds)
    job.cluster.link(host, up=True)
    return f"{host} for {seconds:.1f} s"


def _cut_all_other_links(job: AgentChaosJob, choice: random.Random) -> str:
    """To the driver it looks as if its own link were cut, and no other host can replace it."""
    others = [host for host in TASK_HOSTS if host != job.driver().host]
    seconds = choice.uniform(2, 16)
    for host in others:
        job.cluster.link(host, up=False)
    time.sleep(seconds)
    for host in others:
        job.cluster.link(host, up=True)
    return f"{' and '.join(others)} for {seconds:.1f} s"


def _part_two_hosts(job: AgentChaosJob, choice: random.Random) -> str:
    """Split the network: two hosts cannot reach each other; each reaches the third."""
    (one, other), seconds = choice.sample(TASK_HOSTS, 2), choice.uniform(2, 10)
    job.cluster.part(one, other, leave=False)
    time.sleep(seconds)
    job.cluster.part(one, other, leave=True)
    return f"{one} and {other} for {seconds:.1f} s"


def _kill_an_agent(job: AgentChaosJob, choice: random.Random) -> str:
    agent = job.process(choice.choice(TASK_HOSTS), _AGENT)
    job.cluster.kill([agent])
    return named(agent)


def _kill_a_task(job: AgentChaosJob, choice: random.Random) -> str:
    """Kill the process that a batch system has started: all of its host ends with it."""
    keeper = job.process(choice.choice(TASK_HOSTS), _KEEPER)
    job.cluster.kill([keeper])
    poll(lambda: not job.ranks(keeper.host), 5, f"the end of the ranks on {keeper.host}")
    time.sleep(choice.uniform(0, 5))
    job.start_again(keeper.host)
    return named(keeper)


def _kill_a_rank_then_the_driver(job: AgentChaosJob, choice: random.Random) -> str:
    """The driver dies while a generation is formed, in the rendezvous, or as it starts a rank."""
    driver, rank = job.driver(), choice.choice(job.ranks())
    job.cluster.kill([rank])
    seconds = choice.uniform(0, 2.5)
    time.sleep(seconds)
    job.cluster.kill([driver])
    return f"{named(rank)}, {named(driver)} {seconds:.2f} s later"


def _lend_a_host(job: AgentChaosJob, choice: random.Random) -> str:
    """A donor trains for a while, then leaves with notice, or its job is killed."""
    donor = job.start_agent(_DONOR, SLOTS)
    poll(lambda: _DONOR in job.starts()[-1]["hosts"], NO_STEP_SECONDS, "ranks on the donor")
    job.wait_for_steps(time.time())
    time.sleep(choice.uniform(0, 5))
    starts, errors, with_notice = len(job.starts()), job.errors(), choice.choice([True, False])
    keeper = job.process(_DONOR, _KEEPER)
    if with_notice:
        os.kill(keeper.pid, signal.SIGTERM)
    else:
        job.cluster.kill([keeper])
    done = donor.wait(_END_SECONDS)
    poll(lambda: _DONOR not in job.starts()[-1]["hosts"], NO_STEP_SECONDS, "the donor's leave")
    if with_notice:
        assert done.returncode == EXIT_PREEMPTED, done
        lost = [start for start in job.starts()[starts:] if start["cause"] == "failure"]
        assert not lost and job.errors() == errors, (lost, job.errors())
    return f"{_DONOR} {'with' if with_notice else 'without'} notice"


def _make_the_run_readable(job: AgentChaosJob, choice: random.Random) -> str:
    """As users share results; then kill the driver."""
    for path in (job.run, *job.run.rglob("*")):
        with suppress(FileNotFoundError):  # a checkpoint that is deleted meanwhile
            path.chmod(path.stat().st_mode | (0o050 if path.is_dir() else 0o040))
    return _kill_the_driver(job, choice)


def _stop_the_readers(job: AgentChaosJob, choice: random.Random) -> str:
    """Stop the readers of all output, and kill a rank meanwhile."""
    found = [process for host in TASK_HOSTS for process in job.cluster.processes(host)]
    readers = [process for process in found if process.command.startswith(_READER)]
    assert len(readers) == len(TASK_HOSTS), readers
    for reader in readers:
        os.kill(reader.pid, signal.SIGSTOP)
    try:
        victim, since = choice.choice(job.ranks()), time.time()
        job.cluster.kill([victim])
        job.wait_for_steps(since)
    finally:
        for reader in readers:
            os.kill(reader.pid, signal.SIGCONT)
    return named(victim)


_SAME = (
    *("kill a rank", "kill a rank with a helper process", "kill a second rank in the rendezvous"),
    *("kill two holders of one shard", "stop a rank", "kill a watchdog, then a rank"),
    *("cut a link", "block the disk", "fill the disk"),
    *("take the disk away", "make the disk read-only", "kill a rank on a full disk"),
)
AGENT_FAULTS: dict[str, Fault] = {name: FAULTS[name] for name in _SAME} | {
    "cut the power of a host": Fault(_cut_a_hosts_power, errors=True),
    "kill the driver": Fault(_kill_the_driver, harmless=True),
    "kill the driver twice": Fault(_kill_the_driver_twice, harmless=True),
    "kill a rank, then the driver": Fault(_kill_a_rank_then_the_driver, errors=True),
    "stop the driver": Fault(_stop_the_driver, harmless=True),
    "cut the power of the driver's host": Fault(_cut_the_drivers_power, errors=True),
    "cut the link of the driver's host": Fault(_cut_the_drivers_link, errors=True),
    "cut the links of all other hosts": Fault(_cut_all_other_links, errors=True),
    "part two hosts": Fault(_part_two_hosts, errors=True),
    "make the run readable": Fault(_make_the_run_readable, harmless=True),
    "stop the readers": Fault(_stop_the_readers),
    "kill an agent": Fault(_kill_an_agent, errors=True),
    "kill a task": Fault(_kill_a_task, errors=True),
    "lend a host": Fault(_lend_a_host, errors=True),
}
