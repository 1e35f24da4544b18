"""Records of what went wrong on hosts: which causes count, which hosts are suspect, the files.

A run keeps its incidents in RUN/hosts.json, and a copy in run.root/.hosts/ID.json, which later and
simultaneous runs of run.root read. Only one process writes a file at a time: `hvdtrain launch`
while no launcher runs, and the driver of its elastic launcher otherwise. A file is replaced as a
whole, so any number of runs may write at once, on any file system. `hvdtrain doctor` has a file of
its own in .hosts.

Records are advice: a host with incidents is used last, and is never excluded for good. They must
not stop or delay training, so files are written by a background thread, and failures are reported
once. Any user may have written the files: what is not a valid incident is ignored.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.files import opened_directory, write_atomic
from hvdtrain.text import plural
from hvdtrain.untrusted import checked, number, open_regular, parse_json, printable

# --- causes -------------------------------------------------------------------


@dataclass(frozen=True)
class IncidentCause:
    """A reason to suspect a host.

    Args:
        weight: share in the host's score; a host is suspect from `SUSPECT`.
        what: for people.
    """

    weight: float
    what: str


KILLED, CRASHED, HUNG, STUCK, SILENT = "killed", "crashed", "hung", "stuck", "silent"
FLIPPED, WRONG, GPU, SLOW, THROTTLED = "flipped", "wrong", "gpu", "slow", "throttled"
# A single incident makes a host suspect only if its hardware, or several other hosts, report the
# fault.
CAUSES = {
    KILLED: IncidentCause(1.0, "rank killed from outside, or out of memory"),
    CRASHED: IncidentCause(0.5, "rank ended by a memory fault"),
    HUNG: IncidentCause(1.0, "rank without progress"),
    STUCK: IncidentCause(1.5, "rank that SIGKILL does not end"),
    SILENT: IncidentCause(1.0, "no response"),
    FLIPPED: IncidentCause(1.0, "state or gradient that differed from the other ranks'"),
    WRONG: IncidentCause(3.0, "wrong gradient, as other hosts agree"),
    GPU: IncidentCause(3.0, "GPU memory errors, or a GPU that failed"),
    SLOW: IncidentCause(0.5, "slower than the other hosts"),
    THROTTLED: IncidentCause(0.5, "GPU clock throttled"),
}
SUSPECT = 1.5
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: KILLED,
    signal.SIGSEGV: CRASHED,
    signal.SIGBUS: CRASHED,
    signal.SIGILL: CRASHED,
}
# Errors that the host causes, in what a rank, or its watchdog, has reported about its end. A rank
# that was stopped, or has lost its launcher, is killed by its watchdog, too.
_REPORTS = (
    (re.compile(r"killed by its watchdog: (no progress|busy without progress)"), HUNG),
    (re.compile(r"uncorrectable ECC|has fallen off the bus", re.IGNORECASE), GPU),
    (re.compile(r"[Ww]orker .*killed by signal: Killed"), KILLED),
)


def cause_of_report(report: str) -> str | None:
    """Return the cause in a rank's, or its watchdog's, report of its end; None: not the host."""
    return next((cause for pattern, cause in _REPORTS if pattern.search(report)), None)


def cause_of_end(code: int, report: str = "") -> str | None:
    """Return why a process that ended on its own, without a request, may be the host's fault.

    None for an error of the training code, for a signal that asks a process to end, and for an
    exit code on which the ranks agree. The caller knows whether a launcher ended the process.

    Args:
        code: its exit code; -N or 128 + N if signal N has ended it.
        report: what it, or its watchdog, has reported about its end; "": nothing.
    """
    if report:
        return cause_of_report(report)
    return _SIGNALS.get(code - 128 if code > 128 else -code)


# --- scores -------------------------------------------------------------------


_HALF_LIFE_SECONDS = 24 * 3600.0
_FORGOTTEN_SECONDS = 10 * _HALF_LIFE_SECONDS
_CLOCK_SECONDS = 3600.0  # how far the clock of another host may be ahead


@dataclass(frozen=True)
class Incident:
    """Something that went wrong on a host.

    Args:
        host: its name, see `host_key`.
        cause: a key of `CAUSES`.
        time: unix time in seconds.
        detail: for people; "": nothing.
    """

    host: str
    cause: str
    time: float
    detail: str = ""


def host_key(name: str) -> str:
    """Return the name under which a host is recorded: without its domain, but a whole address."""
    is_address = ":" in name or name.replace(".", "").isdigit()
    return name if is_address else name.partition(".")[0].lower()


def score(incidents: Iterable[Incident], now: float) -> float:
    """Return the sum of the incidents' weights, each halved for every day since it happened."""
    ages = ((CAUSES[one.cause].weight, max(0.0, now - one.time)) for one in incidents)
    return math.fsum(weight * 2.0 ** (-age / _HALF_LIFE_SECONDS) for weight, age in ages)


