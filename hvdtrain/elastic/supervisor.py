"""Starts a launcher on the hosts that answer, and again after a failure:

    while True:
        wait until enough hosts answer
        kill what an earlier start left on them
        start the launcher on them; training resumes from its newest checkpoint
        watch it: signals pass through, a host that falls silent ends it
        finished, preempted, or no use in trying again: the end

Nothing is kept but the run's own files, so the same command goes on from them anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from hvdtrain.elastic import run_files
from hvdtrain.elastic.discovery import Probe, answering
from hvdtrain.elastic.host_watch import ROUND_SECONDS, HostWatch
from hvdtrain.elastic.launcher import Launcher
from hvdtrain.elastic.policy import RestartPolicy
from hvdtrain.elastic.remains import VARIABLE, end_remains
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, EXIT_USER, UserError
from hvdtrain.launch import commands
from hvdtrain.launch.hostfile import Host

_TICK_SECONDS = 0.1
# Long enough for a busy host to answer, in two rounds.
_SILENT_SECONDS = 5.0
_STEADY_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """What to supervise.

    Args:
        controller: mpi starts mpirun, gloo an elastic horovodrun
        min_np: ranks without which nothing is started
        max_np: ranks at most; None: as many as there are slots
        max_restarts: without progress
        wait: seconds to wait for hosts with min_np slots
        hosts: reads which hosts there are; called again and again
        discovery: the argv that prints those that answer, for horovodrun
        probe: how a host is asked whether it answers
        train: the argv of a rank
        run: the run's folder, absolute: also the name under which its processes are found
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


@dataclass(frozen=True)
class _Ended:
    """How a start ended: `regrow` where that was to go on with more hosts."""

    code: int
    began: float
    last_lines: list[str]
    regrow: bool = False


