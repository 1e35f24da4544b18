"""Decisions of the elastic driver, as pure functions: no threads, no clock, no network.

`JobState` is what the driver knows. Its methods record events, such as `exited`. `decide` reads it
and returns the actions that are due; `JobState.apply` records that one was performed. The states
of a process:

    starting -> waiting -> running -> waiting -> running ... -> gone

    A process becomes "waiting" when it requests its rank (POST /join/NUMBER). Once no process runs
    in the previous generation, the waiting processes that form whole replicas get their ranks and
    become "running".

    removed: excluded from the run: its host or slot was taken away, it was refused (it does not fit
             the run, or repeatedly did not receive its state), or it asked to be replaced
    lost:    given up: no rank waits for it, and its slot is not used while the process exists

A spare is "waiting", until the processes suffice for another replica of the model (processes.py).
A spare that has taken part before rejoins as a newcomer. So does a process of an unchanged script
(horovod_script.py) that has not received the state which others had: only the script's processes
have its state, so it is lost when only newcomers are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, nsmallest

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic.processes import (
    HostList,
    Slots,
    TrainingProcess,
    assign,
    choose,
    describe,
    in_order,
    replica_size,
    state_by_host,
)
from hvdtrain.elastic.status import (
    RENDEZVOUS,
    TRAINING,
    Identity,
    ProcessStatus,
    StepFailures,
    same_gpu,
)
from hvdtrain.errors import AGREED_CODES, EXIT_CRASH, EXIT_PREEMPTED
from hvdtrain.run_files.host_records import CAUSES, SILENT, STUCK, avoided, cause_of_end
from hvdtrain.text import plural

# New processes wait this long for each other, so that one rendezvous admits all of them.
_GATHER_SECONDS = 2.0
# Limits for a process that must leave while others wait for it, and for a process that still
# exists after the others have ended.
_LEAVE_SECONDS = 30.0
_END_SECONDS = 30.0
_END_OF_START_SECONDS = 1.0  # replaces _END_SECONDS if no generation was formed
# How long the others wait for a process that still runs in a failed generation. This is longer
# than a watchdog needs for its verdict, so it applies if the watchdog or the host is lost.
_LAST_RESORT_SECONDS = 900.0
# A newcomer is refused after this many failed state transfers; the others continue to train.
_STATE_TRANSFERS = 2
_MOST_NAMES = 3  # of hosts in a message


# --- actions -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the driver does next.

    Args:
        message: printed for the user; "": nothing.
    """

    message: str = ""


@dataclass(frozen=True)
class StartProcess(Action):
    """Start a process in a free slot; `size`: processes that are alive then."""

    number: int
    host: str
    slot: int
    size: int


@dataclass(frozen=True)
class EndProcess(Action):
    """End a process: SIGTERM, and SIGKILL 5 s later."""

    number: int


@dataclass(frozen=True)
class GiveUpProcess(Action):
    """Treat a process as lost, although it may still exist."""

    number: int


@dataclass(frozen=True)
class RemoveProcess(Action):
    """Answer a waiting process that it must end.

    Args:
        refused: why it cannot take part, although it waits; "": its host or slot was taken away.
        for_good: a new process in its slot would be refused, too, until the hosts change.
    """

    number: int
    refused: str = ""
    for_good: bool = False


