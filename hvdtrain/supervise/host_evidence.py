"""What a start of a supervised run shows about its hosts, from its files and its launcher's output.

An elastic launcher records lost ranks itself (elastic/driver.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.host_records import (
    FLIPPED,
    GPU,
    SLOW,
    WRONG,
    cause_of_end,
    cause_of_report,
)
from hvdtrain.untrusted import number, read_regular


class Evidence(NamedTuple):
    """Something that went wrong on a host; `cause` is a key of `host_records.CAUSES`."""

    host: str
    cause: str
    detail: str


def in_files(run: Path, since: float) -> list[Evidence]:
    """Return what a run's events and logs show since a unix time, whatever its exit code.

    Slow ranks: only if their own computation is slow; loading and checkpoints depend on the task.
    """
    found = [*_in_events(run, since), *_in_logs(run, since)]
    return list({(one.host, one.cause): one for one in found}.values())


def of_failure(run: Path, since: float, output: str) -> list[Evidence]:
    """Return the hosts on which ranks of a failed mpirun were killed, or hung.

    Args:
        since: unix time of its start.
        output: the end of its error output.
    """
    hung = list(_hung(run, since))
    hosts = {one.host for one in hung}
    return [*hung, *(one for one in _killed(output) if one.host not in hosts)]


def _in_events(run: Path, since: float) -> Iterator[Evidence]:
    hosts: dict[int, str] = {}
    for event in last_lines(run / "events.jsonl", event="start"):
        kind, recent = event.get("event"), (number(event.get("time")) or 0.0) >= since
        if kind == "start":
            hosts = _host_of_rank(event.get("hosts"))
        elif recent and kind == "straggler" and "stage" not in event:
            if event.get("phase") == "compute" and isinstance(event.get("host"), str):
                score = number(event.get("score")) or 0.0
                yield Evidence(event["host"], SLOW, f"straggler score {score:.2f}")
        elif recent and kind == "healed":
            ranks = event.get("ranks")
            for rank in ranks if isinstance(ranks, list) else ():
                if isinstance(rank, int) and rank in hosts:
                    yield Evidence(hosts[rank], FLIPPED, f"rank {rank}, step {event.get('step')}")
        elif recent and kind == "replay":
            names, verdict = event.get("hosts"), event.get("verdict")
            cause = WRONG if verdict == "wrong" else FLIPPED
            for name in names if isinstance(names, list) else ():
                if isinstance(name, str):
                    yield Evidence(name, cause, f"replay in step {event.get('step')}: {verdict}")


def _host_of_rank(hosts: object) -> dict[int, str]:
    """Return rank -> host from a start event's host -> ranks."""
    if not isinstance(hosts, dict):
        return {}
    lists = ((host, ranks) for host, ranks in hosts.items() if isinstance(ranks, list))
    return {rank: host for host, ranks in lists for rank in ranks if isinstance(rank, int)}


def _in_logs(run: Path, since: float) -> Iterator[Evidence]:
    for path in sorted(run.glob("logs/rank_*.jsonl")):
        for line in last_lines(path):
            text = f"{line.get('message', '')} {line.get('traceback', '')}"
            recent = (number(line.get("time")) or 0.0) >= since
            if recent and line.get("level") == "error" and cause_of_report(text) == GPU:
                yield Evidence(str(line.get("host")), GPU, str(line.get("message", "")))


def _time_of(report: str) -> float:
    """Unix time of a watchdog's report, rounded up to a second; 0 if it has none."""
    try:
        return time.mktime(time.strptime(" ".join(report.split()[:2]), "%Y-%m-%d %H:%M:%S")) + 1
    except (ValueError, OverflowError):
        return 0.0


def _hung(run: Path, since: float) -> Iterator[Evidence]:
    """Ranks that their watchdog killed: logs/hang_HOST_N.txt."""
    for path in sorted(run.glob("logs/hang_*_*.txt")):
        try:
            if path.stat().st_mtime < since:
                continue
            lines = read_regular(path).decode("utf-8", "replace").splitlines()
        except OSError:
            continue
        # Later reports may be of ranks that were stuck and went on.
        report = next((line for line in reversed(lines) if "killed by its watchdog" in line), "")
        if _time_of(report) >= since and (cause := cause_of_report(report)):
            host = path.stem.removeprefix("hang_").rpartition("_")[0]
            yield Evidence(host, cause, report)


# A launcher names only the rank that ended first; it has ended the other ranks itself.
_ENDED_BY_SIGNAL = (
    # Open MPI; version 5 breaks the line
    re.compile(r"process rank \d+ with PID \d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)"),
    # MPICH
    re.compile(r"PID \d+ RUNNING AT (\S+)\n(?:.*\n){1,8}?.*EXIT STRING: .*\(signal (\d+)\)"),
)


def _killed(output: str) -> Iterator[Evidence]:
    for pattern in _ENDED_BY_SIGNAL:
        for host, by in pattern.findall(output):
            if cause := cause_of_end(-int(by)):
                yield Evidence(host, cause, f"signal {by}")
                return
