"""The machines of a plan: hosts, ranks and what joins them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hvdtrain.errors import UserError, require

# What TCP with time stamps carries in a full Ethernet frame, of its bytes with preamble and gap.
TCP_PAYLOAD = 1448 / 1538

Algorithm = Literal["ring", "hierarchical", "best"]

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Link:
    """What joins two ranks, in both directions at once.

    Args:
        bits_per_second: in each direction.
        latency: seconds from a short message's sending to its arrival.
        payload: fraction of the bits that are a message's own.
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
    """Equal hosts with equally many ranks.

    Args:
        hosts, ranks_per_host: their numbers.
        between: a host's link to the others, shared by its ranks.
        within: of two ranks of a host.
        algorithm: of an all-reduce: a `ring` through all ranks (Horovod on Gloo), `hierarchical`
            (`exchange.hierarchical`), or the `best` for its size (NCCL, MPI).
        launch_seconds: from the moment a collective is asked for on all ranks to its first
            message: Horovod's negotiation.
        busy_seconds_per_byte: of a rank's own processor for each byte that it sends; 0 where a
            device beside it computes.
        beside_seconds: by which a collective starts later while the ranks compute, on processors
            for which its threads have to wait.
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
    """Bits a second of `25gbit`, `400Mbit/s` or `100G`; of bytes with a capital B: `900GB/s`.

    Raises:
        UserError: it is no bandwidth.
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
    """Seconds of `20us`, `0.5ms` or `1s`.

    Raises:
        UserError: it is no time.
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
