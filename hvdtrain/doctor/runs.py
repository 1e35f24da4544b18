"""Find why a run failed or is slow, from its logs, stacks of hung ranks, events and metrics.

A failing rank brings down the other ranks, and they only report that they lost it. Lines are
therefore matched in the order of `CAUSES`, causes before consequences.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.doctor import records
from hvdtrain.doctor.findings import ERROR, WARNING, Diagnosis
from hvdtrain.errors import UserError
from hvdtrain.report.metrics import Metrics, run_metrics
from hvdtrain.report.run import RecordedRun, read
from hvdtrain.run_files.events_file import each_line
from hvdtrain.run_files.host_records import FILE, read_incidents
from hvdtrain.untrusted import read_regular, real

# --- log patterns and their meaning, causes before consequences --------------


@dataclass(frozen=True)
class LogPattern:
    """Meaning of a log line.

    Args:
        pattern: regular expression for the line, case-insensitive.
        fix: the key to change, or the command to run.
    """

    check: str
    pattern: str
    what: str
    why: str
    fix: str
    severity: str = ERROR


CAUSES = (
    LogPattern(
        "shared memory",
        r"bus error|insufficient shared memory|shm_open.*No space",
        "/dev/shm is full",
        "data workers and ranks of one host pass tensors through it",
        "mount -o remount,size=2g /dev/shm   # containers: --shm-size=2g; or fewer loader.workers",
    ),
    LogPattern(
        "gpu memory",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU ran out of memory",
        "a step of this size does not fit",
        "--memory.checkpoint_activations blocks, or --memory.offload_activations true, or a "
        "smaller --batch.micro_size (with the same loss curve), or auto",
    ),
    LogPattern(
        "memory",
        r"DefaultCPUAllocator|MemoryError|Cannot allocate memory|worker .*killed by signal: Killed",
        "a host ran out of memory",
        "the kernel or the allocator ended a rank",
        "--memory.checkpoint_activations blocks, or a smaller --batch.micro_size (with the same "
        "loss curve), or fewer loader.workers, or fewer slots on that host",
    ),
    LogPattern(
        "gpu",
        r"uncorrectable ECC|device-side assert|illegal memory access|CUDA error|has fallen off",
        "a GPU failed",
        "the board or a kernel failed, and the other ranks lost this rank",
        "hvdtrain doctor --hosts HOST:1   # ECC, clocks, PCIe; exclude the host from the list",
    ),
    LogPattern(
        "nccl",
        r"ncclUnhandled|NCCL error|nccl\w+ failed|unhandled (?:system|cuda) error|NCCL WARN",
        "NCCL could not communicate",
        "an interface, /dev/shm or a port between the ranks does not work",
        "hvdtrain doctor --hosts LIST; then NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME names the "
        "interface",
    ),
    LogPattern(
        "disk",
        r"No space left on device|Disk quota exceeded|Read-only file system|Errno (?:28|30|122)\b",
        "the disk of the run could not be written",
        "checkpoints, metrics and logs were lost or late",
        "free space, or set --run.root to another disk, or a smaller --checkpoint.keep",
    ),
    LogPattern(
        "not finite",
        r"gradient (?:is|was) not finite",
        "the gradient was not finite",
        "training diverged, or 16 bits overflowed: a retry ends in the same way",
        "a lower --optim.lr, a longer --schedule.warmup_steps, --optim.clip_norm 1, or "
        "--precision.name bf16 in place of fp16; then look at the data",
    ),
    LogPattern(
        "replicas",
        r"parameters or optimizer state .*differ",
        "ranks no longer had the same parameters",
        "the memory or a processor of that host flips bits, or the task is not deterministic",
        "exclude the named host; hvdtrain audit RUN",
    ),
    LogPattern(
        "wrong gradient",
        r"computed a wrong gradient|compute different gradients",
        "a rank computed another gradient than a rank on another host",
        "a processor or a GPU of that host computes wrongly",
        "exclude the named host, and test it; see docs/integrity.md",
    ),
    LogPattern(
        "network",
        r"rendezvous failed|cannot be reached|no route to host|connection (?:refused|timed out)"
        r"|launcher does not (answer|respond)",
        "ranks could not reach each other, or their launcher",
        "a port, a name or a link between the hosts does not work",
        "hvdtrain doctor --hosts LIST   # ports, names, MTU",
    ),
    LogPattern(
        "owner",
        r"was taken over by process",
        "another process was started on this run",
        "one process at a time writes a run",
        "end one of the two, or give the other a different --run.id",
    ),
    LogPattern(
        "rank lost",
        r"lost the other ranks|HorovodInternalError|step \d+ failed",
        "a rank was lost",
        "the other ranks cannot continue without it. It logged no reason: it was killed, or its "
        "host or link failed",
        "dmesg -T | grep -i -E 'killed process|xid|link'   # on the host whose log ends first",
    ),
)


_LONGEST = 240  # maximum number of characters shown of a line
_MUCH = 0.3  # share of the ranks' time
_LEVELS = ("warning", "error", "critical")


@dataclass(frozen=True)
class LogLine:
    """A line of a file in the run directory.

    Args:
        text: the message and the last line of its traceback.
        error: whether its level is above warning.
    """

    where: str
    text: str
    time: float = 0.0
    error: bool = False


def diagnose(directory: Path) -> tuple[list[Diagnosis], str]:
    """Return the findings of a run, the most likely cause first, and a sentence on how it ended.

    All findings are warnings if the run finished or was asked to stop (exit code 0 or 75).

    Raises:
        UserError: `directory` is not a run directory, or cannot be read.
    """
    run = read(directory)
    found = run_metrics(run)
    try:
        lines = sorted(_log_lines(directory), key=lambda line: line.time)
        findings = [*_hung(directory), *_from_lines(lines)]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    findings += _from_events(run, {finding.check for finding in findings})
    if found["exit_code"] in (0, 75):
        findings = [replace(finding, severity=WARNING) for finding in findings]
    elif not findings and found["exit_code"] is None and not _errors_of_last_start(run, lines):
        findings += _killed(run, lines)
    elif not findings:
        findings.append(_unexplained(directory, lines, found["exit_code"]))
    return [*findings, *_slow(found), *_hosts(run)], f"how it ended: {found['state'] or 'unknown'}"


def _errors_of_last_start(run: RecordedRun, lines: Iterable[LogLine]) -> list[LogLine]:
    """Errors since the last generation began; an earlier error did not end the run."""
    began = run.ledger.generations[-1].start.time if run.ledger else 0.0
    return [line for line in lines if line.error and line.time >= began]


def _log_lines(directory: Path) -> Iterator[LogLine]:
    """Log lines of the ranks with level warning or above."""
    for path in sorted((directory / "logs").glob("rank_*.jsonl")):
        for number, line in enumerate(each_line(path), start=1):
            if line is None or line.get("level") not in _LEVELS:
                continue
            where = f"{path}:{number} (rank {line.get('rank')} on {line.get('host')})"
            trace = str(line.get("traceback", "")).strip().splitlines()
            last = trace[-1] if trace else ""
            message = str(line.get("message", ""))
            text = message if last in message or message in last else f"{message}: {last}"
            error = line["level"] != "warning"
            yield LogLine(where, text, real(line.get("time")) or 0.0, error)


def _from_lines(lines: Iterable[LogLine]) -> list[Diagnosis]:
    """Return one finding per cause, with the first line that shows it."""
    lines, found = list(lines), []
    taken: set[str] = set()
    for cause in CAUSES:
        shown = next((li for li in lines if re.search(cause.pattern, li.text, re.I)), None)
        if shown is None or shown.where in taken:
            continue
        taken.add(shown.where)
        what = f"{cause.what}: “{_short(shown.text)}”"
        found.append(
            Diagnosis(cause.check, shown.where, what, cause.why, cause.fix, cause.severity)
        )
    return found


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _hung(directory: Path) -> Iterator[Diagnosis]:
    """Find ranks that their watchdog killed, with the position of the first of them."""
    for path in sorted((directory / "logs").glob("hang_*.txt")):
        lines = read_regular(path).decode("utf-8", "replace").splitlines()
        for number, line in enumerate(lines, start=1):
            if "killed by its watchdog" not in line:
                continue
            where = next((text for text in lines[number:] if _is_frame(text)), "")
            at = f"; its stack: “{_short(where)}”" if where else ""
            yield Diagnosis(
                "hang",
                f"{path}:{number}",
                f"“{_short(line)}”{at}",
                "a rank made no progress because of a lock, a driver or a failed disk",
                "see the stack; raise elastic.hang_seconds if that operation may take so long",
            )
            return


def _is_frame(text: str) -> bool:
    """Whether a line is a stack frame of Python's fault handler or of py-spy."""
    return text.lstrip().startswith('File "') or re.match(r"\s+\w.* \(\S+:\d+\)$", text) is not None


