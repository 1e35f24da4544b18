"""`make exchange-check`: exchanges on networks of several speeds; requires root.

Each row but one is a command of `hvdtrain bench` on two hosts of one core each, or on this host
only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.soak import mixed_speed
from tests.soak.pinned import ENV, PinnedHosts
from tests.support.namespaces import why_not

LIMIT_S = 3000.0
GPT_11M = [
    *("--model.layers=6", "--model.width=384", "--model.heads=6", "--model.context=128"),
    *("--batch.global_size=8", "--batch.micro_size=2"),
]
EIGHT_RANKS = [*GPT_11M[:-2], "--batch.global_size=16", "--batch.micro_size=2"]
TWO_HOSTS = ["--hosts", "node1:1,node2:1"]


@dataclass(frozen=True)
class Bench:
    """A row: arguments of `hvdtrain bench`, its hosts (default: this machine), and Mbit/s."""

    words: Sequence[str]
    hosts: bool = True
    mbit: int | None = None

    def __call__(self, hosts: PinnedHosts) -> bool:
        """Run it; return whether it could be measured."""
        command = [sys.executable, "-m", "hvdtrain.cli", "bench", *self.words]
        if not self.hosts:
            here = subprocess.run(command, env=os.environ | ENV, timeout=LIMIT_S)
            return here.returncode == 0
        if self.words[0] == "exchange":
            command += ["--", f"--run.root={hosts.shared}/runs"]
        hosts.limit(self.mbit)
        done = hosts.run("node1", command, LIMIT_S)
        print(done.stdout, done.stderr, sep="", flush=True)
        return done.returncode == 0


def _scaling(rounds: int, *keys: str) -> list[str]:
    steps = ["--steps", "10", "--rounds", str(rounds)]
    return ["scaling", "--np", "2", *TWO_HOSTS, *steps, "--", *GPT_11M, *keys]


def _exchange(strategies: str, steps: int) -> list[str]:
    named = ["--strategies", strategies, "--steps", str(steps)]
    return ["exchange", "--np", "2", *TWO_HOSTS, *named]


_ALLREDUCE = ["allreduce", "--np", "2", *TWO_HOSTS, "--sizes", "32M", "--rounds", "3"]
_FOUR_A_HOST = [
    *("scaling", "--np", "8", "--hosts", "node1:4,node2:4", "--steps", "6", "--rounds", "5"),
    *("--", *EIGHT_RANKS),
]
ROWS: Mapping[str, Callable[[PinnedHosts], bool]] = {
    "scaling-400": Bench(_scaling(3), mbit=400),
    "interleaved-400": Bench(_scaling(3, "--batch.interleave=2"), mbit=400),
    "scaling-2000": Bench(_scaling(5), mbit=2000),
    "scaling-unlimited": Bench(_scaling(5)),
    "scaling-float16": Bench(_scaling(3, "--exchange.wire=float16"), mbit=400),
    "interleaved-float16": Bench(
        _scaling(3, "--exchange.wire=float16", "--batch.interleave=2"), mbit=400
    ),
    "one-host": Bench(["scaling", "--np", "2", "--steps", "20", "--rounds", "5"], hosts=False),
    "flat-400": Bench([*_FOUR_A_HOST, "--exchange.hierarchical=off"], mbit=400),
    "hierarchical-400": Bench([*_FOUR_A_HOST, "--exchange.hierarchical=on"], mbit=400),
    "allreduce-unlimited": Bench(_ALLREDUCE),
    "allreduce-2000": Bench(_ALLREDUCE, mbit=2000),
    "exchange-100": Bench(_exchange("dense,float16,bfloat16,topk,powersgd,diloco", 400), mbit=100),
    "exact": Bench(
        ["exchange", "--np", "2", "--strategies", "dense,exact", "--steps", "40", "--rounds", "3"],
        hosts=False,
    ),
    "mixed-speed": mixed_speed.measure,
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    args = parser.parse_args(argv)
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f"{unknown[0]}: {names.metavar} is one of {names.help}")
    if reason := why_not():
        print(f"exchange-check: {reason}", file=sys.stderr)
        return 2
    failed = False
    with PinnedHosts() as hosts:
        for name in args.rows or ROWS:
            print(f"== {name}", flush=True)
            failed |= not ROWS[name](hosts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
