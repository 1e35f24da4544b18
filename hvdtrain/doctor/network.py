"""Checks between hosts: ports, packets and speed of each link."""

from __future__ import annotations

import itertools
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.doctor.findings import ERROR, WARNING, Diagnosis
from hvdtrain.doctor.host_checks import Facts
from hvdtrain.doctor.session import HostSession, together
from hvdtrain.launch import mpi

# --- measurements, in rounds of pairs that do not disturb each other ---------


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

    session: HostSession
    facts: Facts
    ports: Mapping[str, Sequence[int]]
    ranges: Mapping[str, Sequence[int]]
    stream: int
    udp: int


@dataclass
class LinkMeasurement:
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


Links = dict[tuple[str, str], LinkMeasurement]


def open_listeners(
    sessions: Iterable[HostSession], facts: Mapping[str, Facts], slots: Mapping[str, int]
) -> dict[str, Peer]:
    """Open listeners on each host, in every port range that a run uses."""
    ranges = {name: _ranges(facts[name], slots.get(name, 0)) for name in facts}

    def listen(session: HostSession) -> Peer:
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
    if _is_open_mpi(facts):
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
        raise ValueError("a host can process one request at a time")
    to = dict(pairs)
    found = together(
        [peers[a].session for a in to],
        lambda session: do(peers[session.name], peers[to[session.name]]),
    )
    return {(a, to[a]): answer for a, answer in found.items()}


def _reach(own: Peer, other: Peer) -> LinkMeasurement:
    groups = dict(other.ports)
    # The kernel chose the stream port too.
    groups[RANKS] = [*groups.get(RANKS, ()), other.stream]
    ports = [port for group in groups.values() for port in group]
    answer = own.session.ask("reach", _SECONDS, address=_address(own, other), ports=ports)
    problems = {
        name: {port: answer[str(port)] for port in group if answer[str(port)]}
        for name, group in groups.items()
    }
    return LinkMeasurement({name: found for name, found in problems.items() if found})


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


_SLOW = 0.5  # fraction of the median
_FEW = 4  # up to this number, each direction has its own finding
# Limit for the speed that a board reports: even a busy host's single stream reaches this.
_MOST_MBIT = 1000
# Round-trip seconds: late above _LATE_S, or above both _LATER_S and _LATER times the median.
_LATE_S, _LATER_S, _LATER = 2e-3, 0.5e-3, 4.0


def check_links(links: Links, peers: Mapping[str, Peer]) -> list[Diagnosis]:
    """Check ports, packets, speeds and latencies."""
    found = []
    for ends, link in links.items():
        for name, problems in link.problems.items():
            found.append(_closed(ends, name, problems, peers[ends[1]], peers[ends[0]]))
    return [*found, *_packets(links, peers), *_speeds(links, peers), *_latencies(links, peers)]


def _closed(
    ends: tuple[str, str], name: str, problems: Mapping[int, str], other: Peer, own: Peer
) -> Diagnosis:
    first, last = other.ranges[name]
    how = statistics.mode(problems.values())
    tried = len(other.ports.get(name, ())) + (name == RANKS)
    source = own.facts["interfaces"].get(own.facts["chosen"], {}).get("addresses", ["ADDRESS"])[0]
    why = {
        RANKS: "launchers and ranks listen on ports of this range that the kernel selects: the run "
        "may hang at its start",
        MPI: "ranks under mpirun listen on the first free ports from there: MPI hangs at its start",
        METRICS: "Prometheus and `hvdtrain top` there do not see the ranks",
    }
    if name == MPI:
        last = 65535
    return Diagnosis(
        "ports",
        f"{ends[0]} -> {ends[1]}",
        f"tcp ports of {first}-{last} ({name}): {len(problems)} of {tried} tested "
        f"ports, such as {min(problems)}, cannot be reached ({how}), although a listener is open",
        why[name],
        _opening(other.facts["firewalls"], source, ends[1]),
        WARNING if name == METRICS else ERROR,
    )


def _opening(firewalls: Sequence[str], source: str, host: str) -> str:
    """The command that opens a firewall of the host for another host, by the firewall's kind."""
    commands = {
        "firewall-cmd": f"firewall-cmd --permanent --zone=trusted --add-source={source}; "
        "firewall-cmd --reload",
        "ufw": f"ufw allow from {source}",
        "nft": f"nft insert rule inet filter input ip saddr {source} accept",
        "iptables": f"iptables -I INPUT -s {source} -j ACCEPT",
    }
    command = next((commands[name] for name in firewalls), "")
    if not command:
        return f"{host} has no firewall: open the ports between the hosts in the network"
    return f"{command}   # on {host}; nft list ruleset shows the rules"


