"""Two hosts, of which another program uses half of one: steps with `batch.deal` even and speed.

Reports the throughput as a fraction of the sum of the ranks' speeds, measured when each rank trains
alone, both at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from hvdtrain.bench.processes import MARK, QUIET, launch, worker
from tests.soak.pinned import NAMES, PinnedHosts

# Large enough that the exchange, which the sum of the speeds excludes, is a small part of a step.
MICRO_SIZE = 8
GLOBAL_SIZE = 12 * MICRO_SIZE
STEPS = 50
ROUNDS = 3
DEALT = 30  # steps until speeds are known
FLAGS = [f"--batch.global_size={GLOBAL_SIZE}", f"--batch.micro_size={MICRO_SIZE}", *QUIET]
LIMIT_S = 900.0


def measure(hosts: PinnedHosts) -> bool:
    """Measure and print; return whether the losses of both assignments agree."""
    hosts.limit(None)
    found: dict[str, list[float]] = {"even": [], "speed": []}
    losses: dict[str, list[float]] = {}
    with _half_of(hosts, NAMES[1]):
        for number in range(ROUNDS):
            fastest = GLOBAL_SIZE / sum(_rates_alone(hosts))
            for deal, shares in found.items():
                seconds, losses[deal] = _trained(hosts, deal, f"{deal}-{number}")
                shares.append(fastest / seconds)
                print(f"{deal}: {seconds:.3f} s a step, ideal {fastest:.3f}", flush=True)
    for deal, shares in found.items():
        between = f"{min(shares):.3f} to {max(shares):.3f}"
        print(f"| {deal} | {median(shares):.3f} of the sum of the speeds ({between}) |")
    apart = max(abs(a - b) / b for a, b in zip(losses["speed"], losses["even"], strict=True))
    print(f"losses of {STEPS} steps differ by {apart:.1e} at most", flush=True)
    return apart < 1e-6


@contextmanager
def _half_of(hosts: PinnedHosts, host: str) -> Iterator[None]:
    command = hosts.pinned(host, [sys.executable, "-c", "while True: pass"])
    with subprocess.Popen(command) as busy:
        try:
            yield
        finally:
            busy.kill()


def _rates_alone(hosts: PinnedHosts) -> list[float]:
    """Return samples per second of one rank on each host, measured at the same time."""
    command = worker("rate-hvdtrain", 8, FLAGS)

    def rate(host: str) -> float:
        done = hosts.run(host, command, LIMIT_S)
        assert done.returncode == 0, done
        line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
        return float(json.loads(line)["samples_per_second"])

    with ThreadPoolExecutor(len(NAMES)) as pool:
        return list(pool.map(rate, NAMES))


def _trained(hosts: PinnedHosts, deal: str, name: str) -> tuple[float, list[float]]:
    """Return (median step time once speeds are known, losses)."""
    flags = [f"--batch.deal={deal}", f"--train.duration={STEPS}", *FLAGS]
    where = [f"--run.root={hosts.shared}/runs", f"--run.id={name}"]
    train = [sys.executable, "-m", "hvdtrain.train", *flags, *where]
    command = launch("gloo", 2, train, ",".join(f"{host}:1" for host in NAMES))
    done = hosts.run(NAMES[0], command, LIMIT_S)
    assert done.returncode == 0, done
    text = Path(hosts.shared, "runs", name, "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    seconds = median(line["step_seconds"] for line in lines[DEALT:])
    return seconds, [line["loss"] for line in lines]
