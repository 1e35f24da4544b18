"""Checks between hosts: each pair in rounds that do not disturb each other."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.doctor.finding import WARNING, Finding
from hvdtrain.doctor.here import Facts
from hvdtrain.doctor.session import Session, together

STREAM_SECONDS = 0.3
_SECONDS = 30.0  # for one question, which has limits of its own
_SLOW = 0.5  # of the median
# One stream of Python's sockets does no more, whatever the board does.
_MOST_MBIT = 10_000
_EPHEMERAL_SAMPLES, _MPI_SAMPLES = 6, 2
_INTERFACE_VARIABLES = (
    "HOROVOD_GLOO_IFACE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_oob_tcp_if_include",
)
RANKS, MPI, METRICS = "ranks and launchers", "MPI", "metrics"


@dataclass(frozen=True)
class Peer:
    """A host that listens.

    Args:
        ports: of each range, those that listen.
        ranges: name -> first and last port of it.
    """

    session: Session
    facts: Facts
    ports: Mapping[str, Sequence[int]]
    ranges: Mapping[str, Sequence[int]]
    stream: int
    udp: int


@dataclass
class Link:
    """What one host found about the way to another.

    Args:
        problems: range -> port -> what happened, of the ports that did not accept.
        packet: see host_links.packet.
        latency: seconds; 0: not measured.
        bandwidth: bytes a second; 0: not measured.
    """

    problems: dict[str, dict[int, str]]
    packet: str = "unknown"
    latency: float = 0.0
    bandwidth: float = 0.0


Links = dict[tuple[str, str], Link]


def open_listeners(
    sessions: Iterable[Session], facts: Mapping[str, Facts], slots: Mapping[str, int]
) -> dict[str, Peer]:
    """Real listeners on each host, in every range that a run uses."""
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
    """name -> first port, last port, how many of them are tried."""
    from hvdtrain.telemetry.config import TelemetryConfig

    found = {RANKS: [*facts["ports"], _EPHEMERAL_SAMPLES]}
    if slots == 0:
        return found  # it only launches
    if facts["mpi"] is not None:
        # Open MPI takes the first that is free from here on.
        first = int(os.environ.get("OMPI_MCA_btl_tcp_port_min_v4", "1024"))
        found[MPI] = [first, first + 199, _MPI_SAMPLES]
    metrics = TelemetryConfig().port
    found[METRICS] = [metrics, metrics + max(9, slots - 1), 1]
    return found


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Each pair once, in rounds in which no host is in two pairs (the circle method)."""
    places: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in found if pairs]


def examine_links(peers: Mapping[str, Peer]) -> Links:
    """Every way between two hosts, in both directions: ports first, then packets, then speed."""
    links: Links = {}
    for pairs in rounds(list(peers)):
        both = [*pairs, *((b, a) for a, b in pairs)]
        links |= _at_once(peers, both, _reach)
        # One direction at a time: both together would share a host's processor, if not its link.
        for direction in (both[: len(pairs)], both[len(pairs) :]):
            _measure(peers, direction, links)
    return links


def _measure(
    peers: Mapping[str, Peer], direction: Sequence[tuple[str, str]], links: Links
) -> None:
    """Packets and speed of pairs that do not disturb each other; the better of two stays."""
    for ends, answer in _at_once(peers, direction, _stream).items():
        link = links[ends]
        link.packet = answer["packet"]
        if answer.get("bandwidth", 0.0) > link.bandwidth:
            link.latency, link.bandwidth = answer["latency"], answer["bandwidth"]


def _at_once(peers: Mapping[str, Peer], pairs: Sequence[tuple[str, str]], do: Any) -> Any:
    """`do(from, to)` of pairs, each host in one at most; pairs of silent hosts are left out."""
    if len({a for a, _ in pairs}) < len(pairs):
        raise ValueError("a host can answer one question at a time")
    to = dict(pairs)
    found = together(
        [peers[a].session for a in to], lambda session: do(peers[session.name], peers[to[session.name]])
    )
    return {(a, to[a]): answer for a, answer in found.items()}