def _packets(links: Links, peers: Mapping[str, Peer]) -> list[Diagnosis]:
    found = []
    mtus = {name: _mtu(peer.facts) for name, peer in peers.items() if _mtu(peer.facts)}
    if len(set(mtus.values())) > 1:
        usual = statistics.mode(sorted(mtus.values(), reverse=True))
        for name, mtu in mtus.items():
            if mtu != usual:
                interface = peers[name].facts["chosen"]
                found.append(
                    Diagnosis(
                        "mtu",
                        name,
                        f"{interface} has an MTU of {mtu}, the other hosts {usual}",
                        "packets of the larger size are lost or fragmented",
                        f"ip link set {interface} mtu {usual}   # on {name}; and permanently in "
                        "its network configuration",
                        WARNING,
                    )
                )
    named = {finding.where for finding in found}
    for (a, b), link in links.items():
        if link.packet == "vanishes" and not named & {a, b}:
            interface = peers[a].facts["chosen"]
            found.append(
                Diagnosis(
                    "mtu",
                    f"{a} -> {b}",
                    f"a packet of {mtus.get(a, 1500)} bytes, the MTU of {interface} there, "
                    "is lost; small packets arrive",
                    "the run starts and then hangs in its first large all-reduce",
                    f"ip link set {interface} mtu 1400   # on both; or the larger MTU in the "
                    "switches between them",
                )
            )
    return found


def _mtu(facts: Facts) -> int:
    return int(facts["interfaces"].get(facts["chosen"], {}).get("mtu", 0))


def slow(links: Links, peers: Mapping[str, Peer]) -> dict[tuple[str, str], float]:
    """Directions slower than half of the speed expected from the median or the boards."""
    measured = [link.bandwidth for link in links.values() if link.bandwidth]
    if not measured:
        return {}
    usual, found = statistics.median_high(measured), {}
    for (a, b), link in links.items():
        boards = [
            peers[end].facts["interfaces"].get(peers[end].facts["chosen"], {}) for end in (a, b)
        ]
        mbit = min((board["mbit"] for board in boards if board.get("mbit", 0) > 0), default=0)
        expected = max(usual, min(mbit, _MOST_MBIT) * 1e6 / 8)
        if 0 < link.bandwidth < _SLOW * expected:
            found[a, b] = expected
    return found


def _speeds(links: Links, peers: Mapping[str, Peer]) -> list[Diagnosis]:
    expected = slow(links, peers)
    found = []
    for where, (a, b) in _places(sorted(expected, key=lambda ends: links[ends].bandwidth)).items():
        interface = peers[a].facts["chosen"]
        found.append(
            Diagnosis(
                "bandwidth",
                where,
                f"{links[a, b].bandwidth * 8e-6:.0f} Mbit/s; {expected[a, b] * 8e-6:.0f} are "
                "expected from the other directions or from the network adapters",
                "an all-reduce is as slow as its slowest link",
                f"ethtool {interface}; tc qdisc show dev {interface}   # on both: speed, duplex, "
                "limits; then cable and switch",
                WARNING,
            )
        )
    return found