@dataclass(frozen=True)
class MakeSpares(Action):
    """Form the next generation without these processes; they wait for a later one."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class FormGeneration(Action):
    """Give processes, in this order, the ranks of `plan`."""

    number: int
    processes: tuple[int, ...]
    plan: tuple[SlotInfo, ...]


@dataclass(frozen=True)
class EndGeneration(Action):
    """Notify the running ranks that a rank is lost, so that none of them waits for a timeout."""

    number: int


@dataclass(frozen=True)
class CountFailure(Action):
    """Count the end of a generation as a failure of its step.

    Args:
        reason: of that failure.
        newcomers: processes to which the run's state was not passed: that is the failure.
    """

    step: int
    reason: str
    newcomers: tuple[int, ...] = ()


@dataclass(frozen=True)
class WaitForProcesses(Action):
    """Wait, for at most --elastic-timeout, because too few processes are left."""


@dataclass(frozen=True)
class EndJob(Action):
    """Kill all processes; the exit code is `exit_code` if no process has determined it."""

    exit_code: int


@dataclass(frozen=True)
class ReportResult(Action):
    """Report the exit code to horovodrun: the job is over."""

    exit_code: int


# --- state -----------------------------------------------------------------------


@dataclass
class JobState:
    """What the driver knows of its job. Times are seconds of one monotonic clock.

    Args:
        min_np, max_np: the fewest and the most processes of a generation.
        timeout: seconds to wait for hosts while too few processes are left.
        reset_limit: failed generations that the job tolerates; None: any number.
        horovod_script: the ranks run an unchanged script (horovod_script.py). They end one by one,
            only exit code 0 is an agreed end, they write no checkpoint when asked to stop, and only
            they have the state of the script.
        processes: all that were started; the index is a process's number.
        generations: number of generations formed; the current one has number generations - 1.
        newcomers: processes of the current generation that need the run's state from others.
        identity: of the run, and the host that reported it.
        rank_lost: a running process was lost, and the other ranks are not notified yet.
        failed: a process died since the last generation was formed.
        failed_generations: number of generations that ended because a process died.
        counted_generations: value of `generations` when the end of a generation was last counted as
            a failure.
        short_since: since when too few processes have been left.
        stop_requested: the ranks write a checkpoint and end (a signal, or a host leaves).
        ending_since: since when the ranks have been ending by agreement.
        killed_since: since when all processes have been killed.
        begin_again_until: until when processes may be started although none is left: the starts
            may have been lost with another driver.
        last_loss: exit code of the process that was lost last, and what happened to it.
        over: the result was reported.
        suspects: suspect hosts -> score, the highest first; see run_files/host_records.py.
        incidents: (host, cause, detail) to be recorded, until the driver takes them.
    """

    min_np: int
    max_np: int
    timeout: float
    slots: Slots
    reset_limit: int | None = None
    horovod_script: bool = False
    hosts: HostList = field(default_factory=HostList)
    processes: list[TrainingProcess] = field(default_factory=list)
    generations: int = 0
    newcomers: tuple[int, ...] = ()
    identity: tuple[Identity, str] | None = None
    rank_lost: bool = False
    failed: bool = False
    failed_generations: int = 0
    counted_generations: int = 0
    failures: StepFailures = field(default_factory=StepFailures)
    short_since: float | None = None
    stop_requested: bool = False
    ending_since: float | None = None
    killed_since: float | None = None
    begin_again_until: float = 0.0
    exit_code: int = 0
    last_loss: tuple[int, str] = (EXIT_CRASH, "")
    over: bool = False
    suspects: dict[str, float] = field(default_factory=dict)
    incidents: list[tuple[str, str, str]] = field(default_factory=list)

    def process(self, number: int) -> TrainingProcess | None:
        return self.processes[number] if 0 <= number < len(self.processes) else None

    def alive(self, *states: str) -> list[TrainingProcess]:
        """Processes that are neither lost nor gone, or those in one of these states."""
        states = states or ("starting", "waiting", "running", "removed")
        return [p for p in self.processes if p.state in states]

    @property
    def ending(self) -> bool:
        return self.ending_since is not None or self.killed_since is not None

    @property
    def state_lost(self) -> bool:
        """Whether a script's state has ended with the last process that had it."""
        holders = (p.first_generation is not None for p in self.alive("waiting", "running"))
        return self.horovod_script and self.generations > 0 and not any(holders)

    def unfinished(self, process: TrainingProcess) -> bool:
        """Whether a script has ended in another process, while this one has to continue it."""
        holds_state = process.state != "removed" and process.first_generation is not None
        return self.horovod_script and self.ending_since is not None and holds_state

    # Events. Those that the user should know of return a message, or "".

    def hosts_found(
        self, found: dict[str, int], now: float, removals_are_final: bool = False
    ) -> list[str]:
        """Adopt the result of a discovery; return messages about changes.

        Args:
            removals_are_final: a missing host is gone; otherwise only if the next discovery misses
                it, too.
        """
        changes = self.hosts.take_over(found, removals_are_final)
        if changes:
            self.slots.release_refused()
        for process in self.alive():
            missing = process.slot >= self.hosts.slots.get(process.host, 0)
            process.leave(process.host_retired or missing, now)
        return changes if self.generations else []

    def requested(self, process: TrainingProcess, status: ProcessStatus, now: float) -> None:
        """A process requests its ranks in the next generation."""
        if process.state in ("starting", "running"):
            process.status, process.spare = status, False
            if self.horovod_script and not status.trained and process.number in self.newcomers:
                process.first_generation = None
            process.become("waiting", now)

    def exited(self, process: TrainingProcess, code: int, now: float) -> str:
        """Record that a process has ended: it was excluded, the ranks agreed, or it is a loss.

        If a leaving rank dies, the others are notified, but no failure is counted. A leaving rank
        of a script may finish before it can leave.
        """
        state, was_starting = process.state, process.state == "starting"
        pause = 0.0 if state == "removed" else self.slots.failed(process, now)
        process.become("gone", now)
        if state in ("removed", "lost") or self.killed_since is not None:
            return ""
        final = (0,) if self.horovod_script else AGREED_CODES
        finished = self.horovod_script and state == "running" and code == 0
        if process.leaving and not finished:
            self.rank_lost |= state == "running" and code not in final and not self.ending
            return ""
        # A newcomer, or a process with an error of its own, ends without agreement of the ranks.
        alone = (was_starting and self.generations) or process.failure
        if (code in final and not alone) or self.ending_since is not None:
            self.ending_since = now if self.ending_since is None else self.ending_since
            if not (was_starting and self.generations):  # such as one that ssh could not start
                self.exit_code = self.exit_code or code
            return ""
        self.failed |= not was_starting
        self.rank_lost |= state == "running"
        if not self.alive():
            # Whoever asks a script to stop may also signal its ranks.
            stopped = self.horovod_script and self.stop_requested
            self.exit_code = EXIT_PREEMPTED if stopped else code
        if process.failed_step is not None:
            self.failures.count_error(process.failed_step, process.failure)
        why = describe(code) + (f": {process.failure}" if process.failure else "")
        self.last_loss = code, f"{process} ended ({why})"
        expected = self.stop_requested or self.begin_again_until
        if not expected and (cause := cause_of_end(code, process.failure)):
            self.incidents.append((process.host, cause, why))
        return f"{self.last_loss[1]}; its slot is used again in {pause:.0f} s"

    def given_up(self, process: TrainingProcess, why: str, now: float, must_end: bool) -> str:
        """No rank waits for a process any more, although it may still exist.

        Args:
            must_end: it is ended, too. Its watchdog has tried that if it reports the process.
        """
        if process.state == "lost":
            return f"{process} still exists: {why}"  # it fell silent earlier
        if process.state == "gone":
            return ""
        if process.state == "running":
            self.rank_lost = self.failed = True
        if not process.leaving and not self.stop_requested:
            self.incidents.append((process.host, SILENT if must_end else STUCK, why))
        self.last_loss = EXIT_CRASH, f"{process} was given up" + (f" ({why})" if why else "")
        process.become("lost", now)
        process.must_end = must_end
        return _given_up(process, why)

    def is_replaced(self, process: TrainingProcess, why: str, now: float) -> str:
        """A healthy process ends; a new one takes its slot, which has not failed."""
        if process.state != "running":
            return ""
        process.become("removed", now)
        process.replaced = True
        return f"{process} is replaced by a new process: {why}"

    def host_leaves(self, process: TrainingProcess, why: str, now: float, cause: str = "") -> str:
        """The host of a process is about to be taken away: its processes leave.

        If no process on another host has the state of the run, all ranks write a checkpoint and
        stop.

        Args:
            cause: recorded as an incident of the host; "": it is not the host's fault.
        """
        if cause in CAUSES:
            self.incidents.append((process.host, cause, why))
        if process.host_retired or self.stop_requested:
            return ""
        able = self.alive("starting", "waiting", "running")
        # Before the first generation no process has a state to lose.
        holders = [p for p in able if p.first_generation is not None] or able
        if not any(p.host != process.host and not p.leaving for p in holders):
            self.stop_requested = True
            return f"the ranks write a checkpoint and stop: {process.host}: {why}"
        self.hosts.retire(process.host)
        for other in self.alive():
            other.host_retired |= other.host == process.host
            other.leave(other.leaving or other.host_retired, now)
        return f"{process.host} leaves: {why}"

    def killed(self, now: float, exit_code: int = 0) -> None:
        """All processes are killed."""
        self.exit_code = self.exit_code or exit_code
        self.killed_since = now if self.killed_since is None else self.killed_since

    # Actions that were performed.

    def apply(self, action: Action, now: float) -> None:
        """Record that an action of `decide` was performed."""
        match action:
            case StartProcess(number, host, slot):
                self.processes.append(TrainingProcess(number, host, slot, since=now))
                if self.begin_again_until:
                    self.begin_again_until, self.exit_code = 0.0, 0
            case EndProcess(number):
                self.processes[number].asked_to_end = True
            case GiveUpProcess(number):
                self.given_up(self.processes[number], "", now, must_end=True)
            case RemoveProcess(number, refused, for_good):
                if refused:
                    self.slots.refused(self.processes[number], for_good, now)
                self.processes[number].become("removed", now)
            case MakeSpares(numbers):
                self._make_spares([self.processes[number] for number in numbers])
            case FormGeneration(_, numbers):
                self._form([self.processes[number] for number in numbers], now)
            case EndGeneration():
                self.rank_lost = False
            case CountFailure(step, reason, newcomers):
                self.counted_generations = self.generations
                for number in newcomers:
                    self.processes[number].transfers_failed += 1
                if not newcomers:
                    what = "the next commit" if self.horovod_script else ""
                    self.failures.count_generation(step, reason, what)
            case WaitForProcesses():
                self.short_since = now
            case EndJob(exit_code):
                self.killed(now, exit_code)
            case ReportResult():
                self.over = True

    def _make_spares(self, processes: Sequence[TrainingProcess]) -> None:
        for process in processes:
            if process.first_generation is not None:
                process.first_generation, process.spare = None, True
                if process.status is not None:
                    # It drops its pending step, and its generation's failure is already counted.
                    step = process.status.step
                    process.status = replace(process.status, failed=None, reachable_step=step)

    def _form(self, members: Sequence[TrainingProcess], now: float) -> None:
        trained = [p.number for p in members if p.status is not None and p.status.trained]
        self.newcomers = tuple(p.number for p in members if trained and p.number not in trained)
        if self.identity is None and (status := members[0].status) is not None:
            self.identity = status.identity, members[0].host
        for process in members:
            process.become("running", now)
            if process.first_generation is None:
                process.first_generation = self.generations
        self.generations += 1
        self.failed_generations += self.failed
        self.failed = False
        self.short_since = None