def _reach(own: Peer, other: Peer) -> Link:
    ports = [port for group in other.ports.values() for port in group]
    ports += [other.stream]
    answer = own.session.ask("reach", _SECONDS, address=_address(own, other), ports=ports)
    problems = {
        name: {port: answer[str(port)] for port in group if answer[str(port)]}
        for name, group in other.ports.items()
    }
    return Link({name: found for name, found in problems.items() if found})


def _stream(own: Peer, other: Peer) -> dict[str, Any]:
    address = _address(own, other)
    mtu = own.facts["interfaces"].get(own.facts["chosen"], {}).get("mtu", 1500)
    packet = own.session.ask("packet", _SECONDS, address=address, port=other.udp, mtu=mtu)
    question = {"address": address, "port": other.stream, "seconds": STREAM_SECONDS}
    return {"packet": packet} | own.session.ask("stream", _SECONDS, **question)


def _address(own: Peer, other: Peer) -> str:
    """Of the other, as this one looks it up."""
    return str(own.facts["addresses"].get(other.session.name) or other.session.name)


def measure_slow_again(peers: Mapping[str, Peer], links: Links) -> None:
    """A host may have been busy for a moment: slow directions get a second chance, one by one."""
    for ends in _slow(links, peers):
        _measure(peers, [ends], links)


def check_links(links: Links, peers: Mapping[str, Peer]) -> list[Finding]:
    """Ports, packets and speeds."""
    found = []
    for ends, link in links.items():
        for name, problems in link.problems.items():
            found.append(_closed(ends, name, problems, peers[ends[1]], peers[ends[0]]))
    return [*found, *_packets(links, peers), *_speeds(links, peers)]


def _closed(
    ends: tuple[str, str], name: str, problems: Mapping[int, str], other: Peer, own: Peer
) -> Finding:
    first, last = other.ranges[name]
    how = statistics.mode(problems.values())
    source = own.facts["interfaces"].get(own.facts["chosen"], {}).get("addresses", ["ADDRESS"])[0]
    why = {
        RANKS: "launchers and ranks listen on ports of this range that the kernel picks: the run "
        "hangs at its start, or not at all, by chance",
        MPI: "ranks under mpirun listen on the first free ports from there: MPI hangs at its start",
        METRICS: "Prometheus and `hvdtrain top` there do not see the ranks",
    }
    if name == MPI:
        last = 65535
    return Finding(
        "ports",
        f"{ends[0]} -> {ends[1]}",
        f"tcp ports of {first}-{last} ({name}): {len(problems)} of {len(other.ports[name])} tried "
        f"ones, such as {min(problems)}, cannot be reached ({how}), though a listener is there",
        why[name],
        _opening(other.facts["firewalls"], source, ends[1]),
        WARNING if name == METRICS else "error",
    )


def _opening(firewalls: Sequence[str], source: str, host: str) -> str:
    """The command that lets one host through the other's firewall, of the kinds that it has."""
    commands = {
        "firewall-cmd": f"firewall-cmd --permanent --zone=trusted --add-source={source}; "
        "firewall-cmd --reload",
        "ufw": f"ufw allow from {source}",
        "nft": f"nft insert rule inet filter input ip saddr {source} accept",
        "iptables": f"iptables -I INPUT -s {source} -j ACCEPT",
    }
    command = next((commands[name] for name in firewalls), "")
    if not command:
        return f"{host} has no firewall of its own: open the ports between the hosts in the network"
    return f"{command}   # on {host}; nft list ruleset shows the rules"


def _packets(links: Links, peers: Mapping[str, Peer]) -> list[Finding]:
    found = []
    mtus = {name: _mtu(peer.facts) for name, peer in peers.items() if _mtu(peer.facts)}
    if len(set(mtus.values())) > 1:
        usual = statistics.mode(sorted(mtus.values(), reverse=True))
        for name, mtu in mtus.items():
            if mtu != usual:
                interface = peers[name].facts["chosen"]
                found.append(
                    Finding(
                        "mtu",
                        name,
                        f"{interface} has an MTU of {mtu}, the other hosts {usual}",
                        "packets of the larger size are lost, or cut into pieces",
                        f"ip link set {interface} mtu {usual}   # on {name}; and for good in its "
                        "network configuration",
                        WARNING,
                    )
                )
    named = {finding.where for finding in found}
    for (a, b), link in links.items():
        if link.packet == "vanishes" and not named & {a, b}:
            interface = peers[a].facts["chosen"]
            found.append(
                Finding(
                    "mtu",
                    f"{a} -> {b}",
                    f"a packet of {mtus.get(a, 1500)} bytes, the MTU of {interface} there, vanishes "
                    "on the way; small ones arrive",
                    "the run starts and then hangs in its first large all-reduce",
                    f"ip link set {interface} mtu 1400   # on both; or the larger MTU in the "
                    "switches between them",
                )
            )
    return found


