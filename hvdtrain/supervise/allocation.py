"""Elastic run without ssh: something starts one task per host, such as a batch system's launcher.

Each task is its host's agent. A child of the first task is the driver: it holds the run, writes
RUN/.driver.json for the agents, and runs the elastic driver, which starts ranks through them.

Without a launcher, as in containers and pods, the tasks have no numbers: the same command is
started on each host, and again after a failure. The task that gets the run is the driver; the
others find that the run has a driver with their command, and become agents (`joins`).

The driver holds the supervisor's token of the run (run_files/ownership.py) as a lease, and records
the job in RUN/.driver-state.json before it starts a process or forms a generation. If the driver is
gone, an agent starts another one (successor.py), which waits until the token is stale, adopts the
job from that file and its processes from the agents, and publishes its address in RUN/.driver.json.
A driver decides nothing while its lease is not known to be valid, and exits when another driver has
the token, so two drivers never both form a generation.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from hvdtrain.agent import driver_file, guard, protocol
from hvdtrain.agent.agent import DRIVER_NAME
from hvdtrain.agent.connections import raise_file_limit
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.agent.hub import Hub
from hvdtrain.agent.output import show
from hvdtrain.elastic import job_record
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.job_record import JobRecord
from hvdtrain.elastic.rendezvous import FILE_VARIABLE, TIMEOUT_VARIABLE, environment_of
from hvdtrain.elastic.request_server import RequestServer
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, EXIT_USER, UserError
from hvdtrain.run_files import owner_token
from hvdtrain.run_files.host_records import LAUNCH_VARIABLE
from hvdtrain.run_files.owner_token import Token, who
from hvdtrain.run_files.ownership import Ownership, TokenPace
from hvdtrain.runtime import interfaces
from hvdtrain.runtime.environment import launched, launched_local_rank, launched_rank, launched_size
from hvdtrain.runtime.machine import is_loopback
from hvdtrain.runtime.queued_output import flush, say
from hvdtrain.runtime.signals import ASKING, handle, requests
from hvdtrain.supervise import run_progress

# The first generation waits so long for agents of hosts that are late; they join later.
_GATHER_SECONDS = 15.0
_LOOK_SECONDS = 0.1
# A driver renews its token more often than other owners, so that its successor waits less.
_LEASE = TokenPace(beat=0.5, lease=True)
_SUCCESSOR_LEASE = TokenPace(beat=0.5, stale=3.0, short_stale=3.0, lease=True)
_CHECK_SECONDS = 2.0  # waited for a check of the lease, at the end
_RECORD_SECONDS = 2.0  # from a failed write of the record to the next attempt
# A new driver waits so long for the next agent of the job; they look for it twice a second.
_RETURN_SECONDS = 1.5
_READS = 4  # by an agent, one after another, until it has connected
# A task that starts while its job has no driver waits so long for an agent to replace the driver:
# the ranks of the agent have newer steps than the checkpoint. And so long for a driver that has
# just got the run to write its file.
_REPLACED_SECONDS = 8.0
_WRITTEN_SECONDS = 3.0
_ADDRESSES_SECONDS = 2.0  # between two looks whether this host has more addresses
_EXIT_SECONDS = 0.5  # for its output, before a driver that steps down exits
_JOINS = 254  # exit code of a driver's process that found another driver to join


@dataclass(frozen=True)
class AllocationRun:
    """Configuration of a run in an allocation.

    Args:
        min_np, max_np: fewest and most ranks; None: all slots
        slots: most ranks on each host; None: each host decides
        wait: seconds to wait for min_np slots, at the start and whenever too few are left
        driver_timeout: `elastic.driver_timeout`
        train: argv of a rank
        run: run directory, absolute
        tls: encrypt the connections of agents
        horovod_script: `train` runs an unchanged script of Horovod's elastic API
    """

    min_np: int
    max_np: int | None
    slots: int | None
    wait: float
    driver_timeout: float
    train: Sequence[str]
    run: Path
    tls: bool = False
    horovod_script: bool = False


class HostTask(NamedTuple):
    """This task of a launcher that started one task per host; `number` 0 is the driver."""

    number: int
    hosts: int


def this_task(env: Mapping[str, str] = os.environ) -> HostTask:
    """Return this task's number and the number of tasks; (0, 1) without a launcher.

    Raises:
        UserError: the launcher started several tasks on this host.
    """
    size = launched_size(env)
    if size is not None:
        if launched_local_rank() > 0:
            raise UserError(
                "the launcher started several tasks on one host; start one per host, such as with "
                "`srun --ntasks-per-node=1` or `mpiexec -ppn 1`; --slots sets the number of ranks"
            )
        return HostTask(launched_rank(env), size)
    if "PBS_NODENUM" in env and "PBS_NODEFILE" in env:  # pbsdsh
        try:
            nodes = set(Path(env["PBS_NODEFILE"]).read_text().split())
        except OSError as error:
            raise UserError(f"PBS_NODEFILE {env['PBS_NODEFILE']}: {error.strerror}") from None
        return HostTask(int(env["PBS_NODENUM"]), len(nodes))
    return HostTask(0, 1)


def run_first_task(plan: AllocationRun, hosts: int) -> int:
    """Fork the driver; become the agent of this host when the driver has the run.

    If the driver is killed later, the task and its exit code remain.

    Args:
        hosts: number of tasks that the launcher started.

    Returns:
        The exit code of the driver in that process, or if it cannot begin the run.
    """
    wait_end, ready_end = os.pipe()
    task, driver = os.getpid(), os.fork()
    if driver == 0:
        os.close(wait_end)
        guard.set_name(DRIVER_NAME)
        guard.end_with(task)
        try:
            return AllocationDriver(plan, hosts, os.getcwd()).run(ready_end)
        except UserError:
            if joins(plan, _WRITTEN_SECONDS):  # a task on another host was faster
                flush()
                os._exit(_JOINS)
            raise
    os.close(ready_end)
    for number in requests():
        handle(number, lambda number, _: os.kill(driver, number))
    if os.read(wait_end, 1):
        become_agent(plan, driver)
    code = os.waitstatus_to_exitcode(os.waitpid(driver, 0)[1])
    if code == _JOINS:
        become_agent(plan)
    return code if code >= 0 else 128 - code


def joins(plan: AllocationRun, patience: float = 0.0) -> bool:
    """Whether this task is the agent of a job with the same command that another task drives.

    Waits up to _REPLACED_SECONDS if such a job has no driver now. A launcher's task never joins:
    its number says what it is.

    Args:
        patience: seconds to wait for the file of a driver that has just got the run.

    Raises:
        UserError: the driver's file must not be trusted.
    """
    if launched():
        return False
    path = owner_token.of_launch(plan.run)
    command, began, first = driver_file.command_digest(plan.train), time.monotonic(), None
    while (passed := time.monotonic() - began) < _REPLACED_SECONDS:
        try:
            found, token = driver_file.read(plan.run), owner_token.read(path)
        except OSError:
            return False
        ours = found is not None and (found.launch, found.command) == ("", command)
        if ours and found is not None and found.exit_code is None:
            if token is not None and first is not None and token != first and not token.ended:
                _say(f"{who(token)} drives this run: this process is the agent of its host")
                return True
        elif passed >= patience:
            return False
        first = first or token
        time.sleep(_LOOK_SECONDS)
    return False


def become_agent(plan: AllocationRun, driver: int | None = None) -> NoReturn:
    """Replace this process by the agent of this host; `driver`: pid of a child."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # until the agent handles them
    argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--task", "--run", str(plan.run)]
    argv += ["--wait", str(plan.wait)]
    argv += ["--slots", str(plan.slots)] if plan.slots else []
    argv += ["--driver", str(driver)] if driver is not None else []
    flush()
    os.execv(argv[0], argv)


