"""A real all-reduce between the hosts with each controller, as in each step of a run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from hvdtrain.bench.allreduce import bus_bandwidth
from hvdtrain.bench.processes import MARK, BenchError, finish, launch, on_threads
from hvdtrain.doctor.findings import WARNING, Diagnosis
from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import Host, as_text, first_slots, total_slots

BYTES = 8 << 20
LIMIT_SECONDS = 60.0
# Allowed factor over the network's time; shared processors and small messages add some time.
_SLOW, _SPARE_SECONDS = 4.0, 0.1
_WORKER = [sys.executable, "-m", "hvdtrain.bench.allreduce_worker", "horovod", str(BYTES)]


@dataclass(frozen=True)
class Sum:
    """Measurement of one all-reduce.

    Args:
        controller: "mpi" or "gloo".
        hosts: "name:slots,name:slots", or "" for this host.
        seconds: median of an all-reduce of `BYTES`.
        allowed: seconds that the slowest link between the hosts needs for it; 0: unknown.
    """

    controller: str
    ranks: int
    hosts: str
    seconds: float
    allowed: float

    def as_dict(self) -> dict[str, object]:
        return {"bytes": BYTES, **asdict(self)}


def plan(hosts: Sequence[Host], ranks: int) -> list[tuple[int, str]]:
    """(ranks, hosts) of the tests: 2 ranks, on two hosts if possible, then all ranks."""
    if not hosts:
        return [(2, "")]
    pair = [Host(host.name, 1) for host in hosts[:2]] if len(hosts) > 1 else list(hosts)
    found = [(total_slots(pair), as_text(pair))]
    whole = first_slots(hosts, ranks)
    if total_slots(whole) > total_slots(pair):
        found.append((total_slots(whole), as_text(whole)))
    return [(count, text) for count, text in found if count > 1]


def measure(
    controllers: Sequence[str], hosts: Sequence[Host], ranks: int, bandwidth: float
) -> Iterator[Sum | Diagnosis]:
    """Run the tests one after the other; yield each measurement, or the reason for its failure.

    Args:
        bandwidth: bandwidth of the slowest link in bytes per second; 0: unknown.
    """
    for count, text in plan(hosts, ranks):
        for controller in controllers:
            command = launch(controller, count, on_threads(1, _WORKER), text or None)
            allowed = 0.0
            if bandwidth and "," in text:
                # Lower bound: with 1 s, `bus_bandwidth` is the number of bytes each host sends.
                allowed = bus_bandwidth(BYTES, 1.0, count) / bandwidth
            try:
                lines = finish(command, LIMIT_SECONDS)
                seconds = _seconds(lines)
            except (UserError, ValueError) as error:
                yield _failed(controller, command, error)
            else:
                yield Sum(controller, count, text, seconds, allowed)


def _seconds(lines: Sequence[str]) -> float:
    for line in lines:
        if MARK in line:
            return float(json.loads(line[line.index(MARK) :])["seconds"][str(BYTES)])
    raise ValueError("no rank reported a time")


def _failed(controller: str, command: Sequence[str], error: Exception) -> Diagnosis:
    lines = [line.strip(" -") for line in str(error).splitlines()]
    if isinstance(error, BenchError):
        lines = lines[1:] or lines  # the first one is the command
    output = [line for line in lines if line]
    causes = [line for line in output if "rror" in line or "ailed" in line or "unable" in line]
    where = command[command.index("-H") + 1] if "-H" in command else "here"
    return Diagnosis(
        "all-reduce",
        where,
        f"ranks over {controller} fail: {(causes or output or ['no output'])[0]}",
        "a run would fail in the same way",
        f"{shlex.join(command)}   # run it by hand to see its whole output",
    )


def check(sums: Sequence[Sum]) -> list[Diagnosis]:
    """Report all-reduces that take far longer than the network requires."""
    return [
        Diagnosis(
            "all-reduce",
            one.hosts,
            f"{BYTES >> 20} MiB over {one.controller} take {one.seconds * 1e3:.0f} ms on "
            f"{one.ranks} ranks; the slowest link requires {one.allowed * 1e3:.0f}",
            "every step waits for it: it may use another interface, or ranks wait for processors",
            "hvdtrain bench allreduce --np "
            f"{one.ranks} --hosts {one.hosts}   # each library, by size",
            WARNING,
        )
        for one in sums
        if one.allowed and one.seconds > _SLOW * one.allowed + _SPARE_SECONDS
    ]
