"""Checks of every host as seen from this one: its name, ssh, paths, versions, its `python`."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.doctor.findings import WARNING, Diagnosis
from hvdtrain.doctor.host_checks import Facts
from hvdtrain.doctor.host_facts import missing
from hvdtrain.doctor.session import HostSession, Login, SilentError, together

_CLOCK_SECONDS = 1.0
_NEEDS_SSH = "launchers start ranks over ssh, where no one can answer a prompt"


def check_name(host: str, address: str | None) -> Iterable[Diagnosis]:
    """Check that the launcher's host can resolve the name."""
    if address is None:
        yield Diagnosis(
            "name",
            host,
            "this host cannot resolve its name",
            "launchers cannot reach it",
            f"echo 'ADDRESS {host}' >> /etc/hosts   # on every host; or correct the list, or DNS",
        )


# Text in the output of ssh or Python -> (the problem, the fix).
_SAYINGS = (
    (
        "IDENTIFICATION HAS CHANGED",
        "its host key differs from the key that is known here",
        "ssh-keygen -R {host}; ssh-keyscan {host} >> ~/.ssh/known_hosts   "
        "# if {host} was reinstalled; otherwise find out which host responds",
    ),
    (
        "Host key verification failed",
        "its host key is not known here",
        "ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    ("Permission denied", "it asks for a password", "ssh-copy-id {host}"),
    (
        "Connection refused",
        "nothing listens on its port 22",
        "systemctl enable --now ssh   # on {host} (sshd on other distributions)",
    ),
    (
        "timed out",
        "its port 22 does not respond",
        "switch on {host}, or open port 22 in its firewall",
    ),
    (
        "No module named 'hvdtrain",
        "hvdtrain is not installed in its Python",
        "{python} -m pip install hvdtrain   # on {host}, with the same version as here",
    ),
    (
        "No module named hvdtrain",
        "hvdtrain is not installed in its Python",
        "{python} -m pip install hvdtrain   # on {host}, with the same version as here",
    ),
)


def check_login(host: str, login: Login) -> Iterable[Diagnosis]:
    """Check ssh without a prompt, the working directory and the Python interpreter."""
    directory, python = os.getcwd(), sys.executable
    if not login.directory:
        yield Diagnosis(
            "folder",
            host,
            f"the working directory {directory} is missing there",
            "launchers change to it on every host, and relative paths of the configuration "
            "start there",
            f"mount it on {host}, or start from a directory that all hosts have",
        )
    if not login.interpreter:
        yield Diagnosis(
            "python path",
            host,
            f"{python} is missing there",
            "launchers start this path on every host",
            f"rsync -a {sys.prefix}/ {host}:{sys.prefix}/   # or use an environment that all "
            "hosts share",
        )
    elif login.output:
        yield _silent(host, login.output)
    yield from _python(host, login)


def _silent(host: str, output: list[str]) -> Diagnosis:
    text = "\n".join(output)
    for sign, what, fix in _SAYINGS:
        if sign in text:
            fix = fix.format(host=host, python=sys.executable)
            return Diagnosis("ssh", host, f"{what} (“{_line_with(sign, output)}”)", _NEEDS_SSH, fix)
    what = f"a command over ssh fails (“{output[-1]}”)"
    return Diagnosis("ssh", host, what, _NEEDS_SSH, f"ssh -v {host} true")


def _line_with(sign: str, lines: list[str]) -> str:
    return next(line for line in lines if sign in line)


def _python(host: str, login: Login) -> Iterable[Diagnosis]:
    """Check that launchers start the same `python` on the host as the user starts here.

    horovodrun forwards PATH, and so does `mpirun -x PATH`. Plain mpirun uses the PATH that ssh
    sets on the host.
    """
    own = shutil.which("python")
    if own is None or Path(own).parent != Path(sys.executable).parent or login.output:
        return  # here programs are called by their path
    if not _same_directory(login.python, own):
        yield Diagnosis(
            "python",
            host,
            f"`python` is {login.python or 'nothing'} on the PATH of this shell, and {own} here",
            "`horovodrun ... python -m hvdtrain.train` starts another Python there",
            f"export PATH={Path(own).parent}:$PATH   # here, in front of all other directories",
        )
    elif not _same_directory(login.ssh_python, own):
        yield Diagnosis(
            "python",
            host,
            f"`python` is {login.ssh_python or 'nothing'} for a command over ssh, and {own} here",
            "`mpirun ... python` starts that one, because it does not forward PATH; "
            "horovodrun and hvdtrain launch start the correct one",
            "mpirun -x PATH ... python -m hvdtrain.train   # or use the full path of this python",
            WARNING,
        )


def _same_directory(found: str, own: str) -> bool:
    return bool(found) and Path(found).parent == Path(own).parent


def check_answers(host: str, failures: Sequence[str]) -> Iterable[Diagnosis]:
    """Report requests that a host did not answer: their results are unknown."""
    if failures:
        yield Diagnosis(
            "agent",
            host,
            f"it did not respond to the doctor ({'; '.join(failures)})",
            "results for this host are unknown; it may be overloaded",
            f"ssh {host} uptime; then run the doctor again",
        )


def compare(facts: Mapping[str, Facts], here: str) -> list[Diagnosis]:
    """Check that all hosts have the same versions as `here`."""
    own, found = facts[here], []
    for host, theirs in facts.items():
        others = {"python": theirs["python"], "mpi": theirs["mpi"], **theirs["versions"]}
        ours = {"python": own["python"], "mpi": own["mpi"], **own["versions"]}
        differ = [f"{n} {others[n]} (here {ours[n]})" for n in ours if others[n] != ours[n]]
        if not differ and theirs["code"] != own["code"]:
            differ = [f"hvdtrain's source files differ (digest {theirs['code']})"]
        if differ:
            found.append(
                Diagnosis(
                    "versions",
                    host,
                    "; ".join(differ),
                    "ranks of two versions cannot communicate, or compute different values",
                    f"rsync -a --delete {sys.prefix}/ {host}:{sys.prefix}/",
                )
            )
    return found


def compare_names(facts: Mapping[str, Facts], here: str) -> list[Diagnosis]:
    """Check that every host can resolve every other host; `_own_name` checks its own name.

    `check_name` covers the names that this host resolves.
    """
    found = []
    for host, theirs in facts.items():
        for name, address in theirs["addresses"].items():
            if host == here or name in (host, theirs["hostname"]):
                continue
            if address is None or address.startswith("127."):
                has = "cannot be resolved there" if address is None else f"is {address} there"
                found.append(
                    Diagnosis(
                        "name",
                        f"{name} on {host}",
                        f"the name {name} {has}",
                        "a rank there cannot connect to that host's ranks, or to a launcher there",
                        f"echo 'ADDRESS {name}' >> /etc/hosts   # on {host}",
                    )
                )
    return found


def compare_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Diagnosis]:
    """Report clocks that differ.

    Args:
        offsets: host -> (seconds ahead of this host, uncertainty in seconds).
    """
    return [
        Diagnosis(
            "clock",
            host,
            f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this one",
            "goodput and restart times are computed from the clocks of several hosts",
            f"systemctl restart chrony   # on {host} (or systemd-timesyncd); chronyc makestep",
            WARNING,
        )
        for host, (ahead, doubt) in offsets.items()
        if abs(ahead) - doubt > _CLOCK_SECONDS
    ]


