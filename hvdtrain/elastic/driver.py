"""Elastic driver: starts and ends processes, and forms their generations.

It runs inside horovodrun (horovodrun.py), `hvdtrain launch` (supervise/allocation.py), or a process
that replaces the driver of `hvdtrain launch` (supervise/successor.py). Processes, agents and
discovery report events, which change the state of the job (`JobState`). After an event, and as time
passes, the driver calls `decide` (decisions.py), and performs the actions that it returns (`_act`,
`_perform`).

When a rank is lost:

1. The driver detects the loss: the process exits (`_on_exit`), its host falls silent
   (`_on_silence`, agent/failure_detector.py), its watchdog cannot kill it (`stuck`), or the other
   ranks have waited too long for it (GiveUpProcess).
2. EndGeneration: the driver clears the rendezvous and notifies the remaining ranks through their
   agents; they abort their collectives.
3. The survivors request new ranks (`join`). FormGeneration: they form the next generation at once.
4. StartProcess: after the slot's pause, usually while the survivors already train again, the driver
   starts a process in the free slot. When that process is ready to train, it waits, rank 0 learns
   of it (`news`), and all ranks form another generation at the next step boundary. No rank waits
   for a process to start, unless too few ranks are left.

A slot whose process died is used again after a pause, which grows while its processes keep dying
(processes.py); its host stays in use. Under `hvdtrain launch` the driver records such incidents. No
process is started on a host with many of them while other hosts suffice (host_records.py).

The job ends when a rank exits with a code on which all ranks agree, when a step fails repeatedly
(status.py), when ranks have failed more than --reset-limit times, when no process is left, or when
fewer than --min-np ranks, or too few for a replica, are left for the length of --elastic-timeout.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.agent.hub import Hub
from hvdtrain.elastic import job_record
from hvdtrain.elastic.decisions import (
    Action,
    EndGeneration,
    EndJob,
    EndProcess,
    FormGeneration,
    JobState,
    MakeSpares,
    RemoveProcess,
    ReportResult,
    StartProcess,
    decide,
    has_membership_changes,
    start_processes,
)
from hvdtrain.elastic.job_record import JobRecord
from hvdtrain.elastic.processes import (
    Slots,
    TrainingProcess,
    assign,
    find_hosts,
    reported_places,
)
from hvdtrain.elastic.rendezvous import RANKS
from hvdtrain.elastic.status import ProcessStatus
from hvdtrain.errors import EXIT_CRASH, EXIT_USER
from hvdtrain.run_files.host_records import LAUNCH_VARIABLE, HostRecords
from hvdtrain.runtime import interfaces
from hvdtrain.runtime.queued_output import say
from hvdtrain.runtime.signals import PAIR_SECONDS, handle, requests

# Seconds between discoveries (below full size, at full size); running the discovery script
# dominates the cost.
_DISCOVERY_SECONDS = (1.0, 5.0)
_MAX_BACKOFF_SECONDS = 0.1
_POLL_SECONDS = 0.25  # some actions become due without an event
_REPORT_SECONDS = 3.0  # from the start of the wait for slots to the first message about it
_DEFAULT_TIMEOUT = 600
_NO_GENERATION = -1
_EXCLUDED: dict[str, Any] = {"rank": -1}
_UNFINISHED = "the script has ended in another process, so this one cannot finish it"
_SPARE = {"rank": -1, "spare": True}


class ElasticDriver:
    """Elastic driver of one job, see the top of this file.

    Under `hvdtrain launch` without hosts the driver holds a lease, and records the job for a driver
    that replaces it.

    Args:
        rendezvous: RequestServer, through which the ranks of a generation find each other.
        discovery: find_available_hosts_and_slots() -> {host: slots}.
        min_num_proc, max_num_proc: the fewest and the most processes of a generation.
        timeout: seconds to wait for hosts while fewer than `min_num_proc` processes are left.
        reset_limit: failed generations that the job tolerates; None: any number.
        cooldown_range: (first, longest) pause in seconds before a slot is used again.
        verbose: 1 = print the longest heartbeat delay at the end.
        horovod_script: see JobState.

    Attributes:
        may_act: whether this driver may decide now: whether its lease, if it has one, is valid.
        record: keeps the record of the job; called before anything that the record must contain.
    """

    may_act: Callable[[], bool] = staticmethod(lambda: True)
    record: Callable[[JobRecord], None] = staticmethod(lambda _: None)

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
        horovod_script: bool = False,
    ) -> None:
        self._rendezvous = rendezvous
        self._discovery = discovery
        self._verbose = verbose
        self._state = JobState(
            min_np=min_num_proc,
            max_np=max_num_proc or sys.maxsize,
            timeout=timeout or int(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", _DEFAULT_TIMEOUT)),
            slots=Slots(cooldown_range),
            reset_limit=reset_limit,
            horovod_script=horovod_script,
        )
        self._changed = threading.Condition()  # of the state
        self._answers: dict[int, dict[str, Any]] = {}  # process -> answer that it has not received
        self._hub: Hub | None = None
        self._hosts: list[str] = []  # of each rank of the current generation
        self._job = secrets.randbits(62)  # unique to this job
        self._most_ranks = 0  # most ranks that have run at once so far
        self._signals: dict[str, float] = {}  # receiver -> time of its first signal
        self._silent: list[str] = []  # processes whose silence ended the last generation
        self._witnesses: frozenset[str] = frozenset()
        run = os.environ.get(LAUNCH_VARIABLE)
        self._records = HostRecords(Path(run), say) if run else None
        self._exit_code = EXIT_CRASH
        self._shutdown = threading.Event()  # all processes are killed
        self._finished = threading.Event()  # wait returns
        self._hosts_changed = threading.Event()  # wakes the discoverer
        self._discoverer = threading.Thread(target=self._discover, daemon=True)
        self._discoverer.start()

    # --- interface for launchers -------------------------------------------

    def wait_for_available_slots(self, min_num_proc: int) -> None:
        """Wait until discovery finds `min_num_proc` slots; exit the launcher on a timeout."""
        began, reported = time.monotonic(), ""
        with self._changed:
            while (count := self._state.hosts.count()) < max(1, min_num_proc):
                if self._shutdown.is_set():
                    sys.exit(EXIT_USER)  # discovery has printed the reason
                found = f"discovery finds {count} slots, and -np is {min_num_proc}"
                if time.monotonic() - began > self._state.timeout:
                    say(f"error: after {self._state.timeout} s {found}")
                    sys.exit(EXIT_CRASH)
                if time.monotonic() - began > _REPORT_SECONDS and found != reported:
                    say(f"{found}: waiting for hosts")
                    reported = found
                self._changed.wait(0.2)

    def choose_interfaces(
        self, names: Sequence[str] | None, env: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return the ranks' environment and this host's address, see `interfaces.for_launcher`."""
        with self._changed:
            return interfaces.for_launcher(names, env, list(self._state.hosts.slots))

    def handle_signals(self) -> None:
        """Handle the signals that this process receives, see `signal`."""
        for number in requests():
            handle(number, lambda number, _: self.signal(number))

    def start(self, hub: Hub, num_proc: int) -> None:
        """Start `num_proc` processes through the hub, and the driver's thread."""
        with self._changed:
            self._attach(hub)
            now = time.monotonic()
            actions = start_processes(self._state, num_proc, now)
            self._record(actions)
            for action in actions:
                self._perform(action, now)
        threading.Thread(target=self._run, daemon=True).start()

    def take_over(self, hub: Hub, found: JobRecord) -> None:
        """Continue a job that another driver began; nothing changes for its ranks."""
        with self._changed:
            self._job = found.job
            job_record.restore(found, self._state, time.monotonic())
            self._attach(hub)
            if ranks := self._state.alive("running"):
                self._set_plan(assign(ranks), found.generations - 1)
        threading.Thread(target=self._run, daemon=True).start()

    def state_is_elsewhere(self, lost_hosts: Collection[str]) -> bool:
        """Whether only lost hosts may have the state of the run.

        Hosts without ranks of the current generation do not: it continued without them.
        """
        with self._changed:
            alive = self._state.alive()
            holders = any(process.first_generation is not None for process in alive)
            if holders or self._state.generations == 0 or self._state.ending:
                return False
            return not set(lost_hosts).isdisjoint(self._hosts)

    def can_continue_on(self, hosts: Set[str]) -> bool:
        """Whether enough processes that have the state of the run are on these hosts.

        Before the first generation any host can begin the run.
        """
        with self._changed:
            if hosts and self._state.generations == 0:
                return True
            able = [p for p in self._state.alive("waiting", "running") if p.host in hosts]
            return sum(p.first_generation is not None for p in able) >= self._state.min_np

    def undisturbed(self) -> bool:
        """Whether all ranks of the current generation run and need nothing from the driver."""
        with self._changed:
            alive = self._state.alive()
            running = all(process.state == "running" for process in alive)
            return running and len(alive) == len(self._hosts)

    def exited(self, number: int, code: int) -> None:
        """Record the end of a process that another driver started."""
        self._on_exit(self._state.processes[number], code)

    def _attach(self, hub: Hub) -> None:
        self._hub = hub
        hub.on_silence = self._on_silence

    @property
    def _agents(self) -> Hub:
        assert self._hub is not None
        return self._hub

    def has_ended(self, seconds: float) -> bool:
        """Wait for the end of the job, at most `seconds`; return whether it has ended."""
        return self._finished.wait(seconds)

    def wait(self) -> int:
        """Wait for the end of the job; return its exit code."""
        while not self.has_ended(0.2):
            pass
        if self._records is not None:
            self._records.flush()
        return self._exit_code

    def stop(self) -> None:
        self._end_all()
        self._rendezvous.stop()

    def discover(self) -> None:
        """Run a discovery soon: the hosts have changed."""
        self._hosts_changed.set()

    def signal(self, number: int, receiver: str = "", at: float | None = None) -> None:
        """Ask the ranks to write a checkpoint and end: a signal was received.

        SIGINT, or a later signal to the same receiver, ends all processes at once.

        Args:
            receiver: host of the agent that has received it; "": this process.
            at: time.monotonic() of the signal; default: now.
        """
        at = at or time.monotonic()
        first = self._signals.setdefault(receiver, at)
        if number == signal.SIGINT or at - first > PAIR_SECONDS:
            with self._changed:
                self._kill(128 + number)
        self._state.stop_requested = True

    # --- the driver's thread -------------------------------------------------

    def _run(self) -> None:
        """Act when a process requests ranks or the hosts change, and every _POLL_SECONDS."""
        while not self._finished.is_set():
            with self._changed:
                began = time.thread_time()
                self._act()
                took = time.thread_time() - began
                self._changed.wait(_POLL_SECONDS)
            # With thousands of processes a decision takes a while; their requests, which come one
            # after another, must not each cause one.
            time.sleep(min(took, _MAX_BACKOFF_SECONDS))

    def _act(self) -> None:
        """Perform the actions that are due."""
        try:
            self._set_witnesses()
            if not self.may_act():
                return
            self._record_incidents()
            while not self._finished.is_set():
                now = time.monotonic()
                actions = decide(self._state, now)
                self._record(actions)
                for action in actions:
                    self._perform(action, now)
                if not actions:
                    return
        except Exception:  # a bug in the driver must not leave the job without one
            say(f"error in the elastic driver:\n{traceback.format_exc()}")
            self._kill(EXIT_CRASH)
            self._finish(self._state.exit_code)

    def _set_witnesses(self) -> None:
        """Notify the hub of the hosts whose processes can continue the run without other hosts."""
        alive = self._state.alive("waiting", "running")
        hosts = frozenset(p.host for p in alive if p.first_generation is not None)
        if hosts != self._witnesses:
            self._witnesses = hosts
            self._agents.set_witnesses(hosts)

    def _record(self, actions: Sequence[Action]) -> None:
        """Record processes that are about to be started."""
        if starts := [action for action in actions if isinstance(action, StartProcess)]:
            self.record(job_record.record(self._job, self._state, starts))

    def _record_incidents(self) -> None:
        if self._records is not None and self._state.incidents:
            for incident in self._state.incidents:
                self._records.add(*incident)
            self._find_suspects(self._records, named=False)
        self._state.incidents.clear()

    def _find_suspects(self, records: HostRecords, named: bool) -> None:
        """Update the suspect hosts; `hvdtrain launch` has named those that were known before."""
        before = self._state.suspects
        self._state.suspects = records.suspects(self._state.hosts.slots)
        for host in () if named else self._state.suspects:
            if host not in before:
                say(f"{host} is used last from now on: {records.summary(host)}")

    def _perform(self, action: Action, now: float) -> None:
        if action.message:
            say(action.message)
        self._state.apply(action, now)
        match action:
            case StartProcess():
                self._start_process(action)
            case EndProcess(number):
                self._agents.end(number)
            case RemoveProcess(number, refused):
                reason = {"reason": refused} if refused else {}
                self._answer({number: _EXCLUDED | reason})
            case MakeSpares(numbers):
                self._answer({n: _SPARE for n in numbers if self._state.processes[n].spare})
            case FormGeneration():
                self.record(job_record.record(self._job, self._state))
                self._begin_generation(action)
            case EndGeneration(generation):
                # Ranks in the rendezvous would wait for the lost rank's addresses.
                self._rendezvous.init([], _NO_GENERATION)
                self._agents.end_generation(generation)
            case EndJob():
                self._end_all()
            case ReportResult(exit_code):
                self._finish(exit_code)

    def _start_process(self, action: StartProcess) -> None:
        # Ranks are assigned later; these numbers only identify the process (see TrainingProcess).
        slots = self._state.hosts.slots[action.host]
        slot_info = SlotInfo(action.host, action.number, action.slot, 0, action.size, slots, 1)
        process = self._state.processes[action.number]
        self._agents.start(slot_info, lambda code: self._on_exit(process, code))

    def _on_exit(self, process: TrainingProcess, code: int) -> None:
        with self._changed:
            self._act_on(self._state.exited(process, code, time.monotonic()))

    def _begin_generation(self, action: FormGeneration) -> None:
        """Give processes their ranks, which `join` returns to them."""
        self._set_plan(action.plan, action.number)
        answers: dict[int, dict[str, Any]] = {}
        places = reported_places([self._state.processes[number] for number in action.processes])
        for slot, number in zip(action.plan, action.processes, strict=True):
            answers[number] = {
                **{name: getattr(slot, name) for name in RANKS},
                "generation": action.number,
                "silent": self._silent,
                "job": self._job,
            }
            if places and slot.local_rank == 0:
                answers[number]["places"] = places
            if self._state.processes[number].spare:
                answers[number]["spare"] = True
        self._silent = []
        self._answer(answers)

    def _set_plan(self, plan: Sequence[SlotInfo], generation: int) -> None:
        self._hosts = [slot.hostname for slot in plan]
        self._rendezvous.init([*plan], generation)

    def _answer(self, answers: Mapping[int, dict[str, Any]]) -> None:
        self._answers.update(answers)
        self._rendezvous.answer(answers)

    def _act_on(self, message: str) -> None:
        """Print the message of an event, and act on the event at once."""
        if message:
            say(message)
        self._act()

    # --- requests of processes, through request_server.py ------------------

    def join(self, number: int, status: dict[str, Any]) -> dict[str, Any] | None:
        """Return the ranks of a process in the next generation; None: not yet, ask again.

        Args:
            status: the fields of a ProcessStatus.

        Returns:
            rank, size, local_rank, local_size, cross_rank, cross_size, job (a number unique to
            this job), generation and silent (the processes that fell silent in the last
            generation); for some ranks also places, see Membership. A rank of -1 excludes the
            process; "reason" is present if the process itself is the cause. With "spare" a
            generation was formed without the process: if its rank is -1, it waits for a later
            one and must ask again. "spare" is repeated until the process has run again, because
            an answer may be lost.
        """
        with self._changed:
            self.request(number, status)
            process = self._state.process(number)
            if process is None or not self._takes_part(process):
                unfinished = process is not None and self._state.unfinished(process)
                return {**_EXCLUDED, "reason": _UNFINISHED} if unfinished else _EXCLUDED
            if process.state == "removed":  # the process asks again if the answer is lost
                return self._answers.get(number)
            return self._answers.pop(number, _SPARE if process.spare else None)

    def request(self, number: int, status: dict[str, Any]) -> bool:
        """Record that a process requests its ranks; return whether `join` has an answer now."""
        with self._changed:
            process = self._record_request(number)
            if process is None or not self._takes_part(process):
                return True
            if number not in self._answers:
                self._state.requested(process, ProcessStatus.of(status), time.monotonic())
                self._changed.notify_all()
            return number in self._answers

    def _takes_part(self, process: TrainingProcess) -> bool:
        return process.state not in ("gone", "lost") and self._state.ending_since is None

    def news(self, number: int) -> dict[str, bool]:
        """Return what the running ranks must know at their next step boundary.

        "stop": write a checkpoint and end. "hosts": processes wait to join or must leave.
        """
        with self._changed:
            self._record_request(number)
            changes = has_membership_changes(self._state, time.monotonic())
            return {"stop": self._state.stop_requested, "hosts": changes}

    def failed(self, number: int, message: str, step: int | None = None) -> None:
        """Record why a process is about to end; `step`: the step in which it raised an error."""
        with self._changed:
            process = self._record_request(number)
            if process is not None:
                process.failure, process.failed_step = message, step

    def replace(self, number: int, message: str) -> None:
        """Replace a healthy process; does not count as a slot failure."""
        with self._changed:
            process = self._record_request(number)
            if process is not None:
                self._act_on(self._state.is_replaced(process, message, time.monotonic()))

    def leave(self, number: int, message: str, cause: str = "") -> None:
        """Retire the host of a process before it is taken away, or because of `cause`."""
        with self._changed:
            process = self._record_request(number)
            if process is not None:
                self._act_on(self._state.host_leaves(process, message, time.monotonic(), cause))

    def stuck(self, number: int, message: str) -> None:
        """Declare a process lost that hangs and that its watchdog cannot end."""
        with self._changed:
            process = self._state.process(number)
            if process is not None:
                self._act_on(
                    self._state.given_up(process, message, time.monotonic(), must_end=False)
                )

    def _record_request(self, number: int) -> TrainingProcess | None:
        """Record that a process is alive; return it, or None if the driver has given it up."""
        process = self._state.process(number)
        if process is None or process.state in ("gone", "lost"):
            return None
        process.responded = True
        return process

    # --- discovery -----------------------------------------------------------

    def _discover(self) -> None:
        if self._records is not None:
            self._records.load()
        if problem := self._discover_once():
            say(f"error: {problem}")
            self._kill(EXIT_USER)
        while not self._shutdown.is_set():
            self._hosts_changed.wait(self._discovery_pause())
            self._hosts_changed.clear()
            if not self._shutdown.is_set() and (problem := self._discover_once()):
                say(problem)

    def _discover_once(self) -> str:
        """Adopt the hosts that a discovery finds; return why it failed, or ""."""
        try:
            found = find_hosts(self._discovery)
        except Exception as error:
            return f"discovery failed: {error}"
        with self._changed:
            final = getattr(self._discovery, "removals_are_final", False)
            for change in self._state.hosts_found(found, time.monotonic(), final):
                say(change)
            if self._records is not None:
                self._find_suspects(self._records, named=True)
            self._changed.notify_all()
        return ""

    def _discovery_pause(self) -> float:
        with self._changed:
            ranks = len(self._state.alive("running"))
            self._most_ranks = max(self._most_ranks, ranks)
            complete = self._state.generations > 0 and ranks == self._most_ranks
            return _DISCOVERY_SECONDS[complete]

    # --- called by the hub ---------------------------------------------------

    def _on_silence(self, numbers: Sequence[int], why: str) -> None:
        """Declare the processes of a silent host lost; the hub then reports their ends.

        It ends them as soon as the host responds again, because their state is unknown.
        """
        with self._changed:
            for process in map(self._state.process, numbers):
                able = process is not None and process.state in ("running", "waiting")
                if process is not None and able and not self._state.ending:
                    self._silent.append(f"{process} fell silent: {why}")
                    self._state.given_up(process, why, time.monotonic(), must_end=True)

    # --- end of the job ------------------------------------------------------

    def _kill(self, exit_code: int) -> None:
        """Kill all processes; `exit_code` applies if none is determined yet."""
        self._state.killed(time.monotonic(), exit_code)
        self._end_all()

    def _end_all(self) -> None:
        self._shutdown.set()
        self._hosts_changed.set()
        if self._hub is not None:
            self._hub.end_all()

    def _finish(self, code: int) -> None:
        """Report the exit code; the job is over."""
        if self._verbose:
            say(f"heartbeats: the longest delay was {self._agents.detector.longest:.2f} s")
        self._exit_code = code if code >= 0 else 128 - code
        self._finished.set()