def _from_events(run: RecordedRun, known: set[str]) -> Iterator[Diagnosis]:
    """Find problems that events and metrics show, but no log line."""
    path = run.path / "events.jsonl"
    for number, event in enumerate(each_line(path) if path.exists() else (), start=1):
        if event is None:
            continue
        where, line = f"{path}:{number}", _short(json.dumps(event))
        if event.get("event") == "checkpoint_failed" and "disk" not in known:
            known.add("disk")
            yield _of_event("disk", where, line)
        elif event.get("event") == "healed" and "replicas" not in known:
            known.add("replicas")
            yield _of_event("replicas", where, line)
        elif event.get("event") != "replay" or "wrong gradient" in known:
            continue
        elif event.get("hosts"):  # otherwise no rank was wrong
            known.add("wrong gradient")
            yield _of_event("wrong gradient", where, line)
    ended = run.ledger.generations[-1].end if run.ledger else None
    if ended is not None and ended[1] == 3 and "not finite" not in known:
        yield _of_event("not finite", f"{path} (the last line)", f"exit code 3 at step {ended[0]}")


def _of_event(check: str, where: str, line: str) -> Diagnosis:
    cause = next(cause for cause in CAUSES if cause.check == check)
    return Diagnosis(check, where, f"{cause.what}: “{line}”", cause.why, cause.fix, cause.severity)


