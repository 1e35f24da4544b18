"""Records of hosts: report what runs have recorded, and record what the doctor finds."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hvdtrain.doctor.findings import WARNING, Diagnosis
from hvdtrain.doctor.host_checks import Facts, throttle_reasons, uncorrected_errors
from hvdtrain.doctor.hosts import Speeds, find_slow_hosts
from hvdtrain.run_files.host_records import (
    DIRECTORY,
    GPU,
    SLOW,
    THROTTLED,
    Incident,
    host_key,
    known_incidents,
    record_examination,
    score,
    summary,
    suspects,
)

# Below it a host without new incidents is no longer reported: a killed rank after three days.
_REPORTED_SCORE = 0.125


def check(
    root: Path, hosts: Iterable[str], facts: Mapping[str, Facts], speeds: Speeds
) -> list[Diagnosis]:
    """Report the records of `hosts` in run.root, and record the doctor's own findings.

    A fault that the doctor finds now is not repeated as a record.

    Args:
        facts: host -> facts, of the hosts that respond.
        speeds: see `hosts.measure_speeds`; may be empty.
    """
    now, directory, found = time.time(), root / DIRECTORY, list[Diagnosis]()
    own = list(_incidents(facts, speeds, now))
    try:
        record_examination(root, list(facts), own)
    except OSError as error:
        found.append(
            Diagnosis(
                "host record",
                str(directory),
                f"what was found cannot be recorded ({error.strerror})",
                "hvdtrain launch does not know which hosts to avoid",
                f"chmod 1777 {directory}   # if several users share run.root",
                WARNING,
            )
        )
    same = {(one.host, one.cause) for one in own}
    known = [one for one in known_incidents(root) if (one.host, one.cause) not in same]
    return [*found, *of_records(hosts, known, directory, now)]


def of_records(
    hosts: Iterable[str], incidents: Sequence[Incident], where: Path, now: float
) -> Iterator[Diagnosis]:
    """Return a warning for each host with incidents; `where`: file or directory that has them."""
    names = list(hosts)
    suspect = suspects(names, incidents, now)
    for name in names:
        theirs = [one for one in incidents if one.host == host_key(name)]
        if score(theirs, now) < _REPORTED_SCORE:
            continue
        avoided = "hvdtrain launch avoids it while other hosts suffice"
        yield Diagnosis(
            "host record",
            name,
            f"earlier: {summary(name, theirs, now)}",
            avoided if name in suspect else "if it happens again, hvdtrain launch avoids the host",
            f"dmesg -T   # on {name}; sbatch --exclude={name} keeps a job from it; rm -r {where} "
            "forgets it",
            WARNING,
        )


def _incidents(facts: Mapping[str, Facts], speeds: Speeds, now: float) -> Iterator[Incident]:
    for host, theirs in facts.items():
        key = host_key(host)
        gpus = [gpu for gpu in theirs.get("gpus", ()) if isinstance(gpu, dict)]
        if any("failed" in gpu or uncorrected_errors(gpu) for gpu in gpus):
            yield Incident(key, GPU, now, "found by hvdtrain doctor")
        if any(throttle_reasons(gpu) for gpu in gpus):
            yield Incident(key, THROTTLED, now, "found by hvdtrain doctor")
    for host in {host for host, _ in find_slow_hosts(speeds)}:
        yield Incident(host_key(host), SLOW, now, "found by hvdtrain doctor")