# --- decisions ---------------------------------------------------------------------


def decide(job: JobState, now: float) -> list[Action]:
    """Return the actions that are due now; an empty list if none is.

    The first rule that applies determines them. The driver performs them, and calls again.
    """
    if job.over:
        return []
    # Before any SIGTERM: a rank that was given up but is alive would ask all others to stop. Once
    # its generation is over, it can no longer reach them.
    if job.rank_lost:
        return [EndGeneration(job.generations - 1)]
    if ends := _end_processes(job, now):
        return ends
    if job.ending:
        return _end_job(job, now)
    if job.failures.reason:
        code = job.last_loss[0] if job.horovod_script else EXIT_CRASH
        return [_fail(job.failures.reason, code)]
    if job.horovod_script and job.stop_requested:
        return [_stop()]
    if job.state_lost and job.alive():
        return [_fail("no process that has the state of the script is left", job.last_loss[0])]
    if replacements := _start_replacements(job, now):
        return replacements
    if not job.alive() and now < job.begin_again_until:
        return start_processes(job, job.max_np, now)
    if not job.alive():
        # If no process ended by agreement, the last ones were lost with their hosts.
        return [ReportResult(job.exit_code or EXIT_CRASH)]
    if refusals := _refuse_unfit(job) or _give_up_overdue(job, now):
        return refusals
    if job.alive("running"):
        if leaving := [p for p in job.alive("waiting") if p.leaving and _is_new(p)]:
            return [RemoveProcess(p.number) for p in leaving]
        return [] if _survivors(job) else start_processes(job, job.max_np, now)
    return _form_generation(job, now)


