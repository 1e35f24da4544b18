"""Elastic driver inside horovodrun: decides which processes run and in which generation.

Horovod's launcher loads the driver through the entry point horovod.elastic_driver and uses it for
hvdtrain's commands. The driver starts a process in a slot of a host. The states of a process:

    starting -> waiting -> running -> waiting -> running ... -> gone
                  |  requests its rank: POST /join/NUMBER
                  v
    a generation: all waiting processes get ranks once no process runs in the previous generation

    removed: excluded from the run (its host was taken away, or the process does not fit the run)
    spare:   waits, like a newcomer, until the processes suffice for another replica of the model
             (processes.py); a spare that has taken part before rejoins as a newcomer
    lost:    no rank waits for it any more, and its slot is not used while the process exists

When a rank is lost:

1. The driver detects the loss: the process exits, its heartbeats stop (failure_detector.py), its
   watchdog cannot kill it (POST /stuck/NUMBER), or the other ranks have waited too long for it.
2. The driver ends the generation: it clears the rendezvous and notifies the remaining ranks
   (OVER, see heartbeats.py), which abort their collectives.
3. The survivors request ranks and form the next generation at once.
4. Meanwhile the driver starts a process in the free slot. When that process is ready to train, it
   waits, rank 0 learns of it (GET /news/NUMBER), and all ranks form another generation at the
   next step boundary. No rank waits for a process to start, unless too few ranks are left.

A slot whose process died is used again after a pause, which grows while its processes keep dying
(processes.py); its host stays in use.

The job ends when a rank exits with a code on which all ranks agree (_FINAL), when a step fails
repeatedly (status.py), when ranks have failed more than --reset-limit times, or when fewer than
--min-np ranks, or too few for a replica, are left for the length of --elastic-timeout.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic import interfaces
from hvdtrain.elastic.command import starts_training
from hvdtrain.elastic.failure_detector import Silence
from hvdtrain.elastic.heartbeats import HeartbeatReceiver
from hvdtrain.elastic.processes import (
    HostList,
    Slots,
    TrainingProcess,
    assign,
    choose,
    describe,
    in_order,
    replica_size,
)
from hvdtrain.elastic.rendezvous import make_handler
from hvdtrain.elastic.status import RENDEZVOUS, TRAINING, Identity, ProcessStatus, StepFailures
from hvdtrain.errors import EXIT_CRASH, EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER
from hvdtrain.runtime.signals import handle
from hvdtrain.untrusted import printable_lines

# Seconds between discoveries: while ranks are missing, and while none is missing. Starting the
# script is most of its cost.
_DISCOVERY_SECONDS = (1.0, 5.0)
_LOOK_SECONDS = 0.25  # the driver also wakes when a process sends a request or ends
# New processes wait this long for each other, so that one rendezvous admits all of them.
_GATHER_SECONDS = 2.0
# Limits for a process that must leave while others wait for it, and for a process that is still
# there after the others have ended.
_LEAVE_SECONDS = 30.0
_END_SECONDS = 30.0
# How long the others wait for a process that still runs in a failed generation. This is longer
# than a watchdog needs for its verdict, so it applies if the watchdog or the host is lost.
_LAST_RESORT_SECONDS = 900.0
# A newcomer is refused after this many failed state transfers; the others continue to train.
_STATE_TRANSFERS = 2
_JOIN_SECONDS = 15.0  # for the threads of ended processes, at the end of the job
_END_OF_START_SECONDS = 1.0  # replaces _END_SECONDS if no generation was formed
_REPORT_SECONDS = 3.0  # from the start of the wait for slots to the first message about it
_DEFAULT_TIMEOUT = 600
_NO_GENERATION = -1
_FINAL = (0, EXIT_USER, EXIT_NOT_FINITE, EXIT_PREEMPTED)  # exit codes that the ranks agree on

CreateWorker = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]


class Results(NamedTuple):
    """Results that horovodrun reads at the end."""

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class ElasticDriver:
    """Elastic driver of one job, see the top of this file. Horovod's driver has the same arguments.

    Args:
        rendezvous: HTTP server through which the ranks of a generation find each other.
        discovery: find_available_hosts_and_slots() -> {host: slots}.
        min_num_proc, max_num_proc: the fewest and the most processes of a generation.
        timeout: seconds to wait for hosts while fewer than `min_num_proc` processes are left.
        reset_limit: generations after failures before the job ends.
        cooldown_range: (first, longest) pause in seconds before a slot is used again.
        verbose: 1 = print the longest heartbeat delay at the end.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        verbose: int = 0,
    ) -> None:
        self._rendezvous = rendezvous
        self._verbose = verbose
        self._min = min_num_proc
        self._max = max_num_proc or sys.maxsize
        self._timeout = timeout or int(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", _DEFAULT_TIMEOUT))
        self._reset_limit = reset_limit
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # For threads that wait for ranks: a thousand of them must not wake at each change.
        self._formed = threading.Condition(lock)
        self._hosts = HostList(discovery)
        self._slots = Slots(cooldown_range)
        self._processes: list[TrainingProcess] = []
        self._threads: list[threading.Thread] = []
        self._create: CreateWorker | None = None
        self._next_number = 0
        self._plan: list[SlotInfo] = []  # ranks of the current generation
        # Processes of the current generation that need the run's state from others.
        self._newcomers: list[TrainingProcess] = []
        self._generations = 0  # number of generations formed; the current one has the number before
        self._classified = 0  # number of generations whose end has been classified
        self._failures = StepFailures()
        self._identity: tuple[Identity, str] | None = None  # of the run, and its host
        self._job = secrets.randbits(62)  # unique to this job
        self._failed = False  # a process died since the last generation was formed
        self._failed_generations = 0  # see --reset-limit
        self._most_ranks = 0  # most ranks that have run at once so far
        self._short_since: float | None = None  # since when too few processes have been left
        # Ways to the end of the job. _stop_requested: the ranks write a checkpoint and end (signal,
        # or a host leaves). _ending: a rank has ended by agreement, the others follow. _shutdown:
        # all processes are killed. _finished: get_results returns.
        self._stop_requested = False
        self._signalled = False  # by a first SIGTERM or SIGUSR1; a second one kills
        self._ending: float | None = None  # since when the ranks have been ending by agreement
        self._shutdown_since: float | None = None  # since when processes have been killed
        self._heartbeats: HeartbeatReceiver | None = None
        self._silent: list[str] = []  # processes whose silence ended the last generation
        self._exit_code = 0
        self._results: dict[str, tuple[int, float]] = {}
        self._shutdown = threading.Event()
        self._finished = threading.Event()
        self._discoverer = threading.Thread(target=self._discover, daemon=True)
        self._discoverer.start()

    # --- what horovodrun calls --------------------------------------------

    @classmethod
    def serves(cls, command: Sequence[str]) -> bool:
        """Whether a command is hvdtrain's: only hvdtrain's processes request their ranks.

        HVDTRAIN_ELASTIC=1 marks a script that starts hvdtrain.
        """
        return starts_training(command) or os.environ.get("HVDTRAIN_ELASTIC") == "1"

    def create_rendezvous_handler(self) -> type:
        return make_handler(self)

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> HostList:
        """Wait until discovery finds `min_num_proc` slots; exit the launcher on a timeout."""
        began, said = time.monotonic(), ""
        with self._changed:
            while (count := self._hosts.count()) < max(1, min_num_proc):
                if self._shutdown.is_set():
                    sys.exit(EXIT_USER)  # discovery has printed the reason
                state = f"discovery finds {count} slots, and -np is {min_num_proc}"
                if time.monotonic() - began > self._timeout:
                    _say(f"error: after {self._timeout} s {state}")
                    sys.exit(EXIT_CRASH)
                if time.monotonic() - began > _REPORT_SECONDS and state != said:
                    _say(f"{state}: waiting for hosts")
                    said = state
                self._changed.wait(0.2)
            return self._hosts

    def choose_interfaces(
        self, said: Sequence[str] | None, env: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return the ranks' environment and this host's address, see `interfaces.for_launcher`."""
        with self._changed:
            return interfaces.for_launcher(said, env, list(self._hosts.slots))

    def register_shutdown_event(self) -> threading.Event:
        """Handle signals.

        On SIGTERM or SIGUSR1 the ranks write a checkpoint and end. A second signal, or SIGINT,
        ends them at once.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            handle(number, self._on_signal)
        return self._shutdown

    def start(self, num_proc: int, create_worker: CreateWorker) -> None:
        """Start `num_proc` processes and the driver's thread."""
        with self._changed:
            self._create = create_worker
            self._listen()
            self._start_processes(num_proc)
        threading.Thread(target=self._run, daemon=True).start()

    def _listen(self) -> None:
        """Listen for heartbeats; if the port is taken, timeouts alone detect failures."""
        try:
            secret = getattr(self._rendezvous, "secret", None) or ""
            self._heartbeats = HeartbeatReceiver(
                self._rendezvous._httpd.server_address[1], secret.encode()
            )
        except OSError as error:
            _say(f"heartbeats cannot be received: {error}")
            return
        self._heartbeats.listen(self)

    def get_results(self) -> Results:
        """Wait for the end of the job."""
        while not self._finished.wait(0.2):
            pass
        deadline = time.monotonic() + _JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return Results(None, self._results)

    def stop(self) -> None:
        self._shutdown.set()
        self._rendezvous.stop()

    # --- requests of processes, through rendezvous.py ----------------------

    def join(self, number: int, seconds: float, status: dict[str, Any]) -> dict[str, Any] | None:
        """Return the ranks of a process in the next generation; None: not yet, ask again.

        Args:
            status: the fields of a ProcessStatus.

        Returns:
            rank, size, local_rank, local_size, cross_rank, cross_size, job (a number unique to
            this job), generation and silent (the processes that fell silent in the last
            generation). With a rank of -1 the process does not take part any more; "reason" is
            present if the process itself is the cause. With "spare" the process waits for a
            later generation and must ask again.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            process = self._record_request(number)
            if process is None or self._ending is not None:
                return {"rank": -1}
            if process.state in ("starting", "running") and not process.assignment:
                process.status = ProcessStatus.of(status)
                if not self._refuse_if_different(process):
                    process.become("waiting")
                self._changed.notify_all()
            while not process.assignment and (left := deadline - time.monotonic()) > 0:
                self._formed.wait(left)
            assignment = process.assignment
            if process.state != "removed":  # the process asks again if the answer is lost
                process.assignment = {}
            return assignment or None

    def news(self, number: int) -> dict[str, bool]:
        """Return what the running ranks must know at their next step boundary.

        "stop": write a checkpoint and end. "hosts": processes wait to join or must leave.
        """
        with self._changed:
            self._record_request(number)
            return {"stop": self._stop_requested, "hosts": self._membership_changes()}

    def alive(self, number: int) -> None:
        """Record that a process is alive, although its heartbeats are not acknowledged."""
        with self._changed:
            self._record_request(number)

    def failed(self, number: int, message: str, step: int | None) -> None:
        """Record why a process is about to end; `step`: the step in which it raised an error."""
        with self._changed:
            process = self._record_request(number)
            if process is not None:
                process.failure, process.failed_step = message, step

    def replace(self, number: int, message: str) -> None:
        """Replace a healthy process, which ends, by a new one; its slot has not failed."""
        with self._changed:
            process = self._record_request(number)
            if process is not None and process.state == "running":
                process.become("removed")
                process.replaced = True
                _say(f"{process} is replaced by a new process: {message}")
                self._changed.notify_all()

    def leave(self, number: int, message: str) -> None:
        """Retire the host of a process before it is taken away.

        Its processes leave, as if discovery no longer found the host. If no process on another
        host has the state of the run, all ranks write a checkpoint and stop.
        """
        with self._changed:
            process = self._record_request(number)
            if process is None or process.leaving or self._stop_requested:
                return
            alive = self._alive()
            able = [p for p in alive if p.state != "removed"]
            # Before the first generation no process has a state to lose.
            holders = [p for p in able if p.first_generation is not None] or able
            if any(p.host != process.host and not p.leaving for p in holders):
                _say(f"{process.host} leaves: {message}")
                self._hosts.retire(process.host)
                for other in alive:
                    other.host_retired |= other.host == process.host
                    other.leave(other.leaving or other.host_retired)
            else:
                _say(f"the ranks write a checkpoint and stop: {process.host}: {message}")
                self._stop_requested = True
            self._changed.notify_all()

    def stuck(self, number: int, message: str) -> None:
        """Give up a process that hangs and that its watchdog cannot end."""
        with self._changed:
            process = next((p for p in self._processes if p.number == number), None)
            if process is not None and process.state == "lost":
                _say(f"{process} is still there: {message}")  # it fell silent earlier
            elif process is not None and process.state != "gone":
                self._give_up_process(process, message)
                self._changed.notify_all()

    def _record_request(self, number: int) -> TrainingProcess | None:
        """Record that a process is alive; return it, or None if the driver has given it up."""
        process = next((p for p in self._processes if p.number == number), None)
        if process is None or process.state in ("gone", "lost"):
            return None
        process.responded = True
        if self._heartbeats is not None:
            self._heartbeats.answered(number)
        return process

    def ranks_of(self, host: str, local_rank: int) -> str | None:
        """Return a slot's ranks in this generation in Horovod's own format, for its start."""
        with self._changed:
            for slot in self._plan:
                if (slot.hostname, slot.local_rank) == (host, local_rank):
                    return str(slot.to_response_string())
            return None

    # --- signals and discovery -----------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or self._signalled:
            self._exit_code = self._exit_code or 128 + number
            self._shutdown.set()
        self._stop_requested = self._signalled = True

    def _discover(self) -> None:
        first = True
        while not self._shutdown.is_set():
            try:
                found = self._hosts.find()
            except Exception as error:
                _say(f"{'error: ' * first}discovery failed: {error}")
                if first:
                    self._shutdown.set()
                    return
            else:
                first = False
                with self._changed:
                    self._take_over(found)
                    self._changed.notify_all()
            with self._changed:
                ranks = sum(p.state == "running" for p in self._processes)
                self._most_ranks = max(self._most_ranks, ranks)
                complete = self._generations > 0 and ranks == self._most_ranks
            self._shutdown.wait(_DISCOVERY_SECONDS[complete])

    def _take_over(self, found: dict[str, int]) -> None:
        changes = self._hosts.take_over(found)
        if changes:
            self._slots.release_refused()
        for change in changes:
            if self._generations:
                _say(change)
        for process in self._alive():
            missing = process.slot >= self._hosts.slots.get(process.host, 0)
            process.leave(process.host_retired or missing)

    # --- the driver's thread -------------------------------------------------

    def _run(self) -> None:
        """Check all processes at each change and every _LOOK_SECONDS; the driver's main thread."""
        while not self._finished.is_set():
            with self._changed:
                try:
                    self._check_processes()
                except Exception:  # a bug in the driver must not leave the job without one
                    _say(f"error in the elastic driver:\n{traceback.format_exc()}")
                    self._exit_code = self._exit_code or EXIT_CRASH
                    self._shutdown.set()
                    self._finished.set()
                self._changed.wait(_LOOK_SECONDS)

    def _check_processes(self) -> None:
        """Check all processes once: end overdue ones, start missing ones, form a generation."""
        alive = self._alive()
        if not alive:
            # If no process ended by agreement, the last ones were lost with their hosts.
            lost = self._ending is None and self._exit_code == 0
            self._finish(EXIT_CRASH if lost else self._exit_code)
            return
        if self._shutdown.is_set():
            self._shutdown_since = self._shutdown_since or time.monotonic()
            if time.monotonic() - self._shutdown_since > _END_SECONDS:
                self._finish(self._exit_code or EXIT_CRASH)  # still there although killed
            return
        if self._ending is not None:
            limit = _END_SECONDS if self._generations else _END_OF_START_SECONDS
            if time.monotonic() - self._ending > limit:
                self._shutdown.set()
            return
        self._end_overdue(alive)
        running = [p for p in alive if p.state == "running"]
        waiting = [p for p in alive if p.state == "waiting"]
        survivors = [p for p in waiting if p.first_generation is not None]
        if running:
            if not survivors:
                self._start_processes(self._max)
            return
        self._form_generation(waiting, survivors, [p for p in alive if p.state == "starting"])

    def _end_overdue(self, alive: list[TrainingProcess]) -> None:
        """End processes that others have waited for too long: the last resort.

        An ended process never takes part again: SIGTERM makes a rank ask all others to stop.
        """
        survivors = [p for p in alive if p.state == "waiting" and p.first_generation is not None]
        waited = max((p.lasted() for p in survivors), default=0.0)
        verdict_seconds = max((p.status.patience for p in survivors if p.status), default=0.0)
        for process in alive:
            overdue = waited > max(verdict_seconds, _LAST_RESORT_SECONDS)
            if process.leaving_since is not None:
                asked = time.monotonic() - process.leaving_since
                overdue |= min(waited, asked) > _LEAVE_SECONDS
            if process.state == "running" and overdue:
                self._give_up_process(process, f"the others have waited for it for {waited:.0f} s")
                process.end.set()
            elif process.state == "starting" and not process.responded:
                if process.lasted() > self._timeout:
                    self._give_up_process(process, f"it has not said a word for {self._timeout} s")
                    process.end.set()
            elif process.state == "removed" and process.lasted() > _END_SECONDS:
                process.end.set()

    # --- generations: formed, begun, ended -----------------------------------

    def _form_generation(
        self,
        waiting: list[TrainingProcess],
        survivors: list[TrainingProcess],
        starting: list[TrainingProcess],
    ) -> None:
        """Form a generation of the waiting processes if they suffice; no process is running.

        Args:
            survivors: processes in `waiting` that were in an earlier generation.
        """
        still_starting = any(p.lasted() < self._timeout for p in starting)
        within_timeout = all(p.lasted() < self._timeout for p in waiting)
        if still_starting and within_timeout and not survivors:
            return  # a first start, or all ranks died: waiting for all delays no training
        if self._classified < self._generations:
            self._classified = self._generations
            self._classify_failure(waiting)
            waiting = [p for p in waiting if p.state == "waiting"]
        if self._shutdown.is_set():
            return
        staying = [p for p in waiting if not p.leaving]
        taking_part = choose(staying, self._max)
        needed = max(self._min, replica_size(staying))
        if self._stop_requested and len(taking_part) < needed:
            self._exit_code = EXIT_PREEMPTED
            self._shutdown.set()
        elif len(taking_part) < needed:
            self._wait_for_more(len(staying), needed)
        elif self._reset_limit is not None and self._failed_generations > self._reset_limit:
            self._fail_job(f"ranks failed more than {self._reset_limit} times (--reset-limit)")
        else:
            for process in waiting:
                if process.leaving:
                    process.become("removed")
                    process.assignment = {"rank": -1}
            self._set_aside([p for p in staying if p not in taking_part])
            self._begin_generation(taking_part)

    def _wait_for_more(self, count: int, needed: int) -> None:
        """Start processes while too few are left; fail the job after --elastic-timeout."""
        why = "--min-np" if needed == self._min else "a replica of the model"
        if self._short_since is None:
            self._short_since = time.monotonic()
            _say(f"{count} ranks are left and {needed} are needed ({why}): waiting for hosts")
        self._start_processes(self._max)
        if time.monotonic() - self._short_since > self._timeout:
            self._fail_job(
                f"fewer than {needed} ranks for {self._timeout} s ({why}, --elastic-timeout)"
            )

    def _set_aside(self, spares: Sequence[TrainingProcess]) -> None:
        """Make processes spares: they wait until the spares suffice for another replica."""
        for process in spares:
            if process.first_generation is not None:
                process.first_generation = None
                if process.status is not None:
                    # It drops its pending step, and its generation's failure is already counted.
                    step = process.status.step
                    process.status = replace(process.status, failed=None, reachable_step=step)
                process.assignment = {"rank": -1, "spare": True}
        if spares:
            size = replica_size(spares)
            names = ", ".join(map(str, spares))
            _say(f"spare until there are {size} for a replica of the model: {names}")

    def _begin_generation(self, taking_part: list[TrainingProcess]) -> None:
        """Assign ranks to these processes, which `join` returns to them."""
        self._plan = plan = assign(taking_part)
        self._rendezvous.init(plan, self._generations)
        if self._heartbeats is not None:
            self._heartbeats.begin([process.number for process in taking_part])
        silent, self._silent = self._silent, []
        for slot_info, process in zip(plan, in_order(taking_part), strict=True):
            process.become("running")
            process.assignment = {
                "rank": slot_info.rank,
                "size": slot_info.size,
                "local_rank": slot_info.local_rank,
                "local_size": slot_info.local_size,
                "cross_rank": slot_info.cross_rank,
                "cross_size": slot_info.cross_size,
                "generation": self._generations,
                "silent": silent,
                "job": self._job,
            }
        if self._generations:
            count = Counter(process.host for process in taking_part)
            where = ", ".join(f"{host}:{ranks}" for host, ranks in count.items())
            _say(f"continuing with {len(plan)} ranks ({where})")
        standings = [(process, process.status) for process in in_order(taking_part)]
        trained = any(status is not None and status.trained for _, status in standings)
        self._newcomers = [
            p for p, status in standings if trained and not (status and status.trained)
        ]
        first, status = standings[0]
        if self._identity is None and status is not None:
            self._identity = status.identity, first.host
        for process in taking_part:
            if process.first_generation is None:
                process.first_generation = self._generations
        self._generations += 1
        self._failed_generations += self._failed
        self._failed = False
        self._short_since = None
        self._formed.notify_all()

    def _end_generation(self) -> None:
        """End the generation after the loss of a rank, so that no rank waits for a timeout."""
        # Ranks in the rendezvous would wait for the lost rank's addresses: they give up at once.
        self._rendezvous.init([], _NO_GENERATION)
        if self._heartbeats is not None:
            left = [p.number for p in self._processes if p.state == "running"]
            self._heartbeats.announce_over(left, self._generations - 1)

    def _membership_changes(self) -> bool:
        """Whether another generation should form: processes are ready to join, or must leave."""
        alive = self._alive()
        running = [p for p in alive if p.state == "running"]
        if not running:
            return False
        joining = [p for p in alive if p.state == "waiting" and p.first_generation is None]
        coming = any(p.state == "starting" for p in alive)
        ready = (
            len(choose([*running, *joining], self._max)) > len(running)
            and (not coming or max(p.lasted() for p in joining) > _GATHER_SECONDS)
        )  # fmt: skip
        return bool(ready) or any(p.leaving and p.state == "running" for p in alive)

    # --- failures of a generation, refused newcomers -------------------------

    def _classify_failure(self, waiting: list[TrainingProcess]) -> None:
        """Classify the end of a generation, once, by its ranks' reports of a failed phase."""
        said = [p.status for p in waiting if p.status is not None and p.status.failed]
        if not said:
            return
        phases = {status.failed for status in said}
        if self._newcomers and TRAINING not in phases:
            if not self._failed:
                self._count_failed_transfer(self._newcomers)
        elif phases != {RENDEZVOUS}:  # the ranks themselves limit failed rendezvous
            most_advanced = max(said, key=lambda status: status.step)
            reason = self._failures.generation(most_advanced.step, most_advanced.message)
            if reason:
                self._fail_job(reason)

    def _count_failed_transfer(self, newcomers: list[TrainingProcess]) -> None:
        """Count a failed state transfer; refuse newcomers that repeatedly do not get the state."""
        for process in newcomers:
            process.transfers_failed += 1
            if process.state == "waiting" and process.transfers_failed >= _STATE_TRANSFERS:
                times = process.transfers_failed
                self._refuse(process, f"the state of the run did not reach it {times} times", False)

    def _refuse_if_different(self, process: TrainingProcess) -> bool:
        """Refuse a newcomer whose configuration, data or device differs from the run's."""
        if process.first_generation is not None or self._identity is None or process.status is None:
            return False
        identity, host = self._identity
        problem = process.status.identity.differs_from(identity, host)
        if problem:
            self._refuse(process, f"on {process.host}: {problem}", for_good=True)
        return bool(problem)

    def _refuse(self, process: TrainingProcess, reason: str, for_good: bool) -> None:
        """Exclude a process that does not fit the run; its slot pauses."""
        pause = self._slots.refused(process, for_good)
        process.become("removed")
        process.assignment = {"rank": -1, "reason": reason}
        again = "when the hosts change" if for_good else f"in {pause:.0f} s"
        _say(f"{process} takes no part ({reason}); its slot is used again {again}")
        self._formed.notify_all()

    # --- start and loss of processes -----------------------------------------

    def _start_processes(self, most: int) -> None:
        """Start a process in each usable free slot, up to `most` processes in all."""
        taken = {(p.host, p.slot) for p in self._processes if p.state != "gone"}
        count = len(self._alive())
        for host, slots in self._hosts.slots.items():
            for slot in range(slots):
                free = (host, slot) not in taken and self._slots.usable(host, slot)
                if free and count < min(most, self._max):
                    count += 1
                    self._start_process(TrainingProcess(self._next_number, host, slot), count)
                    self._next_number += 1

    def _start_process(self, process: TrainingProcess, count: int) -> None:
        self._processes.append(process)
        # Ranks are assigned later; these numbers only identify the process (see TrainingProcess).
        slots = self._hosts.slots[process.host]
        slot_info = SlotInfo(process.host, process.number, process.slot, 0, count, slots, 1)

        def run() -> None:
            assert self._create is not None
            code, _ = self._create(slot_info, [self._shutdown, process.end])
            with self._changed:
                self._on_exit(process, code)
                self._changed.notify_all()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _on_exit(self, process: TrainingProcess, code: int) -> None:
        """Handle the end of a process: expected, by agreement, or a loss."""
        state, was_starting = process.state, process.state == "starting"
        pause = 0.0 if state == "removed" else self._slots.failed(process)
        process.become("gone")
        if self._heartbeats is not None:
            self._heartbeats.drop(process.number)
        if state in ("removed", "lost") or process.leaving or self._shutdown.is_set():
            if process.replaced and self._ending is None and not self._shutdown.is_set():
                self._start_processes(self._max)
            return
        # A newcomer, or a process with an error of its own, ends without agreement of the ranks.
        alone = (was_starting and self._generations) or process.failure
        agreed = code in _FINAL and not alone
        if agreed or self._ending is not None:
            self._ending = self._ending or time.monotonic()
            self._exit_code = self._exit_code or code
            return
        self._failed |= not was_starting
        why = describe(code) + (f": {process.failure}" if process.failure else "")
        _say(f"{process} ended ({why}); its slot is used again in {pause:.0f} s")
        if state == "running":
            self._end_generation()
        if not self._alive():
            self._exit_code = code
        if process.failed_step is not None:
            reason = self._failures.error(process.failed_step, process.failure)
            if reason:
                self._fail_job(reason)

    def _give_up_process(self, process: TrainingProcess, reason: str) -> None:
        """Give up a process that still exists: no rank waits for it any more."""
        was_running = process.state == "running"
        process.become("lost")
        failure = f"{process.failure}; " if process.failure else ""
        _say(
            f"{process} is not waited for any more ({failure}{reason}); its slot is not used "
            "while it is there"
        )
        if was_running:
            self._failed = True
            self._end_generation()

    def _alive(self) -> list[TrainingProcess]:
        return [p for p in self._processes if p.state not in ("gone", "lost")]

    # --- verdicts on heartbeats, see heartbeats.Listener ---------------------

    def on_silence(self, silence: Silence) -> bool:
        """Give up a process that was silent for too long; the others continue at once.

        The process is also ended as soon as it can be reached, because its state is unknown.

        Returns:
            Whether the process is given up.
        """
        with self._changed:
            process = self._process(silence)
            if process is None or process.state not in ("running", "waiting"):
                return False
            if self._ending is not None or self._shutdown.is_set():
                return False
            what = (
                f"fell silent: nothing heard for {silence.seconds:.2f} s (bound "
                f"{silence.bound:.2f} s, phi {silence.phi:.0f})"
            )
            self._silent.append(f"{process} {what}")
            # First notify the others: SIGTERM to a rank that is alive must not stop all of them.
            self._give_up_process(process, what)
            process.end.set()
            self._changed.notify_all()
            return True

    def on_return(self, silence: Silence) -> None:
        """Report that heartbeats of a process that was given up arrive again."""
        with self._changed:
            process = self._process(silence)
            if process is not None and process.state == "lost":
                _say(f"{process} is heard again after {silence.seconds:.2f} s; it is replaced")

    def on_lost_datagrams(self, silence: Silence) -> None:
        """Report that a process responds only over TCP."""
        with self._changed:
            process = self._process(silence)
            if process is not None and process.state in ("running", "waiting"):
                _say(
                    f"{process} answers over TCP, but no heartbeat (UDP) has arrived for "
                    f"{silence.seconds:.2f} s: until heartbeats arrive again, ssh and "
                    "elastic.timeout_seconds detect its failure"
                )

    def on_common_silence(self, seconds: float) -> None:
        """Report that processes fell silent all at once; 0 seconds: the silence is over."""
        with self._changed:
            if self._ending is not None or self._shutdown.is_set():
                return
            if seconds:
                _say(
                    f"heartbeats stopped all at once {seconds:.2f} s ago: the network of this host "
                    "may have failed, so no rank is ended"
                )
            else:
                _say("heartbeats: the common silence is over")

    def _process(self, silence: Silence) -> TrainingProcess | None:
        return next((p for p in self._processes if p.number == silence.number), None)

    # --- end of the job ------------------------------------------------------

    def _fail_job(self, reason: str) -> None:
        """End the job with an error, and kill all processes."""
        _say(f"error: {reason}")
        self._exit_code = self._exit_code or EXIT_CRASH
        self._shutdown.set()

    def _finish(self, code: int) -> None:
        """Report the exit code to horovodrun; the job is over."""
        if self._verbose and self._heartbeats is not None:
            detector = self._heartbeats.detector
            longest, phi = detector.longest, detector.phi
            _say(f"heartbeats: the longest delay was {longest:.2f} s (phi {phi:.0f})")
        self._results["job"] = (code if code >= 0 else 128 - code, time.time())
        self._finished.set()


def _say(message: str) -> None:
    print(f"hvdtrain: {printable_lines(message)}", file=sys.stderr, flush=True)