def _mtu(facts: Facts) -> int:
    return int(facts["interfaces"].get(facts["chosen"], {}).get("mtu", 0))


def _slow(links: Links, peers: Mapping[str, Peer]) -> dict[tuple[str, str], float]:
    """Directions that are slower than half of what the others, or their board, let expect."""
    measured = [link.bandwidth for link in links.values() if link.bandwidth]
    if not measured:
        return {}
    usual, found = statistics.median_high(measured), {}
    for (a, b), link in links.items():
        boards = [peers[end].facts["interfaces"].get(peers[end].facts["chosen"], {}) for end in (a, b)]
        mbit = min((board["mbit"] for board in boards if board.get("mbit", 0) > 0), default=0)
        expected = max(usual, min(mbit, _MOST_MBIT) * 1e6 / 8)
        if 0 < link.bandwidth < _SLOW * expected:
            found[a, b] = expected
    return found


def _speeds(links: Links, peers: Mapping[str, Peer]) -> list[Finding]:
    found = []
    for (a, b), expected in _slow(links, peers).items():
        interface = peers[a].facts["chosen"]
        found.append(
            Finding(
                "bandwidth",
                f"{a} -> {b}",
                f"{links[a, b].bandwidth * 8e-6:.0f} Mbit/s; {expected * 8e-6:.0f} are expected "
                "of what the other directions, or the boards, do",
                "an all-reduce is as slow as its slowest link",
                f"ethtool {interface}; tc qdisc show dev {interface}   # on both: speed, duplex, "
                "limits; then cable and switch",
                WARNING,
            )
        )
    return found


def check_interfaces(facts: Mapping[str, Facts]) -> list[Finding]:
    """Interfaces that a library may choose, and that lead nowhere."""
    return [*_repeated(facts), *_missing(facts)]


def _repeated(facts: Mapping[str, Facts]) -> list[Finding]:
    """One address on several hosts, as Docker's bridge has it: MPI takes them for one network."""
    if os.environ.get("OMPI_MCA_btl_tcp_if_include"):
        return []
    holders: dict[tuple[str, str], list[str]] = {}
    for host, theirs in facts.items():
        for name, interface in theirs["interfaces"].items():
            for address in interface["addresses"]:
                holders.setdefault((name, address), []).append(host)
    chosen = next((theirs["chosen"] for theirs in facts.values() if theirs["chosen"]), "eth0")
    return [
        Finding(
            "interfaces",
            ", ".join(hosts),
            f"{name} has the same address, {address}, on {len(hosts)} hosts",
            "Open MPI uses every interface: ranks connect to their own host, and MPI hangs",
            f"export OMPI_MCA_btl_tcp_if_include={chosen} OMPI_MCA_oob_tcp_if_include={chosen}",
        )
        for (name, address), hosts in holders.items()
        if len(hosts) > 1
    ]


def _missing(facts: Mapping[str, Facts]) -> list[Finding]:
    found = []
    for variable, (host, theirs) in itertools.product(_INTERFACE_VARIABLES, facts.items()):
        wanted = [word.strip("^=") for word in os.environ.get(variable, "").split(",") if word]
        there = theirs["interfaces"]
        if not wanted or any("/" in word or any(n.startswith(word) for n in there) for word in wanted):
            continue
        found.append(
            Finding(
                "interfaces",
                host,
                f"{variable}={os.environ[variable]} names no interface there; it has "
                f"{', '.join(there) or 'none'}",
                "ranks there do not start, or find no way to the others",
                f"export {variable}={theirs['chosen'] or 'NAME'}   # or unset {variable}",
            )
        )
    return found