def has_membership_changes(job: JobState, now: float) -> bool:
    """Whether another generation should form: processes are ready to join, or must leave."""
    running = job.alive("running")
    if not running:
        return False
    joining = [
        p for p in job.alive("waiting") if _is_new(p) and not p.leaving and not _misfit(job, p)
    ]
    admits_more = len(choose([*running, *joining], job.max_np)) > len(running)
    coming = any(not p.leaving for p in job.alive("starting"))
    waited = max((p.lasted(now) for p in joining), default=0.0)
    ready = admits_more and (not coming or waited > _GATHER_SECONDS)
    return ready or any(p.leaving for p in running)


def start_processes(job: JobState, most: int, now: float) -> list[Action]:
    """Start a process in each usable free slot, up to `most` processes in all."""
    return _start(job, _free_slots(job, now), most)


def _start(job: JobState, slots: Sequence[tuple[str, int]], most: int) -> list[Action]:
    alive, first = len(job.alive()), len(job.processes)
    return [
        StartProcess(first + index, host, slot, alive + index + 1)
        for index, (host, slot) in enumerate(slots[: max(0, min(most, job.max_np) - alive)])
    ]


def _free_slots(job: JobState, now: float) -> list[tuple[str, int]]:
    taken = {(p.host, p.slot) for p in job.processes if p.state != "gone"}
    free = [
        (host, slot)
        for host, slots in job.hosts.slots.items()
        for slot in range(slots)
        if (host, slot) not in taken and job.slots.usable(host, slot, now)
    ]
    return _without_avoided(job, free) if job.suspects else free