def suspects(
    hosts: Collection[str], incidents: Collection[Incident], now: float
) -> dict[str, float]:
    """Return the suspect hosts among `hosts` with their scores, the highest score first.

    A cause that all hosts share, such as a job that needs too much memory, does not single one of
    them out: a suspect host also has more than twice the score of the best quarter of `hosts`.
    """
    if not incidents:
        return {}
    of_host: dict[str, list[Incident]] = {}
    for one in incidents:
        of_host.setdefault(one.host, []).append(one)
    scores = {host: score(of_host.get(host_key(host), ()), now) for host in hosts}
    usual = sorted(scores.values())[(len(scores) - 1) // 4] if len(scores) > 1 else 0.0
    found = {host: one for host, one in scores.items() if one >= SUSPECT and one > 2 * usual}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def avoided(
    slots: Mapping[str, int], suspect: Mapping[str, float], min_np: int, max_np: int
) -> list[str]:
    """Return the suspect hosts that are not used, the most suspect first, because others suffice.

    Other hosts suffice if they have `max_np` slots. If all slots are wanted, other hosts suffice if
    they have `min_np` slots and half of all slots.

    Args:
        slots: host -> slots, of all hosts that could be used.
        suspect: see `suspects`.
        max_np: wanted ranks; sys.maxsize: all slots.
    """
    left = sum(slots.values())
    enough = max_np if max_np < sys.maxsize else max(min_np, (left + 1) // 2)
    found = []
    for host in suspect:
        if host in slots and left - slots[host] >= enough:
            left -= slots[host]
            found.append(host)
    return found


def summary(host: str, incidents: Iterable[Incident], now: float) -> str:
    """Return a text such as "no response (2 times, the last 3 minutes ago)"; may be ""."""
    key, last, times = host_key(host), dict[str, float](), Counter[str]()
    for one in incidents:
        if one.host == key:
            times[one.cause] += 1
            last[one.cause] = max(one.time, last.get(one.cause, 0.0))
    shown = []
    for cause, count in times.most_common():
        often = f"{count} times, the last " if count > 1 else ""
        shown.append(f"{CAUSES[cause].what} ({often}{_ago(now - last[cause])} ago)")
    return ", ".join(shown)


def _ago(seconds: float) -> str:
    units = (("day", 86400), ("hour", 3600), ("minute", 60))
    for unit, length in units:
        if seconds >= length:
            return plural(int(seconds // length), unit)
    return plural(max(0, int(seconds)), "second")


def exclusion(hosts: Iterable[str]) -> str:
    """Return the option of sbatch that keeps a job from these hosts; "" outside of Slurm."""
    names = ",".join(hosts)
    return f"--exclude={names}" if names and "SLURM_JOB_ID" in os.environ else ""


# --- files --------------------------------------------------------------------


# Run directory of a supervised run, in the environment of its launcher, ranks and their children.
LAUNCH_VARIABLE = "HVDTRAIN_LAUNCH_ID"
DIRECTORY, FILE = ".hosts", "hosts.json"  # in run.root, and in a run directory
_BYTES = 256 << 10  # more than the longest file
_MOST_INCIDENTS, _MOST_FILES, _DETAIL_CHARACTERS = 200, 1000, 200


def known_incidents(root: Path) -> set[Incident]:
    """Return the incidents that runs of run.root, and `hvdtrain doctor`, have recorded.

    Of more than 1,000 files, only the newest are read.
    """
    recent, now = [], time.time()
    with suppress(OSError), os.scandir(root / DIRECTORY) as entries:
        for entry in entries:
            with suppress(OSError):
                written = entry.stat(follow_symlinks=False).st_mtime
                if entry.name.endswith(".json") and now - written < _FORGOTTEN_SECONDS:
                    recent.append((written, entry.path))
    newest = sorted(recent, reverse=True)[:_MOST_FILES]
    return {one for _, path in newest for one in read_incidents(Path(path))}


def read_incidents(path: Path) -> list[Incident]:
    """Return the valid incidents of a file; none if it cannot be read."""
    try:
        with open_regular(path) as file:
            content = file.read(_BYTES + 1)
        if len(content) > _BYTES:
            return []
        found = parse_json(content)
    except (OSError, ValueError):
        return []
    listed = found.get("incidents") if isinstance(found, dict) else None
    entries = listed[-_MOST_INCIDENTS:] if isinstance(listed, list) else []
    return [one for one in map(_valid, entries) if one is not None]


def _valid(entry: object) -> Incident | None:
    try:
        one = checked(Incident, entry if isinstance(entry, dict) else {})
    except ValueError:
        return None
    age = time.time() - (number(one.time) or 0.0)
    if one.cause not in CAUSES or not -_CLOCK_SECONDS < age < _FORGOTTEN_SECONDS:
        return None
    return Incident(host_key(one.host), one.cause, one.time, one.detail[:_DETAIL_CHARACTERS])


def _content(incidents: Iterable[Incident]) -> bytes:
    newest = sorted(incidents, key=lambda one: one.time)[-_MOST_INCIDENTS:]
    return (json.dumps({"incidents": [asdict(one) for one in newest]}, indent=1) + "\n").encode()


def _write_shared(root: Path, name: str, content: bytes) -> None:
    """Write a file in run.root/.hosts, and remove files that no reader uses any more."""
    directory = root / DIRECTORY
    directory.mkdir(exist_ok=True)
    write_atomic(directory / name, content, shared=True)
    now = time.time()
    with opened_directory(directory, follow=False) as handle:
        for other in os.listdir(handle):
            with suppress(OSError):  # it belongs to another user
                written = os.stat(other, dir_fd=handle, follow_symlinks=False).st_mtime
                if now - written > _FORGOTTEN_SECONDS and other.endswith(".json"):
                    os.unlink(other, dir_fd=handle)


def record_examination(root: Path, hosts: Collection[str], incidents: Collection[Incident]) -> None:
    """Record the result of `hvdtrain doctor`, which replaces its earlier results for `hosts`.

    Raises:
        OSError: it cannot be written.
    """
    name = f".doctor-{socket.gethostname()}-{os.getuid()}.json"
    examined = {host_key(host) for host in hosts}
    earlier = read_incidents(root / DIRECTORY / name)
    kept = [one for one in earlier if one.host not in examined]
    if incidents or len(kept) < len(earlier):
        root.mkdir(parents=True, exist_ok=True)
        _write_shared(root, name, _content([*kept, *incidents]))


# Ranks of one host that end together are one incident.
_SAME_SECONDS = 5.0
_FLUSH_SECONDS = 2.0


class HostRecords:
    """The records of the hosts of a run, and what other runs have recorded before this one.

    Args:
        run: the run directory.
        say: reports that the records cannot be written.
    """

    def __init__(self, run: Path, say: Callable[[str], None]) -> None:
        self._run, self._say = run, say
        self._lock, self._write_lock = threading.Lock(), threading.Lock()
        self._own: list[Incident] = []
        self._others: set[Incident] = set()
        self._writer: threading.Thread | None = None
        self._changed = self._failed = False

    def load(self) -> None:
        """Read the records of all runs of run.root, and reread those of this run."""
        own, others = read_incidents(self._run / FILE), known_incidents(self._run.parent)
        with self._lock:
            self._own = sorted({*own, *self._own}, key=lambda one: one.time)
            self._others = others

    def incidents(self) -> set[Incident]:
        with self._lock:
            return {*self._own, *self._others}

    def suspects(self, hosts: Collection[str]) -> dict[str, float]:
        """Return the suspect hosts among `hosts`, see `suspects`."""
        return suspects(hosts, self.incidents(), time.time())

    def summary(self, host: str) -> str:
        return summary(host, self.incidents(), time.time())

    def add(self, host: str, cause: str, detail: str = "") -> None:
        """Record an incident now; it is written in the background."""
        one = Incident(host_key(host), cause, time.time(), printable(detail)[:_DETAIL_CHARACTERS])
        with self._lock:
            for earlier in self._own:
                same = (earlier.host, earlier.cause) == (one.host, one.cause)
                if same and abs(one.time - earlier.time) < _SAME_SECONDS:
                    return
            self._own = [*self._own, one][-_MOST_INCIDENTS:]
            if self._changed:  # a thread is about to write
                return
            self._changed = True
            self._writer = threading.Thread(target=self._write, daemon=True)
            self._writer.start()

    def flush(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Wait until the records are written, for at most `seconds`."""
        if self._writer is not None:
            self._writer.join(seconds)

    def _write(self) -> None:
        with self._write_lock:  # held for long if the file system does not respond
            with self._lock:
                self._changed = False
                content = _content(self._own)
            try:
                write_atomic(self._run / FILE, content)
                _write_shared(self._run.parent, f"{self._run.name}.json", content)
            except OSError as error:
                if not self._failed:
                    self._say(
                        f"host records cannot be written ({error}); later runs do not know them"
                    )
                self._failed = True