class _Stop(Exception):
    """The supervisor itself is asked to end."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Supervisor:
    """One supervised run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._signals: list[int] = []
        self._listed: list[Host] = []

    def run(self) -> int:
        """Runs until the end; returns the exit code of the job.

        Raises:
            UserError: the run's folder cannot be used, or a launcher is not installed.
        """
        with run_files.hold(self._plan.run):
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._note)
            try:
                return self._supervise()
            except _Stop as stop:
                return stop.code

    def _supervise(self) -> int:
        plan = self._plan
        policy = RestartPolicy(plan.max_restarts, run_files.newest_step(plan.run))
        hosts, asked_at, code = self._living(), time.monotonic(), EXIT_CRASH
        while True:
            if _slots(hosts) < plan.min_np or time.monotonic() - asked_at > ROUND_SECONDS:
                hosts = self._wait_for_hosts(code)
            ended = self._one_start(hosts)
            code, ended_at = ended.code, time.monotonic()
            if self._signals:
                # Whether or not all could still save: the newest checkpoint is where it goes on.
                return code if code in (0, EXIT_USER) else EXIT_PREEMPTED
            before, hosts, asked_at = hosts, self._living(), time.monotonic()
            if ended.regrow and code == EXIT_PREEMPTED:
                continue
            gone = [host.name for host in before if host not in hosts]
            step = run_files.newest_step(plan.run)
            verdict = policy.after(code, step, host_lost=bool(gone))
            if verdict.wait is None:
                self._say_end(verdict.reason, step, ended)
                return code
            where = f"; {', '.join(gone)} does not answer" if gone else ""
            _say(f"exit code {code} after step {step}{where}; next start in {verdict.wait:.0f} s")
            self._pause(ended_at + verdict.wait - time.monotonic())

    def _wait_for_hosts(self, code: int) -> list[Host]:
        """The hosts that answer, as soon as they have `min_np` slots together."""
        deadline, said = time.monotonic() + self._plan.wait, -1
        while True:
            hosts = self._living()
            slots = _slots(hosts)
            if slots >= self._plan.min_np:
                return hosts
            if time.monotonic() > deadline:
                _say(
                    f"the end: after {self._plan.wait:.0f} s only {slots} slots answer "
                    f"({_text(hosts)}), and --min-np is {self._plan.min_np}"
                )
                raise _Stop(code)
            if slots != said:
                _say(
                    f"waiting for hosts: {slots} slots answer ({_text(hosts)}), "
                    f"--min-np is {self._plan.min_np}"
                )
                said = slots
            self._pause(1.0)

    def _living(self) -> list[Host]:
        return answering(self._hosts(), self._plan.probe, ROUND_SECONDS)

    def _hosts(self) -> list[Host]:
        """The hosts that there are now; a hostfile that is being edited counts as it was."""
        with contextlib.suppress(UserError):
            self._listed = self._plan.hosts()
        return self._listed

    def _one_start(self, hosts: Sequence[Host]) -> _Ended:
        plan = self._plan
        names = [host.name for host in hosts]
        for host in end_remains(names, str(plan.run)):
            _say(f"could not see on {host} whether an earlier start left processes")
        job = _fit(hosts, plan.max_np)
        step = run_files.newest_checkpoint(plan.run)
        _say(f"starting {_slots(job)} ranks on {_text(job)} from step {step}")
        began, env = time.time(), os.environ | {VARIABLE: str(plan.run)}
        try:
            launcher = Launcher(self._argv(job, env), env)
        except OSError as error:
            raise UserError(f"{error.filename} cannot be started: {error.strerror}") from None
        watch = HostWatch(job, self._hosts, plan.probe)
        try:
            code, regrow = self._watch(launcher, watch, job)
            return _Ended(code, began, launcher.last_lines(), regrow)
        except _Stop:
            launcher.end()
            end_remains(names, str(plan.run))
            raise
        finally:
            watch.stop()
            if launcher.poll() is None:
                launcher.end()

    def _argv(self, job: Sequence[Host], env: dict[str, str]) -> list[str]:
        plan, np = self._plan, _slots(job)
        if plan.controller == "mpi":
            return commands.mpirun_that_notices(np, plan.train, _text(job), env)
        most = plan.max_np or max(np, _slots(self._hosts()))
        return commands.elastic_horovodrun(np, plan.min_np, most, plan.discovery, plan.train)

    def _watch(self, launcher: Launcher, watch: HostWatch, job: Sequence[Host]) -> tuple[int, bool]:
        """Waits for the launcher's end; returns its exit code, and whether to grow is why."""
        began_at, regrow, passed_on = run_files.newest_step(self._plan.run), False, False
        while (code := launcher.poll()) is None:
            self._check_at_once()
            if self._signals and not passed_on:
                _say("asked to stop: the ranks write a checkpoint")
                launcher.send(signal.SIGUSR1)
                passed_on = True
            # An elastic launcher sees to its hosts itself.
            elif self._plan.controller == "mpi" and not passed_on:
                silent = watch.silent(_SILENT_SECONDS)
                if silent:
                    _say(f"{', '.join(silent)} does not answer: ending this start")
                    launcher.end()
                    return EXIT_CRASH, False
                if self._can_grow(watch, job, began_at):
                    _say("more hosts answer: the ranks write a checkpoint and start again")
                    launcher.send(signal.SIGUSR1)
                    regrow = passed_on = True
            time.sleep(_TICK_SECONDS)
        return code, regrow

    def _can_grow(self, watch: HostWatch, job: Sequence[Host], began_at: int) -> bool:
        ready = _slots(_fit(watch.steady(_STEADY_SECONDS), self._plan.max_np))
        return ready > _slots(job) and run_files.newest_step(self._plan.run) > began_at

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _check_at_once(self) -> None:
        """Ctrl-C, or a second signal: nothing is waited for."""
        if signal.SIGINT in self._signals or len(self._signals) > 1:
            raise _Stop(128 + self._signals[-1])

    def _pause(self, seconds: float) -> None:
        """Waits while nothing runs: asked to stop, there is nothing to save."""
        deadline = time.monotonic() + seconds
        while True:
            self._check_at_once()
            if self._signals:
                raise _Stop(EXIT_PREEMPTED)
            if time.monotonic() >= deadline:
                return
            time.sleep(_TICK_SECONDS)

    def _say_end(self, reason: str, step: int, ended: _Ended) -> None:
        if ended.code in (0, EXIT_PREEMPTED):
            _say(f"{reason} at step {step}")
            return
        words = run_files.last_words(self._plan.run, ended.began)
        lines = [f"  {line}" for line in [*words, *ended.last_lines]]
        _say("\n".join([f"the end, exit code {ended.code}: {reason}; its last words:", *lines]))


def _fit(hosts: Sequence[Host], most: int | None) -> list[Host]:
    """The hosts with `most` slots at most, taken in their order."""
    fitting, left = [], most if most is not None else _slots(hosts)
    for host in hosts:
        if left > 0:
            fitting.append(Host(host.name, min(host.slots, left)))
            left -= host.slots
    return fitting


def _slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots for host in hosts)


def _text(hosts: Sequence[Host]) -> str:
    return ",".join(map(str, hosts)) or "none"


def _say(message: str) -> None:
    print(f"hvdtrain launch: {message}", file=sys.stderr, flush=True)