def _killed(run: RecordedRun, lines: list[LogLine]) -> Iterator[Diagnosis]:
    """Find the reason for a run without a recorded end, assuming it was killed from outside.

    If memory only grew, the kernel is the likely cause.
    """
    if run.ledger is None or not len(run.steps["step"]):
        return
    last = f"the last step on record is {int(run.steps['step'][-1])}"
    grown = _growth(run)
    if grown:
        yield Diagnosis(
            "memory",
            f"{run.path / 'ranks.jsonl'} (the last lines)",
            f"the run has no recorded end, and {grown}; {last}",
            "the kernel kills a rank when memory runs out, and the rank cannot log it",
            "dmesg -T | grep -i 'killed process'; fewer loader.workers, or a task that uses "
            "less memory",
        )
        return
    yield Diagnosis(
        "killed",
        str(run.path / "events.jsonl"),
        f"the run has no recorded end, and no rank logged a reason; {last}",
        "it was killed (SIGKILL, a time limit, a power failure), or it is still running",
        "the scheduler's and the kernel's log (sacct -j JOB; dmesg -T); then start it again with "
        "the same --run.id",
        WARNING,
    )


def _growth(run: RecordedRun) -> str:
    """Text such as "rank 3 grew from 0.5 to 7.9 GiB"; "" if no rank's memory more than doubled."""
    if run.ranks is None:
        return ""
    memory = run.ranks.metrics["host_memory_bytes"]
    for rank in range(memory.shape[1]):
        of_rank = memory[:, rank][memory[:, rank] > 0]
        if len(of_rank) > 2 and of_rank[-1] > 2 * of_rank[1]:
            return (
                f"rank {rank} grew from {of_rank[1] / 2**30:.1f} to {of_rank[-1] / 2**30:.1f} GiB"
            )
    return ""


def _unexplained(directory: Path, lines: list[LogLine], code: int | None) -> Diagnosis:
    """Report the last logged error, or else the last warning, if no cause is known."""
    errors = [line for line in lines if "Traceback" not in line.text]
    errors = [line for line in errors if line.error] or errors
    shown = errors[-1] if errors else LogLine(str(directory / "logs"), "no warnings and no errors")
    ended = "no end was recorded" if code is None else f"it ended with exit code {code}"
    return Diagnosis(
        "error",
        shown.where,
        f"{ended}: “{_short(shown.text)}”",
        "exit code 2 is a mistake in the configuration or the input; 1 is a crash, whose traceback "
        "is in the log",
        "docs/troubleshooting.md lists messages and exit codes",
    )


def _slow(found: Metrics) -> Iterator[Diagnosis]:
    """Find what slowed down a run, even if it finished."""
    where = f"{found['run']}/ranks.jsonl"
    shares = found["phase_shares"] or {}
    for straggler in found["stragglers"][:1]:
        phase = straggler["phase"]
        yield Diagnosis(
            "straggler",
            f"{found['run']}/events.jsonl",
            f"rank {straggler['rank']} on {straggler['host']} was slow for {straggler['steps']} "
            f"steps (score {straggler['lowest_score']:.2f}), most in: {phase}",
            "every step waits for the slowest rank",
            f"hvdtrain doctor --hosts LIST   # is {straggler['host']} slow by itself? Otherwise "
            + ("loader.workers" if phase == "data" else "--batch.deal speed"),
            WARNING,
        )
    if shares.get("data", 0.0) > _MUCH:
        yield Diagnosis(
            "data-bound",
            where,
            f"{shares['data']:.0%} of the ranks' time was spent waiting for data",
            "steps wait for samples",
            "--loader.workers 2 (or more), or preprocess the samples once",
            WARNING,
        )
    if (exposed := found["exposed_share"] or 0.0) > _MUCH and not found["stragglers"]:
        yield Diagnosis(
            "communication-bound",
            where,
            f"{exposed:.0%} of the ranks' time was spent waiting for gradient synchronization",
            "the network is too slow for the ranks",
            "--exchange.wire bfloat16, --exchange.hierarchical true, --exchange.compression "
            "powersgd or a larger --batch.global_size; hvdtrain doctor --hosts LIST",
            WARNING,
        )


def _hosts(run: RecordedRun) -> Iterator[Diagnosis]:
    """Report what the run itself has recorded about its hosts."""
    generations = run.ledger.generations if run.ledger else ()
    hosts = {host for generation in generations for host in generation.start.hosts}
    path = run.path / FILE
    yield from records.of_records(sorted(hosts), read_incidents(path), path, time.time())
