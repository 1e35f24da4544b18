"""What a driver must know of a job that another driver began: a record in JSON, and its state.

The driver writes the record before it starts processes or forms a generation, so no generation and
no number of a process is ever used twice. Times, pauses of slots and requests that wait are not
recorded: processes repeat their requests. The size is bounded by the number of live processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hvdtrain.elastic.decisions import JobState, StartProcess
from hvdtrain.elastic.processes import TrainingProcess
from hvdtrain.elastic.status import Identity, ProcessStatus, StepFailures
from hvdtrain.untrusted import checked


@dataclass(frozen=True)
class RecordedProcess:
    """Fields of a process that has not ended. `status`: of ProcessStatus, without the identity."""

    number: int
    host: str
    slot: int
    state: str
    first_generation: int | None = None
    spare: bool = False
    transfers_failed: int = 0
    host_retired: bool = False
    must_end: bool = False
    status: dict[str, Any] | None = None


@dataclass(frozen=True)
class JobRecord:
    """A job, see `JobState`.

    Args:
        job: unique number of the job.
        next_number: of the next process.
        hosts: host -> slots.
        identities: distinct identities of processes; `status` has the index of one.
        identity: identity of the run, and the host that reported it.
    """

    job: int
    next_number: int
    hosts: dict[str, int]
    generations: int
    newcomers: list[int]
    failed: bool
    failed_generations: int
    counted_generations: int
    failures: dict[str, Any]
    stop_requested: bool
    identities: list[dict[str, Any]] = field(default_factory=list)
    identity: list[Any] | None = None
    processes: list[dict[str, Any]] = field(default_factory=list)


def record(job: int, state: JobState, starts: Sequence[StartProcess] = ()) -> JobRecord:
    """Return the record of a job.

    Args:
        starts: processes that are about to be started.
    """
    identities: dict[Identity, int] = {}

    def status_of(process: TrainingProcess) -> dict[str, Any] | None:
        if process.status is None:
            return None
        index = identities.setdefault(process.status.identity, len(identities))
        return asdict(process.status) | {"identity": index, "message": ""}

    processes = [
        {f.name: getattr(process, f.name) for f in fields(RecordedProcess)}
        | {"status": status_of(process)}
        for process in state.processes
        if process.state != "gone"
    ]
    for start in starts:
        new = RecordedProcess(start.number, start.host, start.slot, "starting")
        processes.append(asdict(new))
    return JobRecord(
        job=job,
        next_number=len(state.processes) + len(starts),
        hosts=dict(state.hosts.slots),
        generations=state.generations,
        newcomers=list(state.newcomers),
        failed=state.failed,
        failed_generations=state.failed_generations,
        counted_generations=state.counted_generations,
        failures=asdict(state.failures),
        stop_requested=state.stop_requested,
        identities=[asdict(identity) for identity in identities],
        identity=state.identity and [asdict(state.identity[0]), state.identity[1]],
        processes=processes,
    )


def parse(content: Mapping[str, Any]) -> JobRecord:
    """Return the record in a JSON object.

    Raises:
        ValueError: it is not a record of this version.
    """
    found = checked(JobRecord, dict(content))
    for process in found.processes:
        checked(RecordedProcess, process)
    return found


def live(found: JobRecord) -> dict[int, str]:
    """Return process -> host for all processes that may still run."""
    return {int(p["number"]): str(p["host"]) for p in found.processes}


def restore(found: JobRecord, state: JobState, now: float) -> None:
    """Set the state of a recorded job in a new driver, whose clock shows `now`.

    Processes that have ended since are reported like any others, by `JobState.exited`.
    """
    state.hosts.slots = dict(found.hosts)
    state.processes = [
        TrainingProcess(number, "", 0, "gone", now) for number in range(found.next_number)
    ]
    identities = [Identity(**identity) for identity in found.identities]
    for recorded in found.processes:
        process = TrainingProcess(**recorded, since=now)
        if (status := recorded.get("status")) is not None:
            identity = identities[status["identity"]]
            process.status = ProcessStatus(**status | {"identity": identity})
        process.leave(process.host_retired, now)
        state.processes[process.number] = process
    state.generations, state.newcomers = found.generations, tuple(found.newcomers)
    if not state.generations:
        state.begin_again_until = now + state.timeout
    state.failed, state.failed_generations = found.failed, found.failed_generations
    state.counted_generations = found.counted_generations
    state.failures = StepFailures.of(found.failures)
    state.stop_requested = found.stop_requested
    if found.identity is not None:
        state.identity = Identity(**found.identity[0]), str(found.identity[1])
