"""Supervisor of a run: start a launcher on the hosts that respond, and again after a failure.

    while True:
        wait until enough hosts respond
        kill processes that an earlier start left on them
        start the launcher on them; training resumes from its newest checkpoint
        watch it: forward signals; end it if a host is silent and no step is completed
        record what it shows about its hosts; a host with such records is used last
        stop if the run is finished or preempted, or a restart cannot help

The supervisor's only state is the run's own files, so the same command resumes the run anywhere.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

from hvdtrain.errors import AGREED_CODES, EXIT_CRASH, EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER
from hvdtrain.launch import commands, mpi
from hvdtrain.launch.discovery import Probe
from hvdtrain.launch.hostfile import Host, as_text, first_slots, total_slots
from hvdtrain.run_files import host_records
from hvdtrain.run_files.host_records import LAUNCH_VARIABLE, HostRecords
from hvdtrain.runtime.queued_output import say
from hvdtrain.runtime.signals import PAIR_SECONDS, handle, requests
from hvdtrain.supervise import host_evidence, run_progress
from hvdtrain.supervise.hosts import ROUND_SECONDS, HostWatch, KnownHosts, end_orphans
from hvdtrain.supervise.launcher import Launcher
from hvdtrain.supervise.policy import Pace, RestartPolicy
from hvdtrain.text import plural

# --- stop signals -------------------------------------------------------------
# A first signal requests an end with a checkpoint; Ctrl-C or a later signal, an end at once.


_TICK_SECONDS = 0.1


class Stop(Exception):
    """The supervisor ends now, with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StopRequests:
    """The received signals; the handler only records them."""

    def __init__(self) -> None:
        self._first: float | None = None  # time of the first one
        self._at_once = 0  # a signal that asks for an end at once

    def install(self) -> None:
        """Install the handlers; call it in the main thread."""
        for number in requests():
            handle(number, self._note)

    def __bool__(self) -> bool:
        return self._first is not None

    def tick(self) -> None:
        """Wait a moment while a launcher runs.

        Raises:
            Stop: the supervisor must end at once.
        """
        time.sleep(_TICK_SECONDS)
        if self._at_once:
            raise Stop(128 + self._at_once)

    def pause(self, seconds: float) -> None:
        """Wait while no launcher runs.

        Raises:
            Stop: a signal has arrived; there is nothing to save.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.tick()
            if self:
                raise Stop(EXIT_PREEMPTED)
            if time.monotonic() >= deadline:
                return

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first = self._first or now
        if number == signal.SIGINT or now - self._first > PAIR_SECONDS:
            self._at_once = number


# Long enough for a busy host to respond, in two rounds; then its silence is reported.
_SILENT_SECONDS = 5.0
_LOOK_SECONDS = 1.0  # between two reads of the run's files
_STEADY_SECONDS = 10.0
# Exclusion of a host that joined a run and made it fail.
_ASIDE_SECONDS = 300.0
# Of a launcher's last lines: shown to the user, and searched for the host of a killed rank.
_SHOWN_LINES, _EVIDENCE_LINES = 15, 60


@dataclass(frozen=True)
class SupervisedRun:
    """Configuration of a supervised run.

    Args:
        controller: mpi starts mpirun, gloo an elastic horovodrun
        min_np: fewest ranks of a start
        max_np: most ranks of a start; None: the number of slots
        max_restarts: restarts allowed without progress
        wait: seconds to wait for hosts with min_np slots
        hosts: reads the list of hosts; called repeatedly
        discovery: argv of a program that prints the hosts that respond, for horovodrun
        probe: probes whether a host responds
        train: argv of a rank
        run: run directory, absolute; also identifies the run's processes
        steps_known: the ranks write their steps there; False for a script without hvdtrain
    """

    controller: Literal["mpi", "gloo"]
    min_np: int
    max_np: int | None
    max_restarts: int
    wait: float
    hosts: Callable[[], list[Host]]
    discovery: Sequence[str]
    probe: Probe
    train: Sequence[str]
    run: Path
    steps_known: bool = True


@dataclass(frozen=True)
class _Ended:
    """End of a start.

    Args:
        job: the hosts on which it ran
        began: unix time of the start
        code: its exit code
        last_lines: last lines of the launcher's error output
        regrow: it was ended to continue with more hosts
    """

    job: list[Host]
    began: float
    code: int
    last_lines: list[str]
    regrow: bool


class Supervisor:
    """One supervised run."""

    def __init__(self, plan: SupervisedRun) -> None:
        """Read the hosts and detect the MPI.

        Raises:
            UserError: as `plan.hosts`, or mpirun is missing or unknown.
        """
        self._plan = plan
        self._mpi = mpi.of_launcher() if plan.controller == "mpi" else None
        self._hosts = KnownHosts(plan.hosts, plan.probe)
        self._proven: set[str] = set()  # hosts of the latest start that made steps
        self._requests = StopRequests()
        self._directory = os.getcwd()  # it may be deleted later
        self._records = HostRecords(plan.run, _say)
        self._suspects_said: set[str] = set()

    def run(self) -> int:
        """Supervise the run until its end; return the exit code of the job.

        Raises:
            UserError: the run directory cannot be used, or a launcher is not installed.
        """
        if self._mpi is not None:
            for what in mpi.lacking(self._mpi):
                _say(f"{self._mpi.title}: {what}")
        with run_progress.hold(self._plan.run):
            self._requests.install()
            self._records.load()
            try:
                return self._supervise()
            except Stop as stop:
                return stop.code
            finally:
                self._say_suspects([host.name for host in self._hosts.listed()], ())
                self._records.flush()

    def _supervise(self) -> int:
        plan = self._plan
        policy = RestartPolicy(
            plan.max_restarts, run_progress.newest_step(plan.run), plan.steps_known
        )
        hosts, asked_at, code = self._hosts.reachable(ROUND_SECONDS), time.monotonic(), EXIT_CRASH
        while True:
            if total_slots(hosts) < plan.min_np or time.monotonic() - asked_at > ROUND_SECONDS:
                hosts = self._wait_for_hosts(code)
            ended = self._one_start(hosts)
            code, ended_at = ended.code, time.monotonic()
            self._learn(ended)
            if self._requests:
                # Preempted even if the ranks could not save: the newest checkpoint is the state.
                self._say_unsaved(code)
                return code if code in (0, EXIT_USER, EXIT_NOT_FINITE) else EXIT_PREEMPTED
            if run_progress.made_steps(plan.run, ended.began):
                self._proven = {host.name for host in ended.job}
            hosts, asked_at = self._hosts.reachable(ROUND_SECONDS), time.monotonic()
            if ended.regrow and code == EXIT_PREEMPTED:
                continue
            step, blamed = run_progress.newest_step(plan.run), self._blame(ended, hosts)
            verdict = policy.after(code, step, bool(blamed))
            if isinstance(verdict, str):
                self._say_end(verdict, step, ended)
                return code
            hosts = [host for host in hosts if host.name not in blamed]
            because = "".join(f"; {name} {why}" for name, why in blamed.items())
            after = f" after step {step}" if plan.steps_known else ""
            _say(f"exit code {code}{after}{because}; restarting in {verdict:.0f} s")
            self._requests.pause(ended_at + verdict - time.monotonic())

    def _blame(self, ended: _Ended, reachable: Sequence[Host]) -> dict[str, str]:
        """Return the hosts that caused a failure, and why; empty if training itself failed.

        Hosts that joined a run which worked without them are excluded, if it can continue so.
        """
        names = {host.name for host in ended.job}
        blamed = dict.fromkeys(sorted(names - {h.name for h in reachable}), "does not respond")
        listed = {host.name for host in self._hosts.listed()}
        for name in blamed if self._plan.controller == "mpi" else ():
            if name in listed:  # it was not taken out of the list
                self._records.add(name, host_records.SILENT)
        if self._proven and not names <= self._proven and not blamed:
            others = [host for host in reachable if host.name in self._proven]
            if total_slots(others) >= self._plan.min_np:
                blamed = dict.fromkeys(sorted(names - self._proven), "is excluded for a while")
                self._hosts.exclude(blamed, _ASIDE_SECONDS)
        return blamed

    def _wait_for_hosts(self, code: int) -> list[Host]:
        """Wait for hosts with `min_np` slots in all; return all hosts that respond."""
        deadline, logged = time.monotonic() + self._plan.wait, ""
        while True:
            hosts = self._hosts.reachable(ROUND_SECONDS)
            if total_slots(hosts) >= self._plan.min_np:
                return hosts
            state = f"{as_text(hosts) or 'no host'} responds, and --min-np is {self._plan.min_np}"
            if time.monotonic() > deadline:
                _say(f"giving up: after {self._plan.wait:.0f} s only {state}")
                raise Stop(code)
            if state != logged:
                _say(f"waiting for hosts: only {state}")
                logged = state
            self._requests.pause(1.0)

    def _one_start(self, hosts: Sequence[Host]) -> _Ended:
        plan = self._plan
        names = [host.name for host in hosts]
        for host in end_orphans(names, str(plan.run)):
            _say(f"could not check on {host} whether an earlier start left processes")
        preferred = self._preferred(hosts)
        self._say_suspects(names, [host.name for host in preferred])
        job = first_slots(preferred, plan.max_np or total_slots(hosts))
        since = f" from step {run_progress.newest_checkpoint(plan.run)}" if plan.steps_known else ""
        _say(f"starting {plural(total_slots(job), 'rank')} on {as_text(job)}{since}")
        began, env = time.time(), os.environ | {LAUNCH_VARIABLE: str(plan.run)}
        env[mpi.HOSTS_VARIABLE] = as_text(job) if plan.controller == "mpi" else ""
        launcher = Launcher(self._argv(job, env), env, self._directory)
        # An elastic launcher watches its hosts itself.
        watched = (job, self._hosts.listed) if plan.controller == "mpi" else ([], list)
        watch = HostWatch(*watched, plan.probe)
        try:
            code, regrow = self._watch(launcher, watch, job)
            if self._mpi is not None:
                code = mpi.exit_code(self._mpi, code)
            return _Ended(job, began, code, launcher.last_lines(_EVIDENCE_LINES), regrow)
        except BaseException:
            launcher.end()
            end_orphans(names, str(plan.run))
            raise
        finally:
            watch.stop()

    def _argv(self, job: Sequence[Host], env: dict[str, str]) -> list[str]:
        plan, np = self._plan, total_slots(job)
        if plan.controller == "mpi":
            return commands.mpirun_with_failure_detection(np, plan.train, as_text(job), env)
        return commands.elastic_horovodrun(np, plan.min_np, plan.max_np, plan.discovery, plan.train)

    def _preferred(self, hosts: Sequence[Host]) -> list[Host]:
        """Return the hosts without those that are avoided; suspect ones, if needed, come last."""
        slots = {host.name: host.slots for host in hosts}
        suspects, plan = self._records.suspects(slots), self._plan
        left_out = host_records.avoided(slots, suspects, plan.min_np, plan.max_np or sys.maxsize)
        used = [host for host in hosts if host.name not in left_out]
        return sorted(used, key=lambda host: suspects.get(host.name, 0.0))

    def _say_suspects(self, names: Sequence[str], used: Collection[str]) -> None:
        """Report each suspect host once: why, and whether it is used; empty `used`: at the end."""
        suspects = [n for n in self._records.suspects(names) if n not in self._suspects_said]
        self._suspects_said |= {*suspects}
        for name in suspects:
            state = "is suspect" if not used else "is avoided while other hosts suffice"
            if name in used:
                state = "is suspect, but its slots are needed"
            _say(f"{name} {state}: {self._records.summary(name)}")
        if option := host_records.exclusion(suspects):
            _say(f"for the next job: sbatch {option}")

    def _learn(self, ended: _Ended) -> None:
        """Record what a start shows about its hosts, unless it was asked to stop."""
        run = self._plan.run
        found = host_evidence.in_files(run, ended.began)
        self._records.load()  # an elastic launcher has recorded lost ranks
        agreed = AGREED_CODES if self._plan.steps_known else (0, EXIT_USER)
        failed = not self._requests and ended.code not in agreed
        if self._plan.controller == "mpi" and failed:
            found += host_evidence.of_failure(run, ended.began, "\n".join(ended.last_lines))
        known = {
            (one.host, one.cause) for one in self._records.incidents() if one.time >= ended.began
        }
        for host, cause, detail in found:
            if (host_records.host_key(host), cause) not in known:
                self._records.add(host, cause, detail)

    def _watch(self, launcher: Launcher, watch: HostWatch, job: Sequence[Host]) -> tuple[int, bool]:
        """Wait for the launcher's end; return its exit code, and whether it ended to add hosts."""
        began_at, regrow, asked = run_progress.newest_step(self._plan.run), False, False
        pace, looked, reported = Pace(time.monotonic(), began_at), time.monotonic(), False
        while (code := launcher.poll()) is None:
            if self._requests and not asked:
                known = self._plan.steps_known
                _say(f"asked to stop: the ranks {'are to save' if known else 'get SIGUSR1'}")
                launcher.send(signal.SIGUSR1)
                asked = True
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                pace.saw(now, run_progress.newest_step(self._plan.run))
            silent = watch.silent(_SILENT_SECONDS)
            if silent and not reported:
                while_ = " while steps are completed" if self._plan.steps_known else ""
                _say(f"no response from {', '.join(silent)}; the run continues{while_}")
            reported = bool(silent)
            seconds = pace.stall_seconds(saving=asked)
            # Without steps a probe alone would decide, which may be wrong: mpirun decides.
            stalled = self._plan.steps_known and pace.stalled(now, saving=asked)
            if stalled and (lost := watch.silent(seconds)):
                _say(f"no response from {', '.join(lost)} and no step for {seconds:.0f} s")
                launcher.kill()  # it would wait for the silent hosts
                return EXIT_CRASH, False
            if not asked and self._can_grow(watch, job, began_at):
                _say("more hosts respond: the ranks write a checkpoint and restart")
                launcher.send(signal.SIGUSR1)
                regrow = asked = True
            self._requests.tick()
        return code, regrow

    def _can_grow(self, watch: HostWatch, job: Sequence[Host], began_at: int) -> bool:
        hosts = watch.steady(_STEADY_SECONDS)
        if total_slots(hosts) <= total_slots(job):
            return False
        steady = total_slots(self._preferred(hosts))
        ready = min(steady, self._plan.max_np or steady)
        return ready > total_slots(job) and run_progress.newest_step(self._plan.run) > began_at

    def _say_unsaved(self, code: int) -> None:
        """Say if ranks that were asked to save ended first: a batch system may kill mpirun."""
        if self._plan.steps_known and code not in AGREED_CODES:
            step = run_progress.newest_step(self._plan.run)
            saved = run_progress.newest_checkpoint(self._plan.run)
            if saved < step:
                _say(
                    f"the ranks ended with exit code {code} before they had saved step {step}: "
                    f"the run resumes after step {saved}"
                )

    def _say_end(self, reason: str, step: int, ended: _Ended) -> None:
        known = self._plan.steps_known
        if ended.code == 0 or (known and ended.code == EXIT_PREEMPTED):
            _say(f"{reason} at step {step}" if known else reason)
            return
        words = run_progress.last_errors(self._plan.run, ended.began)
        lines = [f"  {line}" for line in [*words, *ended.last_lines[-_SHOWN_LINES:]]]
        message = f"ended with exit code {ended.code}: {reason}"
        _say("\n".join([f"{message}; its last output:", *lines]) if lines else message)


_say = partial(say, who="hvdtrain launch")
