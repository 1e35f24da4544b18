"""Checks between hosts: ports, packets and speed of each link."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from hvdtrain.doctor.finding import ERROR, WARNING, Finding
from hvdtrain.doctor.here import Facts
from hvdtrain.doctor.pairs import METRICS, MPI, RANKS, Links, Peer

_SLOW = 0.5  # fraction of the median
_FEW = 4  # up to this number, each direction has its own finding
# Limit for the speed that a board reports: even a busy host's single stream reaches this.
_MOST_MBIT = 1000
# Round-trip seconds: late above _LATE_S, or above both _LATER_S and _LATER times the median.
_LATE_S, _LATER_S, _LATER = 2e-3, 0.5e-3, 4.0


def check_links(links: Links, peers: Mapping[str, Peer]) -> list[Finding]:
    """Check ports, packets, speeds and latencies."""
    found = []
    for ends, link in links.items():
        for name, problems in link.problems.items():
            found.append(_closed(ends, name, problems, peers[ends[1]], peers[ends[0]]))
    return [*found, *_packets(links, peers), *_speeds(links, peers), *_latencies(links, peers)]


def _closed(
    ends: tuple[str, str], name: str, problems: Mapping[int, str], other: Peer, own: Peer
) -> Finding:
    first, last = other.ranges[name]
    how = statistics.mode(problems.values())
    tried = len(other.ports.get(name, ())) + (name == RANKS)
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
        f"tcp ports of {first}-{last} ({name}): {len(problems)} of {tried} tried "
        f"ones, such as {min(problems)}, cannot be reached ({how}), though a listener is there",
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
                    f"a packet of {mtus.get(a, 1500)} bytes, the MTU of {interface} there, "
                    "vanishes on the way; small ones arrive",
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


def _speeds(links: Links, peers: Mapping[str, Peer]) -> list[Finding]:
    expected = slow(links, peers)
    found = []
    for where, (a, b) in _places(sorted(expected, key=lambda ends: links[ends].bandwidth)).items():
        interface = peers[a].facts["chosen"]
        found.append(
            Finding(
                "bandwidth",
                where,
                f"{links[a, b].bandwidth * 8e-6:.0f} Mbit/s; {expected[a, b] * 8e-6:.0f} are "
                "expected of what the other directions, or the boards, do",
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


def _latencies(links: Links, peers: Mapping[str, Peer]) -> list[Finding]:
    usual = late(links)
    places = _places(sorted(usual, key=lambda ends: -links[ends].latency))
    return [
        Finding(
            "latency",
            where,
            f"a byte takes {links[a, b].latency * 1e3:.1f} ms there and back; between hosts of one "
            "rack it takes less than 0.5, and the median of the ways here is "
            f"{usual[a, b] * 1e3:.2f} ms",
            "each all-reduce of n ranks sends 2 (n - 1) messages one after the other: small ones "
            "take that many times as long",
            f"ping -c 5 {b}; ethtool -c {peers[a].facts['chosen']}; tc qdisc show   # on {a}: "
            "hosts far apart, interrupts that are held back, a queue",
            WARNING,
        )
        for where, (a, b) in places.items()
    ]