def _places(directions: Sequence[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Location of a finding -> the direction that shows it; `directions` has the worst one first.

    A few directions have one finding each. Many share one, which names the hosts in most of them.
    """
    if len(directions) <= _FEW:
        return {f"{a} -> {b}": (a, b) for a, b in directions}
    (a, b), *_ = directions
    most = Counter(itertools.chain.from_iterable(directions)).most_common(2)
    hosts = ", ".join(f"{host} is in {count}" for host, count in most)
    return {f"{len(directions)} directions, such as {a} -> {b} ({hosts})": (a, b)}


def late(links: Links) -> dict[tuple[str, str], float]:
    """Directions with slow short messages -> the usual latency in seconds."""
    measured = [link.latency for link in links.values() if link.latency]
    usual = statistics.median_low(measured) if measured else 0.0
    return {
        ends: usual
        for ends, link in links.items()
        if link.latency > min(_LATE_S, max(_LATER_S, _LATER * usual))
    }


def _latencies(links: Links, peers: Mapping[str, Peer]) -> list[Diagnosis]:
    usual = late(links)
    places = _places(sorted(usual, key=lambda ends: -links[ends].latency))
    return [
        Diagnosis(
            "latency",
            where,
            f"the round-trip time is {links[a, b].latency * 1e3:.1f} ms; between hosts of one "
            "rack it is below 0.5 ms, and the median here is "
            f"{usual[a, b] * 1e3:.2f} ms",
            "each all-reduce of n ranks sends 2 (n - 1) messages one after the other: small ones "
            "take that many times as long",
            f"ping -c 5 {b}; ethtool -c {peers[a].facts['chosen']}; tc qdisc show   # on {a}: "
            "distant hosts, coalesced interrupts, a queue",
            WARNING,
        )
        for where, (a, b) in places.items()
    ]


# --- interfaces that libraries may choose to reach other hosts ---------------


_INTERFACE_VARIABLES = (
    "HOROVOD_GLOO_IFACE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
)


def check_interfaces(facts: Mapping[str, Facts]) -> list[Diagnosis]:
    """Find interfaces that a library may choose but that lead to no other host."""
    return [*_repeated(facts), *_missing(facts)]


def _is_open_mpi(facts: Facts) -> bool:
    found = mpi.find(facts["mpi"] or "")
    return found is not None and found.is_open_mpi


def _repeated(facts: Mapping[str, Facts]) -> list[Diagnosis]:
    """Find an address that several hosts have, as Docker's bridge does: MPI sees one network."""
    if os.environ.get("OMPI_MCA_btl_tcp_if_include"):  # noqa: SIM112
        return []
    if not any(_is_open_mpi(theirs) for theirs in facts.values()):
        return []
    holders: dict[tuple[str, str], list[str]] = {}
    for host, theirs in facts.items():
        for name, interface in theirs["interfaces"].items():
            for address in interface["addresses"]:
                holders.setdefault((name, address), []).append(host)
    chosen = next((theirs["chosen"] for theirs in facts.values() if theirs["chosen"]), "eth0")
    return [
        Diagnosis(
            "interfaces",
            ", ".join(hosts),
            f"{name} has the same address, {address}, on {len(hosts)} hosts",
            "Open MPI uses every interface: ranks connect to their own host, and MPI hangs",
            f"export OMPI_MCA_btl_tcp_if_include={chosen} OMPI_MCA_oob_tcp_if_include={chosen}",
        )
        for (name, address), hosts in holders.items()
        if len(hosts) > 1
    ]


def _missing(facts: Mapping[str, Facts]) -> list[Diagnosis]:
    found = []
    for variable, (host, theirs) in itertools.product(_INTERFACE_VARIABLES, facts.items()):
        value, there = os.environ.get(variable, ""), theirs["interfaces"]
        if not value or _allows(value, there):
            continue
        leaves = "leaves" if value.startswith("^") else "names"
        found.append(
            Diagnosis(
                "interfaces",
                host,
                f"{variable}={value} {leaves} no interface there; it has "
                f"{', '.join(there) or 'none'}",
                "ranks there do not start, or cannot reach the other ranks",
                f"export {variable}={theirs['chosen'] or 'NAME'}   # or unset {variable}",
            )
        )
    return found


def _allows(value: str, names: Iterable[str]) -> bool:
    """Whether a list of interfaces matches any interface of a host.

    As in NCCL's documentation: a leading `^` excludes the following names, a leading `=` (or `^=`)
    requires exact names; otherwise a word is a prefix. Networks, such as 10.0.0.0/8, always
    match.
    """
    excludes = value.startswith("^")
    exact = value.lstrip("^").startswith("=")
    words = [word for word in value.lstrip("^=").split(",") if word]
    if not words or (not excludes and any("/" in word for word in words)):
        return True

    def listed(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return any(listed(name) != excludes for name in names)


def nccl_begins_with(theirs: Facts) -> str:
    """The interface that NCCL's ranks on a host with GPUs use to find each other.

    The first whose name begins with `ib`, else the first that does not begin with `docker` (NCCL's
    documentation of NCCL_SOCKET_IFNAME). "": the host has no GPU, or the variable is set.
    """
    if not theirs["gpus"] or os.environ.get("NCCL_SOCKET_IFNAME"):
        return ""
    names = [*theirs["interfaces"]]
    ranked = [name for name in names if name.startswith("ib")]
    ranked += [name for name in names if not name.startswith(("ib", "docker"))]
    return next(iter(ranked), "")


def nccl_ways(facts: Mapping[str, Facts], slots: Mapping[str, int]) -> dict[tuple[str, str], str]:
    """Tests of NCCL's interfaces: (a host, the previous host) -> the previous host's interface.

    Only hosts whose ranks use GPUs are tested: others need not be on that network. Interfaces that
    already are the route to the other hosts are omitted.
    """
    names = {host: nccl_begins_with(facts[host]) for host in facts if slots.get(host)}
    users = [host for host, name in names.items() if name]
    after = dict(zip(users, [*users[1:], *users[:1]], strict=True))
    return {
        (after[host], host): names[host]
        for host in users
        if names[host] != facts[host]["chosen"] and after[host] != host
    }


def nccl_is_not_reached(host: str, theirs: Facts, from_host: str, how: str) -> Diagnosis:
    name, chosen = nccl_begins_with(theirs), theirs["chosen"]
    address = theirs["interfaces"][name]["addresses"][0]
    return Diagnosis(
        "interfaces",
        host,
        f"NCCL begins with {name} there, whose address, {address}, {from_host} does not reach "
        f"({how}); the route between them uses {chosen}",
        "ranks on GPUs cannot reach each other, and the run hangs at its start",
        f"export NCCL_SOCKET_IFNAME={chosen}",
    )
