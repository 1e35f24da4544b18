"""Elastic run inside one allocation, without ssh: its launcher starts one task per host.

Each task is its host's agent. The first task is also the driver: it holds the run, writes
RUN/.driver.json for the agents, and runs the elastic driver, which starts ranks through them.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer

from hvdtrain.agent import driver_file
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.agent.hub import Hub, Slot
from hvdtrain.agent.protocol import rendezvous_secret
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.rendezvous import RANKS
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.run_files.host_records import LAUNCH_VARIABLE
from hvdtrain.runtime import interfaces
from hvdtrain.runtime.environment import launched_local_rank, launched_rank, launched_size
from hvdtrain.runtime.machine import addresses_by_interface
from hvdtrain.runtime.signals import handle
from hvdtrain.supervise import run_progress
from hvdtrain.untrusted import printable_lines

# The first generation waits so long for agents of hosts that are late; they join later.
_GATHER_SECONDS = 15.0
_LOOK_SECONDS = 0.1
# A batch system sends signals in pairs, and to all tasks of a job.
_PAIR_SECONDS = 1.0
_AGENT_END_SECONDS = 15.0
_OUTPUT_END_SECONDS = 5.0
_WAITING_OUTPUT = 100_000  # pieces of output that wait for a slow terminal


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
    """

    min_np: int
    max_np: int | None
    slots: int | None
    wait: float
    driver_timeout: float
    train: Sequence[str]
    run: Path


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


def become_agent(plan: AllocationRun) -> NoReturn:
    """Replace this process by the agent of this host."""
    argv = _agent_command(plan)
    os.execv(argv[0], argv)


def _agent_command(plan: AllocationRun) -> list[str]:
    argv = [sys.executable, "-m", "hvdtrain.cli", "agent", "--run", str(plan.run)]
    argv += ["--wait", str(plan.wait)]
    return [*argv, "--slots", str(plan.slots)] if plan.slots else argv


# --- output of the ranks ----------------------------------------------------------------------