def _without_avoided(job: JobState, free: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the slots to use, those of suspect hosts last; without them if others suffice."""
    needed = max(job.min_np, replica_size(job.alive()))
    left_out = avoided(job.hosts.slots, job.suspects, needed, job.max_np)
    preferred = sorted(free, key=lambda place: job.suspects.get(place[0], 0.0))
    used = [place for place in preferred if place[0] not in left_out]
    # The other hosts' slots may pause, or their processes do not fit the run.
    return used if len(job.alive()) + len(used) >= needed else preferred


def _start_replacements(job: JobState, now: float) -> list[Action]:
    """Start processes for those that asked to be replaced; the others may have ended, too."""
    if not any(p.replaced for p in job.processes):
        return []
    last = {(p.host, p.slot): p for p in job.processes}
    free = [place for place in _free_slots(job, now) if place in last and last[place].replaced]
    return _start(job, free, job.max_np)


def _is_new(process: TrainingProcess) -> bool:
    """Whether it has not been in a generation, or has become a spare since."""
    return process.first_generation is None


def _survivors(job: JobState) -> list[TrainingProcess]:
    """Processes that request new ranks after the end of a generation."""
    return [p for p in job.alive("waiting") if not _is_new(p)]


# Processes that must end.


def _end_processes(job: JobState, now: float) -> list[Action]:
    return [
        EndProcess(p.number)
        for p in job.processes
        if p.state != "gone" and not p.asked_to_end
        if p.must_end or (p.state == "removed" and p.lasted(now) > _END_SECONDS)
    ]


def _give_up_overdue(job: JobState, now: float) -> list[Action]:
    """Give up processes that others have waited for too long: the last resort.

    Such a process never takes part again: SIGTERM makes a rank ask all others to stop.
    """
    survivors, actions = _survivors(job), list[Action]()
    waited = max(0.0, now - min((p.since for p in survivors), default=now))
    verdict = 0.0
    if waited > _LAST_RESORT_SECONDS:
        verdict = max((p.status.verdict_seconds for p in survivors if p.status), default=0.0)
    for process in job.alive("running"):
        overdue = waited > max(verdict, _LAST_RESORT_SECONDS)
        if process.leaving_since is not None:
            overdue |= min(waited, now - process.leaving_since) > _LEAVE_SECONDS
        if overdue:
            why = f"the other ranks have waited {waited:.0f} s for it"
            actions.append(GiveUpProcess(process.number, message=_given_up(process, why)))
    for process in job.alive("starting"):
        if not process.responded and process.lasted(now) > job.timeout:
            why = f"it has sent no request for {job.timeout:.0f} s"
            actions.append(GiveUpProcess(process.number, message=_given_up(process, why)))
    return actions


def _given_up(process: TrainingProcess, why: str) -> str:
    failure = f"{process.failure}; " if process.failure else ""
    return f"{process} is given up ({failure}{why}); its slot is not used while the process exists"


def _misfit(job: JobState, process: TrainingProcess) -> str:
    """Why a newcomer's configuration, data or device excludes it from the run; "": it fits."""
    if not _is_new(process) or job.identity is None or process.status is None:
        return ""
    problem = process.status.identity.differs_from(*job.identity) or _used_gpu(job, process)
    return f"on {process.host}: {problem}" if problem else ""


def _used_gpu(job: JobState, process: TrainingProcess) -> str:
    """Why a newcomer cannot use its GPU: a process of the run, or an earlier newcomer, does."""
    gpu = process.status.gpu if process.status is not None else ""
    for other in job.alive("running", "waiting") if gpu else ():
        earlier = not _is_new(other) or other.number < process.number
        if earlier and other.status is not None and other.status.gpu == gpu:
            return same_gpu(str(other), gpu)
    return ""


def _refuse_unfit(job: JobState) -> list[Action]:
    """Exclude newcomers that do not fit the run, or repeatedly do not receive its state."""
    actions: list[Action] = []
    for process in job.alive("waiting"):
        if reason := _misfit(job, process):
            for_good, again = True, "when the hosts change"
        elif process.transfers_failed >= _STATE_TRANSFERS:
            reason = f"{process.transfers_failed} transfers of the run's state failed"
            for_good = False
            again = f"in {job.slots.pause_after_refusal(process):.0f} s"
        else:
            continue
        message = f"{process} is refused ({reason}); its slot is used again {again}"
        actions.append(RemoveProcess(process.number, reason, for_good, message=message))
    return actions


# Generations.


def _form_generation(job: JobState, now: float) -> list[Action]:
    """Form a generation of the waiting processes if they suffice; no process is running."""
    waiting = job.alive("waiting")
    still_starting = any(p.lasted(now) < job.timeout for p in job.alive("starting"))
    within_timeout = all(p.lasted(now) < job.timeout for p in waiting)
    if still_starting and within_timeout and not _survivors(job):
        return []  # a first start, or all ranks died: waiting for all delays no training
    if job.counted_generations < job.generations and (failure := _classify_failure(job, waiting)):
        return [failure]
    staying = _staying(job, waiting)
    members = in_order(choose(staying, job.max_np))
    needed = max(job.min_np, replica_size(staying))
    if refusals := _leave_out_parted(job, members, needed, now):
        return refusals
    if len(members) < needed:
        if job.stop_requested:
            return [EndJob(EXIT_PREEMPTED)]
        return _wait_for_more(job, len(staying), needed, now)
    failures = job.failed_generations + job.failed
    if job.reset_limit is not None and failures > job.reset_limit:
        return [_fail(f"ranks failed more than {job.reset_limit} times (--reset-limit)")]
    leaving = (p for p in waiting if p.leaving and p not in staying)
    actions: list[Action] = [RemoveProcess(p.number) for p in leaving]
    chosen = {p.number for p in members}
    if spares := [p for p in staying if p.number not in chosen]:
        names = ", ".join(map(str, spares))
        message = f"spare until {replica_size(spares)} can form a replica of the model: {names}"
        actions.append(MakeSpares(tuple(p.number for p in spares), message=message))
    message = ""
    if job.generations:
        count = Counter(p.host for p in members)
        where = ", ".join(f"{host}:{ranks}" for host, ranks in count.items())
        message = f"continuing with {plural(len(members), 'rank')} ({where})"
    numbers = tuple(p.number for p in members)
    plan = tuple(assign(members))
    return [*actions, FormGeneration(job.generations, numbers, plan, message=message)]


def _leave_out_parted(
    job: JobState, members: Sequence[TrainingProcess], needed: int, now: float
) -> list[Action]:
    """Refuse one host of each two that cannot reach each other, if the run can do without it.

    The hosts that stay have the state of the run, and suffice for it with the free slots of others.
    Otherwise all hosts try again, as often as the ranks do.
    """
    parted = _parted(members)
    if not parted:
        return []
    ranks = Counter(p.host for p in members)  # the host of rank 0 first
    free = Counter(host for host, _ in _free_slots(job, now))
    left, more, size = len(members), sum(free.values()), replica_size(members)
    state = state_by_host(members)
    copies = Counter(part for held in state.values() for part in held)
    # The one that most hosts cannot reach, then the one with the fewest ranks, then the youngest.
    # A host that cannot be left out now cannot be left out later, either.
    candidates = [
        (-len(parted[host]), ranks[host], -age, host)
        for age, host in enumerate(ranks)
        if host in parted
    ]
    heapify(candidates)
    left_out: dict[str, str] = {}
    while candidates:
        links, count, age, host = heappop(candidates)
        others = parted[host]
        if len(others) < -links:
            heappush(candidates, (-len(others), count, age, host))
            continue
        whole = min(left - count, job.max_np) // size * size
        suffices = whole + more - free[host] >= needed
        if others and suffices and all(copies[part] > 1 for part in state[host]):
            left_out[host] = f"{host} and {_names(others)} cannot reach each other"
            left, more = left - count, more - free[host]
            copies.subtract(state[host])
            for other in others:
                parted[other].remove(host)
            parted[host] = set()
    return [] if any(parted.values()) else _leave_out(job, members, left_out)


def _parted(members: Sequence[TrainingProcess]) -> dict[str, set[str]]:
    """Host -> hosts, of the last generation, that it cannot reach, or that cannot reach it."""
    # What is known of a host does not hold for processes that it has started since.
    failed = {p.host for p in members if p.status is not None and p.status.failed}
    found: dict[str, set[str]] = {}
    for process in members:
        reported = process.status.unreachable if process.status is not None else ()
        if others := failed.intersection(reported) - {process.host}:
            found.setdefault(process.host, set()).update(others)
            for other in others:
                found.setdefault(other, set()).add(process.host)
    return found


def _names(hosts: set[str]) -> str:
    more = len(hosts) - _MOST_NAMES
    rest = [plural(more, "other host")] if more > 0 else []
    return " and ".join([*nsmallest(_MOST_NAMES, hosts), *rest])


def _leave_out(
    job: JobState, members: Sequence[TrainingProcess], reasons: dict[str, str]
) -> list[Action]:
    """Refuse the processes of the hosts in `reasons`."""
    actions, said = list[Action](), set[str]()
    for process in members:
        if reason := reasons.get(process.host):
            again = job.slots.pause_after_refusal(process)
            message = f"{reason}: {process.host} is left out and tried again in {again:.0f} s"
            once = "" if message in said else message
            said.add(message)
            actions.append(RemoveProcess(process.number, reason, message=once))
    return actions


def _staying(job: JobState, waiting: Sequence[TrainingProcess]) -> list[TrainingProcess]:
    """Return the processes that do not leave.

    If all of them are newcomers to a script, a leaving process takes part once more, because they
    can receive the script's state only from it.
    """
    staying = [p for p in waiting if not p.leaving]
    if job.horovod_script and job.generations and staying and all(map(_is_new, staying)):
        return [*in_order(_survivors(job))[:1], *staying]
    return staying


def _wait_for_more(job: JobState, count: int, needed: int, now: float) -> list[Action]:
    """Start processes while too few are left; fail the job after --elastic-timeout."""
    why = "--min-np" if needed == job.min_np else "a replica of the model"
    start = start_processes(job, job.max_np, now)
    if job.short_since is None:
        left = f"{plural(count, 'rank')} {'is' if count == 1 else 'are'} left and"
        needs = f"{needed} {'is' if needed == 1 else 'are'} needed ({why})"
        return [WaitForProcesses(message=f"{left} {needs}: waiting for hosts"), *start]
    if now - job.short_since > job.timeout:
        limit = f"for {job.timeout:.0f} s ({why}, --elastic-timeout)"
        return [_fail(f"fewer than {plural(needed, 'rank')} {limit}")]
    return start


def _classify_failure(job: JobState, waiting: Sequence[TrainingProcess]) -> Action | None:
    """Classify the end of a generation by its ranks' reports of a failed phase."""
    reports = [p.status for p in waiting if p.status is not None and p.status.failed]
    phases = {report.failed for report in reports}
    if not reports:
        return None
    most_advanced = max(reports, key=lambda report: report.step)
    step, message = most_advanced.step, most_advanced.message
    if job.newcomers and TRAINING not in phases:
        return None if job.failed else CountFailure(step, message, job.newcomers)
    if phases == {RENDEZVOUS}:  # the ranks themselves limit failed rendezvous
        return None
    return CountFailure(step, job.last_loss[1] if job.horovod_script and job.failed else message)


# The end of the job.


def _fail(reason: str, code: int = EXIT_CRASH) -> Action:
    """Fail the job; `code`: of the last lost process, which may have ended with 0."""
    return EndJob(code or EXIT_CRASH, message=f"error: {reason}")


def _stop() -> Action:
    return EndJob(EXIT_PREEMPTED, message="asked to stop: the ranks are ended")


def _end_job(job: JobState, now: float) -> list[Action]:
    """Wait until all processes have ended, by agreement or because they were killed."""
    if not job.alive():
        return [ReportResult(job.exit_code)]
    if job.killed_since is not None:
        late = now - job.killed_since > _END_SECONDS
        return [ReportResult(job.exit_code or EXIT_CRASH)] if late else []
    assert job.ending_since is not None
    running = job.alive("running")
    of_script = any(p.status is not None and p.status.works_on for p in running)
    agreed = job.exit_code in AGREED_CODES and job.exit_code != 0
    if running and (job.horovod_script or (of_script and not agreed)):
        # For example, rank 0 still evaluates, or uploads the model.
        return [_stop()] if job.stop_requested else []
    limit = _END_SECONDS if job.generations else _END_OF_START_SECONDS
    return [EndJob(0)] if now - job.ending_since > limit else []