# --- driver -----------------------------------------------------------------------------------


class AllocationDriver:
    """The driver of a run in an allocation."""

    def __init__(self, plan: AllocationRun, hosts: int, directory: str) -> None:
        """Create a driver.

        Args:
            hosts: number of tasks that the launcher started.
            directory: working directory of new ranks; it may not exist here, or not any more.
        """
        self._plan, self._expected, self._directory = plan, hosts, directory
        self._hub: Hub | None = None
        self._lease: Ownership | None = None
        self._driver: ElasticDriver | None = None
        self._signals: list[tuple[int, str, float]] = []  # arguments of ElasticDriver.signal
        self._signal_lock = threading.RLock()
        # A record that could not be written, and when the next attempt is due.
        self._unrecorded: tuple[JobRecord | None, float] | None = None

    def run(self, ready: int) -> int:
        """Run the job; return its exit code, with which all agents exit.

        Args:
            ready: descriptor to which a byte is written when agents can connect.

        Raises:
            UserError: another process supervises the run, or its directory cannot be written.
        """
        for number in requests():
            handle(number, self._on_own_signal)
        with run_progress.hold(self._plan.run, _LEASE) as lease:
            driver_file.remove_state(self._plan.run)  # of an earlier job
            content = DriverFile(
                addresses=[],
                port=0,
                secret=driver_file.new_secret(),
                launch=driver_file.launch_identity(),
                command=driver_file.command_digest(self._plan.train),
            )
            return self._serve(lease, content, None, ready)

    def take_over(self, known: Token, since: float) -> int:
        """Continue the job of a driver that is gone; return its exit code.

        Args:
            known, since: the driver's token, and since when it has not changed.

        Raises:
            UserError: the driver is alive, or another one has replaced it; or this host has no
                network now, and the driver's had.
        """
        run = self._plan.run
        before = driver_file.read(run)
        lacks_network = all(map(is_loopback, _addresses()))
        if before is not None and lacks_network and not all(map(is_loopback, before.addresses)):
            raise UserError(f"{run}: this host has no address that other hosts reach")
        with run_progress.hold(run, _SUCCESSOR_LEASE, known, since) as lease:
            # Read again: only now can no other driver change them.
            content, state = driver_file.read(run), driver_file.read_state(run)
            if content is None or state is None or content.exit_code is not None:
                raise UserError(f"{run}: the job has ended")
            job = state["job"]
            found = None if job is None else job_record.parse(job)
            for number in requests():
                handle(number, self._on_own_signal)
            _say(f"{socket.gethostname()} runs the driver now: {who(known)} does not respond")
            return self._serve(lease, content, found, before=known.host)

    def _serve(
        self,
        lease: Ownership,
        content: DriverFile,
        found: JobRecord | None,
        ready: int | None = None,
        before: str = "",
    ) -> int:
        """Drive the job to its end.

        Args:
            found: what another driver has started, or None.
            before: host of that driver.
        """
        plan, code = self._plan, EXIT_CRASH
        raise_file_limit()
        tls, certificate = protocol.new_certificate() if plan.tls else (None, "")
        hub = self._hub = Hub(
            content.key,
            plan.driver_timeout,
            plan.train,
            self._directory,
            show,
            self._on_signal,
            _say,
            tls,
        )
        hub.on_leave = self._on_leave
        content = replace(
            content,
            addresses=_addresses(),
            port=hub.port,
            rendezvous=0,
            certificate=certificate,
        )
        self._lease = lease
        try:
            if found is None:
                self._record(None)
                _write(plan.run, content)
            if ready is not None:
                os.write(ready, b"1")
                os.close(ready)
            code = self._drive(hub, content, found, before)
        finally:
            if lease.held(_CHECK_SECONDS):
                with suppress(OSError):
                    driver_file.write(plan.run, replace(content, secret="", exit_code=code))
                    driver_file.remove_state(plan.run)
            hub.finish(code)
        return code

    def _drive(
        self,
        hub: Hub,
        content: DriverFile,
        found: JobRecord | None,
        before: str,
    ) -> int:
        plan = self._plan
        if found is not None:
            hub.adopt(found.hosts, job_record.live(found), lambda *end: driver.exited(*end))
            hub.set_order(*_order(found))
        elif (code := self._wait_for_agents(hub)) is not None:
            return code
        os.environ[LAUNCH_VARIABLE] = str(plan.run)  # the driver records what it shows about hosts
        rendezvous = RequestServer(protocol.rendezvous_secret(content.key))
        driver = ElasticDriver(
            rendezvous,
            hub,
            plan.min_np,
            plan.max_np,
            timeout=max(1, round(plan.wait)),
            horovod_script=plan.horovod_script,
        )
        ready = threading.Event()
        driver.may_act = lambda: ready.is_set() and self._may_act(hub, driver)
        driver.record = self._record
        hub.on_hosts = driver.discover
        hub.on_isolation = lambda hosts: self._on_isolation(hub, driver, hosts)
        port = rendezvous.start(driver)
        more = {
            FILE_VARIABLE: str(plan.run / driver_file.NAME),
            TIMEOUT_VARIABLE: str(plan.driver_timeout),
        }
        hub.environment = lambda slot, address: environment_of(slot, address, port) | more
        content = replace(content, rendezvous=port)
        if found is None:
            _write(plan.run, content)
            driver.wait_for_available_slots(plan.min_np)
            slots = sum(hub.find_available_hosts_and_slots().values())
            driver.start(hub, min(slots, plan.max_np or slots))
        else:
            driver.take_over(hub, found)
            began = time.monotonic()
            _write(plan.run, content)  # agents and ranks connect from here on
            # They read the file first: on a slow disk that takes them as long as this driver.
            took = time.monotonic() - began
            hub.give_up_missing(
                max(_RETURN_SECONDS, _READS * took),
                plan.driver_timeout,
                lambda: driver.undisturbed() and not self._signals,
                before,
            )
        ready.set()
        driver.discover()
        with self._signal_lock:
            self._driver = driver
            for received in self._signals:
                driver.signal(*received)
        while not driver.has_ended(_ADDRESSES_SECONDS):
            # A driver may have begun while its link was down.
            if content != (now := _with_new_addresses(content)):
                content = now
                _write(plan.run, content)
        code = driver.wait()
        driver.stop()
        return code

    def _may_act(self, hub: Hub, driver: ElasticDriver) -> bool:
        """Return whether the lease is valid; step down if hosts may have the state but are lost."""
        assert self._lease is not None
        if not self._lease.held():
            return False
        if hub.lost_hosts and driver.state_is_elsewhere(hub.lost_hosts):
            _step_down("no host with the state of the run responds")
        if self._unrecorded is not None and time.monotonic() > self._unrecorded[1]:
            self._record(self._unrecorded[0])
        return True

    def _on_isolation(self, hub: Hub, driver: ElasticDriver, hosts: Set[str]) -> None:
        """Step down if this host may be cut off, and the hosts that respond cannot continue."""
        if not driver.can_continue_on(hosts):
            hub.postpone(hosts)
            _step_down("too few ranks respond")

    def _record(self, job: JobRecord | None) -> None:
        """Write what another driver needs, which otherwise cannot replace this one.

        Returns only while the lease is valid, however long the disk takes. While the token cannot
        be renewed either, nothing may change: the record stays valid for another driver.

        Args:
            job: None: no process has been started.
        """
        assert self._hub is not None and self._lease is not None
        state = {
            "directory": self._directory,
            "plan": asdict(self._plan) | {"run": str(self._plan.run)},
            "hosts": self._expected,
            "job": None if job is None else asdict(job),
        }
        try:
            try:
                driver_file.write_state(self._plan.run, state)
            except OSError:
                self._lease.wait_for_renewal()
                driver_file.write_state(self._plan.run, state)
        except OSError as error:
            if self._unrecorded is None:
                _say(f"{self._plan.run / driver_file.STATE_NAME} cannot be written "
                     f"({error.strerror}): this driver cannot be replaced")  # fmt: skip
            self._unrecorded = job, time.monotonic() + _RECORD_SECONDS
            with suppress(OSError):
                driver_file.remove_state(self._plan.run)  # it is out of date
            self._hub.set_order(None)
        else:
            if self._unrecorded is not None:
                _say("another host can replace this driver again")
            self._unrecorded = None
            self._hub.set_order(*_order(job))
        while not self._lease.held(_LOOK_SECONDS):
            pass  # this process exits if that lasts (run_files/ownership.py)

    def _wait_for_agents(self, hub: Hub) -> int | None:
        """Wait for all hosts, or for enough of them; return the exit code if the job ends here."""
        plan, began = self._plan, time.monotonic()

        def enough(slots: Mapping[str, int]) -> bool:
            all_here = len(slots) >= self._expected
            late = time.monotonic() - began > _GATHER_SECONDS
            return (all_here or late) and sum(slots.values()) >= plan.min_np

        while not hub.wait_for(enough, _LOOK_SECONDS):
            if self._signals:
                return EXIT_PREEMPTED  # nothing has begun
            if hub.misplaced:
                return EXIT_USER  # its agent says why
            if time.monotonic() - began > plan.wait:
                found = sum(hub.find_available_hosts_and_slots().values())
                _say(f"giving up: after {plan.wait:.0f} s the agents have {found} slots, and "
                     f"--min-np is {plan.min_np}")  # fmt: skip
                return EXIT_CRASH
        hosts = hub.find_available_hosts_and_slots()
        if len(hosts) < self._expected:
            _say(f"starting without {self._expected - len(hosts)} of {self._expected} hosts, whose "
                 f"agents have not responded for {_GATHER_SECONDS:.0f} s")  # fmt: skip
        return None

    # Signals: the first one, to any task, asks the ranks to save and end; a second one to the same
    # task, or Ctrl-C, ends the job at once.

    def _on_own_signal(self, number: int, frame: FrameType | None) -> None:
        self._on_signal("", number)

    def _on_signal(self, receiver: str, number: int) -> None:
        received = (number, receiver, time.monotonic())
        with self._signal_lock:
            self._signals.append(received)
            if self._driver is not None:
                self._driver.signal(*received)

    def _on_leave(self, host: str, processes: Sequence[int]) -> None:
        with self._signal_lock:
            if self._driver is not None:
                for number in processes:
                    self._driver.leave(number, "its agent is asked to end")