def compare_data(found: Mapping[str, Mapping[str, object]], here: str) -> list[Diagnosis]:
    """Check that all hosts have the same training data."""
    findings = []
    for host, theirs in found.items():
        what = ""
        if "failed" in theirs:
            what = f"the training data cannot be read: {theirs['failed']}"
        elif "failed" not in found[here] and theirs != found[here]:
            samples, own = theirs["samples"], found[here]["samples"]
            what = f"different training data: {samples} samples, here {own}, or different content"
        if what:
            why = "the run would end at its start: all ranks assign the same samples"
            fix = f"rsync -a the files of the configuration's data to {host}"
            findings.append(Diagnosis("data", host, what, why, fix))
    return findings


# --- run.root and its locks: one host takes a lock, the other hosts try to ---


_LOCK_SECONDS = 10.0


def check_locks(sessions: Sequence[HostSession], root: str) -> list[Diagnosis]:
    """Check that the other hosts see a lock that the first host takes in run.root.

    Report nothing if the lock cannot be taken or the directory cannot be created: each host is
    checked for that separately.
    """
    directory = Path(root).absolute()
    path = directory / f".doctor-lock-{socket.gethostname()}-{os.getpid()}"
    made: list[Path] = []
    try:
        made = missing(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if not sessions[0].ask("hold", _LOCK_SECONDS, path=str(path)):
            return []
        seen = together(sessions[1:], lambda one: one.ask("attempt", _LOCK_SECONDS, path=str(path)))
    except (OSError, SilentError):
        return []
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
            for one in made:
                one.rmdir()  # not on NFS, which keeps the file as long as the agent holds it
    return [
        _finding(host, state, str(directory)) for host, state in seen.items() if state != "refused"
    ]


def _finding(host: str, state: str, directory: str) -> Diagnosis:
    if state == "absent":
        return Diagnosis(
            "shared folder",
            host,
            f"{directory} is a different directory there",
            "checkpoints are only on the host of rank 0: a run that moves starts from the "
            "beginning",
            f"mount a file system that all hosts share, and set --run.root to it; {directory} "
            f"on {host}: findmnt -T {directory}",
            WARNING,
        )
    return Diagnosis(
        "locks",
        host,
        f"a lock on a file in {directory} is not visible to other hosts",
        "only the owner token then prevents two processes from writing a run, and it takes 12 s",
        "mount it with server-side locks (NFS: without nolock and local_lock)",
        WARNING,
    )


# --- compute speed: find a slow host before all others wait for it -----------


_SLOW = 0.7  # fraction of the median
_LOAD_SECONDS, _SPEED_SECONDS = 60.0, 60.0

Speeds = dict[str, dict[str, float]]


def measure_speeds(sessions: Mapping[str, HostSession]) -> Speeds:
    """Host -> quantity -> speed; see host_facts.py. Measure again if a host is slow."""
    able = together(sessions.values(), lambda session: session.ask("load", _LOAD_SECONDS))
    speeds = _measure_once(sessions, able)
    # Measure all hosts again, because speeds are compared with simultaneous measurements.
    if find_slow_hosts(speeds):
        again = _measure_once(sessions, able)
        if len(find_slow_hosts(again)) < len(find_slow_hosts(speeds)):
            return again
    return speeds


def _measure_once(sessions: Mapping[str, HostSession], able: Mapping[str, bool]) -> Speeds:
    return together(
        [sessions[n] for n in able], lambda session: session.ask("speed", _SPEED_SECONDS)
    )


def find_slow_hosts(speeds: Speeds) -> dict[tuple[str, str], float]:
    """(host, quantity) -> fraction of the median of all hosts, if the host is slow.

    The higher of the two middle values counts, so of two hosts the slower one is compared with the
    other.
    """
    found: dict[tuple[str, str], float] = {}
    for what in sorted({name for theirs in speeds.values() for name in theirs}):
        known = {host: theirs[what] for host, theirs in speeds.items() if what in theirs}
        usual = statistics.median_high(known.values())
        found |= {(host, what): value / usual for host, value in known.items()}
    return {key: part for key, part in found.items() if part < _SLOW}


def check_speeds(speeds: Speeds) -> list[Diagnosis]:
    """Return one finding for each slow host and quantity."""
    kinds = {"processor": ("GFLOP/s", 1e9), "memory": ("GB/s", 1e9)}
    found = []
    for (host, what), part in find_slow_hosts(speeds).items():
        unit, scale = kinds.get(what, ("TFLOP/s", 1e12))
        if what.endswith("memory"):
            unit, scale = kinds["memory"]
        look = "nvidia-smi -q -d CLOCK,PERFORMANCE" if what.startswith("gpu") else "top -b -n 1"
        found.append(
            Diagnosis(
                "slow host",
                host,
                f"{what}: {speeds[host][what] / scale:.3g} {unit}, {part:.0%} of the median host",
                "every step waits for the slowest host",
                f"{look} | head -20   # on {host}: other programs, quotas, clocks; or "
                "exclude it, or --batch.deal speed gives it fewer micro-batches",
                WARNING,
            )
        )
    return found
