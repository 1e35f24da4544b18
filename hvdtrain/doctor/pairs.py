"""Measurements between hosts: pairs are measured in rounds that do not disturb each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.doctor.here import Facts
from hvdtrain.doctor.session import Session, together

STREAM_SECONDS = 0.3
_SECONDS = 30.0  # per request; requests have their own limits
_EPHEMERAL_SAMPLES, _MPI_SAMPLES = 6, 2
# A round takes about a second, so with more hosts only some rounds are run.
MOST_HOSTS, SAMPLED_ROUNDS = 64, 16
_AGAIN = 16  # directions; if more are bad, the cause is not momentary
RANKS, MPI, METRICS = "ranks and launchers", "MPI", "metrics"


@dataclass(frozen=True)
class Peer:
    """A host with open listeners.

    Args:
        ports: name of the range -> listening ports.
        ranges: name of the range -> its first and last port.
    """

    session: Session
    facts: Facts
    ports: Mapping[str, Sequence[int]]
    ranges: Mapping[str, Sequence[int]]
    stream: int
    udp: int


@dataclass
class Link:
    """Measurements of one host on its link to another.

    Args:
        problems: range -> port -> failure, for ports that did not accept.
        packet: see host_links.packet.
        latency: seconds; 0: not measured.
        bandwidth: bytes per second; 0: not measured.
    """

    problems: dict[str, dict[int, str]]
    packet: str = "unknown"
    latency: float = 0.0
    bandwidth: float = 0.0


Links = dict[tuple[str, str], Link]


def open_listeners(
    sessions: Iterable[Session], facts: Mapping[str, Facts], slots: Mapping[str, int]
) -> dict[str, Peer]:
    """Open listeners on each host, in every port range that a run uses."""
    ranges = {name: _ranges(facts[name], slots.get(name, 0)) for name in facts}

    def listen(session: Session) -> Peer:
        own = ranges[session.name]
        answer = session.ask("listen", _SECONDS, ranges=own)
        bounds = {name: bounds[:2] for name, bounds in own.items()}
        return Peer(
            session, facts[session.name], answer["ports"], bounds, answer["stream"], answer["udp"]
        )

    return together(sessions, listen)


def _ranges(facts: Facts, slots: int) -> dict[str, list[int]]:
    """Name -> [first port, last port, number of ports to try]."""
    from hvdtrain.telemetry.config import TelemetryConfig

    found = {RANKS: [*facts["ports"], _EPHEMERAL_SAMPLES]}
    if slots == 0:
        return found  # it only launches
    if facts["mpi"] is not None:
        # Open MPI takes the first free port from here on.
        first = int(os.environ.get("OMPI_MCA_btl_tcp_port_min_v4", "1024"))  # noqa: SIM112
        found[MPI] = [first, first + 199, _MPI_SAMPLES]
    metrics = TelemetryConfig().port
    found[METRICS] = [metrics, metrics + max(9, slots - 1), 1]
    return found


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Each pair once, in rounds with at most one pair per host (the circle method)."""
    places: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in found if pairs]


def measure_links(peers: Mapping[str, Peer]) -> Links:
    """Measure the links between hosts in both directions: ports, then packets, then speed.

    Up to MOST_HOSTS hosts, all links are measured; above, each host's links to SAMPLED_ROUNDS other
    hosts (for an odd number of hosts, some have one fewer), spread over the list.
    """
    links: Links = {}
    done = rounds(list(peers))
    if len(peers) > MOST_HOSTS:
        done = [done[n * len(done) // SAMPLED_ROUNDS] for n in range(SAMPLED_ROUNDS)]
    for pairs in done:
        both = [*pairs, *((b, a) for a, b in pairs)]
        links |= _at_once(peers, both, _reach)
        # One direction at a time: both would share a host's processor, and perhaps its link.
        for direction in (pairs, both[len(pairs) :]):
            _measure(peers, [e for e in direction if RANKS not in links[e].problems], links)
    return links


def _measure(peers: Mapping[str, Peer], direction: Sequence[tuple[str, str]], links: Links) -> None:
    """Measure packets and speed of disjoint pairs; keep the better of two measurements."""
    for ends, answer in _at_once(peers, direction, _stream).items():
        link = links[ends]
        link.packet = answer["packet"]
        if "bandwidth" in answer:
            link.bandwidth = max(link.bandwidth, answer["bandwidth"])
            link.latency = min(link.latency or answer["latency"], answer["latency"])


def _at_once(peers: Mapping[str, Peer], pairs: Sequence[tuple[str, str]], do: Any) -> Any:
    """Run `do(from, to)` for pairs with each host at most once as `from`; omit failed requests."""
    if len({a for a, _ in pairs}) < len(pairs):
        raise ValueError("a host can answer one question at a time")
    to = dict(pairs)
    found = together(
        [peers[a].session for a in to],
        lambda session: do(peers[session.name], peers[to[session.name]]),
    )
    return {(a, to[a]): answer for a, answer in found.items()}


def _reach(own: Peer, other: Peer) -> Link:
    groups = dict(other.ports)
    # The kernel chose the stream port too.
    groups[RANKS] = [*groups.get(RANKS, ()), other.stream]
    ports = [port for group in groups.values() for port in group]
    answer = own.session.ask("reach", _SECONDS, address=_address(own, other), ports=ports)
    problems = {
        name: {port: answer[str(port)] for port in group if answer[str(port)]}
        for name, group in groups.items()
    }
    return Link({name: found for name, found in problems.items() if found})


def _stream(own: Peer, other: Peer) -> dict[str, Any]:
    address = _address(own, other)
    mtu = own.facts["interfaces"].get(own.facts["chosen"], {}).get("mtu", 1500)
    packet = own.session.ask("packet", _SECONDS, address=address, port=other.udp, mtu=mtu)
    if packet == "vanishes":
        return {"packet": packet}  # a stream would hang
    question = {"address": address, "port": other.stream, "seconds": STREAM_SECONDS}
    return {"packet": packet} | own.session.ask("stream", _SECONDS, **question)


def _address(own: Peer, other: Peer) -> str:
    """Address of the other host, as this host resolves it."""
    return str(own.facts["addresses"].get(other.session.name) or other.session.name)


def measure_again(peers: Mapping[str, Peer], links: Links, ends: Iterable[tuple[str, str]]) -> None:
    """Measure the first directions again, one at a time, as a host may have been busy briefly.

    At most _AGAIN directions are measured.
    """
    for direction in itertools.islice(ends, _AGAIN):
        _measure(peers, [direction], links)


def reach_interfaces(
    peers: Mapping[str, Peer], ways: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], str]:
    """Failures of hosts to reach an interface of another host.

    Args:
        ways: (from, to) -> an interface of `to`; each host tries one.
    """

    def attempt(own: Peer, other: Peer) -> str:
        name = ways[own.session.name, other.session.name]
        address = other.facts["interfaces"][name]["addresses"][0]
        question = {"address": address, "ports": [other.stream]}
        return str(own.session.ask("reach", _SECONDS, **question)[str(other.stream)])

    return {ends: how for ends, how in _at_once(peers, [*ways], attempt).items() if how}