def _order(job: JobRecord | None) -> tuple[list[str], dict[str, list[int]] | None]:
    """Return the arguments of `Hub.set_order`: the hosts with ranks first, this one last."""
    ranks: dict[str, list[int]] = {}
    for process in job.processes if job is not None else ():
        if process["state"] == "running":
            ranks.setdefault(process["host"], []).append(process["number"])
    own = socket.gethostname()
    every = dict.fromkeys([*ranks, *(job.hosts if job is not None else ())])
    return sorted(every, key=lambda host: host == own), ranks or None


def _step_down(why: str) -> None:
    """Exit because this host may be cut off from others with ranks.

    Their agents then start a driver in their part of the network. If their hosts are dead, this
    host's agent starts a driver later.
    """
    _say(f"{why}: another host may replace this driver")
    flush(_EXIT_SECONDS)
    os._exit(EXIT_PREEMPTED)


def _addresses() -> list[str]:
    """Return this host's addresses, the one that other hosts reach most likely first."""
    _, address = interfaces.for_launcher(None, os.environ, [])
    return interfaces.addresses_from(address)


def _with_new_addresses(content: DriverFile) -> DriverFile:
    """Return the driver's file with addresses that this host has got since, first.

    None is removed: its link may be down for a moment only.
    """
    new = [address for address in _addresses() if address not in content.addresses]
    return replace(content, addresses=[*new, *content.addresses])


def _write(run: Path, content: DriverFile) -> None:
    try:
        driver_file.write(run, content)
    except OSError as error:
        raise UserError(f"{run / driver_file.NAME} cannot be written: {error.strerror}") from None


_say = partial(say, who="hvdtrain launch")
