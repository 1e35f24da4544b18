"""Sequence of the checks: first of each host, then between hosts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdtrain.config import Config, parse
from hvdtrain.config_checks import Ranks, check_ranks
from hvdtrain.doctor import collectives, host_checks, hosts, network, records
from hvdtrain.doctor.findings import ERROR, WARNING, Diagnosis, Examination
from hvdtrain.doctor.host_checks import Facts, Need
from hvdtrain.doctor.session import HostSession, opened, together
from hvdtrain.errors import UserError, crash
from hvdtrain.launch.discovery import is_this_host
from hvdtrain.launch.hostfile import Host, first_slots
from hvdtrain.process.resolve import with_global_batch
from hvdtrain.runtime.machine import resolve

LIBRARIES, NETWORK, ALONE, SUMS = "libraries", "network", "alone", "all-reduce"
STAGES = (LIBRARIES, NETWORK, ALONE, SUMS)
_FACTS_SECONDS, _LIBRARIES_SECONDS, _DIRECTORY_SECONDS, _DATA_SECONDS = 30.0, 45.0, 30.0, 70.0
_CLOCK_TRIES = 5


@dataclass(frozen=True)
class Request:
    """Scope of an examination.

    Args:
        hosts: hosts on which ranks would run; empty: this host only.
        ranks: world size; 0: the number of slots.
        root: run.root.
        flags: flags of the configuration whose data is compared; None: compare no data.
        stages: the members of `STAGES` to run.
        notice: called with a description of the next check.
    """

    hosts: Sequence[Host] = ()
    ranks: int = 0
    root: str = "runs"
    flags: Sequence[str] | None = None
    stages: Collection[str] = STAGES
    notice: Callable[[str], None] = lambda text: None


def examine(request: Request) -> Examination:
    """Run all checks.

    Raises:
        UserError: not even this host responds, or not all hosts can be asked at once.
    """
    began, found = time.monotonic(), Examination()
    usable = first_slots(request.hosts, request.ranks or 10**9)
    slots = {host.name: host.slots for host in usable}
    own = _own_name([host.name for host in usable])
    with _sessions(own, list(slots), found, request.notice) as sessions:
        facts = _ask_facts(sessions, request, list(slots))
        if own not in facts:
            raise crash(
                f"this host does not respond to its own doctor: {sessions[own].login.output}"
            )
        ranks = sum(slots.values()) or max(1, request.ranks)
        root = str(Path(request.root).absolute())
        for name, theirs in facts.items():
            of_host = slots.get(name, 0) if slots else ranks
            found.findings += host_checks.check_host(name, theirs, Need(of_host, ranks, root))
        if request.flags is not None:
            found.findings += _check_configuration(parse(request.flags).config, facts[own], ranks)
        asked = {name: sessions[name] for name in facts}
        _compare(found, facts, own, asked, request)
        if NETWORK in request.stages and len(asked) > 1:
            request.notice("ports, packets and bandwidth between the hosts")
            examine_links(found, asked, facts, slots)
        if ALONE in request.stages:
            request.notice("compute speed of each host")
            speeds = hosts.measure_speeds({n: asked[n] for n in asked if n in slots or not slots})
            found.measured["speeds"] = speeds
            found.findings += hosts.check_speeds(speeds)
        found.findings += records.check(
            Path(root), {**slots, **facts}, facts, found.measured.get("speeds", {})
        )
        for name, session in sessions.items():
            found.findings += hosts.check_answers(name, session.failures)
    if SUMS in request.stages:
        _examine_sums(found, facts[own], usable, ranks, request)
    found.seconds = time.monotonic() - began
    found.findings.sort(key=lambda finding: finding.severity != ERROR)
    return found


def _own_name(names: Sequence[str]) -> str:
    """Name of this host as in the list, or its hostname: a launcher need not be in the list."""
    for name in names:
        try:
            if is_this_host(name):
                return name
        except (OSError, UnicodeError):
            continue
    return socket.gethostname()


@contextmanager
def _sessions(
    own: str, names: Sequence[str], found: Examination, notice: Callable[[str], None]
) -> Iterator[dict[str, HostSession]]:
    """Open sessions with the hosts that respond, this one first; report the others as findings."""
    notice(f"querying {', '.join(names) or own}")
    addresses = {name: resolve(name) for name in names if name != own}
    for name, address in addresses.items():
        found.findings += hosts.check_name(name, address)
    known = [name for name, address in addresses.items() if address is not None]
    with opened(own, known) as sessions:
        answering = together(sessions.values(), HostSession.start)
        for name, session in sessions.items():
            if name != own:
                found.findings += hosts.check_login(name, session.login)
        yield {n: session for n, session in sessions.items() if answering.get(n) or n == own}


def _ask_facts(
    sessions: dict[str, HostSession], request: Request, names: Sequence[str]
) -> dict[str, Facts]:
    """Facts of each host that responds, in the order of the sessions."""
    root = str(Path(request.root).absolute())
    others = list(dict.fromkeys([*names, *sessions]))

    def ask(session: HostSession) -> Facts:
        facts = session.ask("facts", _FACTS_SECONDS, hosts=others)
        facts["disk"] = session.ask("folder", _DIRECTORY_SECONDS, path=root)
        wanted = LIBRARIES in request.stages
        libraries = session.ask("libraries", _LIBRARIES_SECONDS) if wanted else {}
        return dict(facts) | {"libraries": libraries}

    return together(sessions.values(), ask)


def _compare(
    found: Examination,
    facts: dict[str, Facts],
    own: str,
    sessions: dict[str, HostSession],
    request: Request,
) -> None:
    found.findings += hosts.compare(facts, own)
    found.findings += hosts.compare_names(facts, own)
    found.findings += network.check_interfaces(facts)
    found.measured["interfaces"] = {name: theirs["chosen"] for name, theirs in facts.items()}
    if len(sessions) > 1:
        offsets = together(sessions.values(), _clock)
        found.measured["clocks"] = {name: ahead for name, (ahead, _) in offsets.items()}
        found.findings += hosts.compare_clocks(offsets)
        found.findings += hosts.check_locks(list(sessions.values()), request.root)
    if request.flags is not None:
        request.notice("the training data of each host")
        flags = list(request.flags)
        data = together(sessions.values(), lambda s: s.ask("data", _DATA_SECONDS, flags=flags))
        found.measured["data"] = data
        found.findings += hosts.compare_data(data, own)


def _check_configuration(config: Config, facts: Facts, ranks: int) -> Iterator[Diagnosis]:
    """Check that a run with a fixed number of ranks accepts the configuration."""
    built = facts["libraries"].get("built", {})
    mpi = None if built.get("mpi") else False
    try:
        check_ranks(with_global_batch(config, ranks), Ranks(ranks, elastic=False, mpi=mpi))
    except UserError as error:
        yield Diagnosis(
            "configuration",
            f"{ranks} ranks",
            str(error),
            "a run with a fixed number of ranks ends at its start",
            "change the key that the message names, or the number of ranks",
            WARNING,
        )


def _clock(session: HostSession) -> tuple[float, float]:
    """(seconds ahead of this host, uncertainty in seconds), from the fastest of several answers."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_TRIES):
        before = time.time()
        theirs = session.ask("clock", 5.0)
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = (theirs - (before + after) / 2, (after - before) / 2)
    return best