class _Output:
    """Prints the ranks' output in a thread: a terminal that is stopped must not stop the driver."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[str, str] | None] = queue.Queue(_WAITING_OUTPUT)
        self._thread = threading.Thread(target=self._print, name="output", daemon=True)
        self._thread.start()

    def put(self, number: int, stream: str, text: str) -> None:
        """Print lines as `hvdtrain launch` does: a rank's name precedes lines without one."""
        lines = []
        for line in text.splitlines(keepends=True):
            named = number == 0 or (stream == "stderr" and line.startswith("hvdtrain: "))
            lines.append(line if named else f"[{number}]<{stream}>:{line}")
        with suppress(queue.Full):
            self._queue.put_nowait((stream, "".join(lines)))

    def end(self) -> None:
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(_OUTPUT_END_SECONDS)

    def _print(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, text = item
            with suppress(OSError, ValueError):  # the reader is gone: training continues
                target = sys.stdout if stream == "stdout" else sys.stderr
                target.write(text)
                target.flush()


# --- driver -----------------------------------------------------------------------------------


class AllocationDriver:
    """The driver of a run in an allocation, in its first task."""

    def __init__(self, plan: AllocationRun, hosts: int) -> None:
        """`hosts`: number of tasks that the launcher started."""
        self._plan, self._expected = plan, hosts
        self._output = _Output()
        self._driver: ElasticDriver | None = None
        self._signals: dict[str, float] = {}  # its receiver -> time of the first signal
        self._killed_by: int | None = None
        self._signal_lock = threading.RLock()

    def run(self) -> int:
        """Run the job; return its exit code, with which all agents exit.

        Raises:
            UserError: another process supervises the run, or its directory cannot be written.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            handle(number, self._on_own_signal)
        plan, code = self._plan, EXIT_CRASH
        with run_progress.hold(plan.run):
            content = DriverFile([], 0, driver_file.new_secret(), driver_file.launch_identity())
            hub = Hub(
                content.key,
                plan.driver_timeout,
                plan.train,
                os.getcwd(),
                self._output.put,
                self._on_signal,
                _say,
            )
            _, address = interfaces.for_launcher(None, os.environ, [])
            every = [a for all_ in addresses_by_interface().values() for a in all_]
            addresses = list(dict.fromkeys([address, *every]))
            content = replace(content, addresses=addresses, port=hub.port)
            _write(plan.run, content)
            agent = subprocess.Popen(_agent_command(plan), stdin=subprocess.DEVNULL)
            try:
                code = self._drive(hub, content.key, agent)
            finally:
                with suppress(OSError):
                    driver_file.write(plan.run, replace(content, secret="", exit_code=code))
                hub.finish(code)
                _await(agent)
                self._output.end()
        return code

    def _drive(self, hub: Hub, secret: bytes, agent: subprocess.Popen[bytes]) -> int:
        plan = self._plan
        code = self._wait_for_agents(hub, agent)
        if code is not None:
            return code
        os.environ[LAUNCH_VARIABLE] = str(plan.run)  # the driver records what it shows about hosts
        rendezvous = RendezvousServer(0, rendezvous_secret(secret))
        driver = ElasticDriver(
            rendezvous, hub, plan.min_np, plan.max_np, timeout=max(1, round(plan.wait))
        )
        hub.on_hosts(driver.discover)
        port = rendezvous.start(driver.create_rendezvous_handler())
        hub.on_start(lambda slot, address: _environment(slot, address, port))
        driver.wait_for_available_slots(plan.min_np)
        slots = sum(hub.find_available_hosts_and_slots().values())
        driver.start_with(hub, min(slots, plan.max_np or slots))
        with self._signal_lock:
            self._driver = driver
            if self._signals:
                self._stop()
        ((code, _),) = driver.get_results().worker_results.values()
        driver.stop()
        return code

    def _wait_for_agents(self, hub: Hub, agent: subprocess.Popen[bytes]) -> int | None:
        """Wait for all hosts, or for enough of them; return the exit code if the job ends here."""
        plan, began = self._plan, time.monotonic()

        def enough(slots: Mapping[str, int]) -> bool:
            all_here = len(slots) >= self._expected
            late = time.monotonic() - began > _GATHER_SECONDS
            return (all_here or late) and sum(slots.values()) >= plan.min_np

        while not hub.wait_for(enough, _LOOK_SECONDS):
            if self._signals:
                return EXIT_PREEMPTED  # nothing has begun
            if agent.poll() is not None:
                return agent.returncode or EXIT_CRASH  # it has said why
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
        now = time.monotonic()
        with self._signal_lock:
            first = self._signals.setdefault(receiver, now)
            if number == signal.SIGINT or now - first > _PAIR_SECONDS:
                self._killed_by = number
            self._stop()

    def _stop(self) -> None:
        if self._driver is None:
            return
        if self._killed_by is not None:
            self._driver.kill(128 + self._killed_by)
        else:
            self._driver.request_stop()


def _environment(slot: Slot, address: str, port: int) -> dict[str, str]:
    """Return the variables by which a process finds the driver."""
    assert isinstance(slot, SlotInfo)
    numbers = {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in RANKS}
    return numbers | {
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_ELASTIC": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _write(run: Path, content: DriverFile) -> None:
    try:
        driver_file.write(run, content)
    except OSError as error:
        raise UserError(f"{run / driver_file.NAME} cannot be written: {error.strerror}") from None


def _await(agent: subprocess.Popen[bytes]) -> None:
    """Wait for this host's agent, which ends with the job."""
    try:
        agent.wait(_AGENT_END_SECONDS)
    except subprocess.TimeoutExpired:
        agent.kill()


def _say(message: str) -> None:
    print(f"hvdtrain launch: {printable_lines(message)}", file=sys.stderr, flush=True)
