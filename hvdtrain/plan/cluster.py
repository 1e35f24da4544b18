"""The cluster of a plan: hosts, ranks and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import UserError, require

# TCP payload with time stamps / bytes of a full Ethernet frame with preamble and gap.
TCP_PAYLOAD = 1448 / 1538

Algorithm = Literal["ring", "hierarchical", "best"]

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Link:
    """A full-duplex link between two ranks.

    Args:
        bits_per_second: in each direction.
        latency: seconds from sending a short message to its arrival.
        payload: fraction of the bits that carry message data.
    """

    bits_per_second: float
    latency: float = 0.0
    payload: float = 1.0

    def __post_init__(self) -> None:
        require(self.bits_per_second > 0, f"a bandwidth must be > 0, not {self.bits_per_second}")
        require(self.latency >= 0, f"a latency must be >= 0 s, not {self.latency}")
        require(0 < self.payload <= 1, f"a payload must lie in (0, 1], not {self.payload}")

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second * self.payload / 8


@dataclass(frozen=True)
class Cluster:
    """Identical hosts with the same number of ranks.

    Args:
        hosts, ranks_per_host: number of hosts, and of ranks on each.
        between: a host's link to the other hosts, shared by its ranks.
        within: link between two ranks of a host.
        algorithm: of an all-reduce: a `ring` through all ranks (Horovod on Gloo), `hierarchical`
            (`exchange.hierarchical`), or the `best` for its size (NCCL, MPI).
        launch_seconds: from the request of a collective on all ranks to its first message:
            Horovod's negotiation.
        busy_seconds_per_byte: time of a rank's own processor for each byte that it sends; 0 if a
            separate device computes.
        beside_seconds: extra delay of a collective while the ranks compute, on processors for
            which its threads have to wait.
    """

    hosts: int
    ranks_per_host: int
    between: Link
    within: Link
    algorithm: Algorithm = "ring"
    launch_seconds: float = 0.0
    busy_seconds_per_byte: float = 0.0
    beside_seconds: float = 0.0

    def __post_init__(self) -> None:
        require(self.hosts >= 1, f"a cluster has 1 host or more, not {self.hosts}")
        require(self.ranks_per_host >= 1, f"a host has 1 rank or more, not {self.ranks_per_host}")

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host


def parse_bandwidth(text: str) -> float:
    """Parse `25gbit`, `400Mbit/s` or `100G` into bits per second; a capital B is bytes: `900GB/s`.

    Raises:
        UserError: the text is not a bandwidth.
    """
    pattern = r"([\d.]+(?:e\d+)?)\s*([kmgt]?)(bit|bps|b|)(?:/s)?"
    match = re.fullmatch(pattern, text.strip(), re.IGNORECASE)
    value = _number(match[1]) * _BITS[match[2].lower()] if match else 0.0
    if not match or value <= 0:
        raise UserError(
            f"{text} is no bandwidth: bits a second are expected, such as 25gbit, or bytes, such "
            "as 3GB/s"
        )
    counts_bytes = match[3].startswith("B") and match[3].lower() != "bit"
    return value * 8 if counts_bytes else value


def parse_seconds(text: str) -> float:
    """Parse `20us`, `0.5ms` or `1s` into seconds.

    Raises:
        UserError: the text is not a time.
    """
    match = re.fullmatch(r"([\d.]+)\s*(s|ms|us|ns)", text.strip().lower())
    value = _number(match[1]) * _SECONDS[match[2]] if match else -1.0
    if value < 0:
        raise UserError(f"{text} is no time: a number with ns, us, ms or s is expected, as in 20us")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0