def examine_links(
    found: Examination,
    sessions: Mapping[str, HostSession],
    facts: Mapping[str, Facts],
    slots: Mapping[str, int],
) -> None:
    """Add the findings and measurements of the links between hosts."""
    peers = network.open_listeners(sessions.values(), facts, slots)
    links = network.measure_links(peers)
    if len(peers) > network.MOST_HOSTS:
        every, measured = len(peers) * (len(peers) - 1) // 2, {frozenset(ends) for ends in links}
        found.left_out.append(
            f"between hosts: {len(measured)} of {every} pairs were measured, each host with "
            f"{network.SAMPLED_ROUNDS} other hosts"
        )
    network.measure_again(peers, links, {**network.slow(links, peers), **network.late(links)})
    found.findings += network.check_links(links, peers)
    ways = network.nccl_ways({name: peer.facts for name, peer in peers.items()}, slots)
    for (own, host), how in network.reach_interfaces(peers, ways).items():
        found.findings.append(network.nccl_is_not_reached(host, facts[host], own, how))
    found.measured["links"] = [
        {"from": a, "to": b, **asdict(link)} for (a, b), link in links.items()
    ]


def _examine_sums(
    found: Examination, own: Facts, usable: Sequence[Host], ranks: int, request: Request
) -> None:
    if any(finding.severity == ERROR for finding in found.findings):
        found.left_out.append("all-reduce: not tested because of the errors above")
        return
    built = own["libraries"].get("built", {})
    controllers = [name for name in ("mpi", "gloo") if built.get(name)]
    if not controllers:
        found.left_out.append(
            "all-reduce: not tested, because the features of this Horovod build are unknown"
        )
        return
    request.notice(f"all-reduce over {' and '.join(controllers)}")
    bandwidths = [link["bandwidth"] for link in found.measured.get("links", ())]
    sums = []
    slowest = min(bandwidths, default=0.0)
    for one in collectives.measure(controllers, usable, ranks, slowest):
        if isinstance(one, Diagnosis):
            found.findings.append(one)
        else:
            sums.append(one)
    found.measured["all_reduce"] = [one.as_dict() for one in sums]
    found.findings += collectives.check(sums)
