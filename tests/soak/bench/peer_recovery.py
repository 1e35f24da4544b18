"""Kill one of four ranks: hvdtrain's elastic horovodrun, and torchft with four replica groups.

torchft is installed without its own torch: it uses this environment's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.bench.elastic import recovery
from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.run_files.events_file import read_lines

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGES = REPOSITORY / "build/torchft"
LIGHTHOUSE = PACKAGES / "bin/torchft_lighthouse"
GROUP = Path(__file__).with_name("torchft_group.py")  # not imported: torchft is not on this path
PINS = """
    torchft-nightly==2026.10.26 googleapis-common-protos==1.76.0 opentelemetry-api==1.45.2
    opentelemetry-exporter-http-transport==0.66b2 opentelemetry-exporter-otlp-common==0.66b2
    opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-proto==1.45.2
    opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-sdk==1.45.2
    opentelemetry-semantic-conventions==0.66b2 protobuf==7.36.2
"""
RANKS = 4
PACE = "0.02"  # seconds of computing per rank and step
# Of the lighthouse: its defaults, and the shortest times at which four groups stay together here.
SETTINGS = {
    "torchft": [],
    "torchft, 1 s": ["--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000"],
}
_STEPS = 30  # before each kill
_PATIENCE_S = 120.0
_Value = TypeVar("_Value")


def peer_recovery(kills: int) -> Report:
    """Kill ranks of hvdtrain and of torchft: the pause is from the kill to the next step's end.

    Raises:
        BenchError: a job failed, or torchft cannot be installed.
    """
    _install()
    flags = ["--task=tests.support.tasks:Paced", "--batch.micro_size=2", "--runtime.threads=1"]
    # Three of four ranks compute one micro-batch each: as in torchft, a step takes no longer then.
    flags.append(f"--batch.global_size={2 * (RANKS - 1)}")
    os.environ["HVDTRAIN_TEST_PACE"] = PACE
    with tempfile.TemporaryDirectory() as root:
        ours = recovery(flags, _STEPS, kills, RANKS, f"localhost:{RANKS}", Path(root))
    metrics = [BenchMetric(f"hvdtrain: {one.name}", one.unit, one.values) for one in ours.metrics]
    for name, options in SETTINGS.items():
        with tempfile.TemporaryDirectory() as root, Groups(Path(root), options) as groups:
            pauses = [groups.pause_after_kill() for _ in range(kills)]
        metrics.append(BenchMetric(f"{name}: pause after a kill", "s", pauses))
    return Report("torchft-recovery", metrics, {"ranks": RANKS, "seconds_per_step": PACE})


def _install() -> None:
    if LIGHTHOUSE.exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    if subprocess.run([*pip, str(PACKAGES), *PINS.split()]).returncode:
        raise BenchError("torchft cannot be installed")


class Groups:
    """Four replica groups of torchft, and their lighthouse, inside the `with` block."""

    def __init__(self, root: Path, options: Sequence[str]) -> None:
        self._root, self._options = root, options
        path = os.pathsep.join([str(REPOSITORY), str(PACKAGES)])
        self._env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._groups: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Groups:
        lighthouse = [str(LIGHTHOUSE), "--min_replicas", "1"]
        lighthouse += ["--bind", "[::]:0", *self._options]
        self._start([sys.executable, *lighthouse], "lighthouse")
        self._env["TORCHFT_LIGHTHOUSE"] = self._wait(self._address, "the lighthouse")
        for number in range(RANKS):
            self._start_group(f"group{number}")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pause_after_kill(self) -> float:
        """Kill a group after some steps of all; return the seconds to the others' next step.

        Afterwards another group takes its place.
        """
        *_, victim = self._groups
        since = time.time()
        self._wait(lambda: len(self._whole(since)) >= _STEPS, "all groups train")
        self._groups.pop(victim).kill()
        killed = time.time()
        survivor, *_ = self._groups

        def next_step() -> float | None:
            before = [line["time"] for line in self._lines(survivor) if line["time"] <= killed]
            after = [line for line in self._lines(survivor) if line["time"] > killed]
            # Steps that were about to end when the group died do not count.
            without = [line["time"] for line in after if line["world_size"] < RANKS]
            return without[0] - max([*before, killed]) if without else None

        pause = self._wait(next_step, "the others' next step")
        self._start_group(f"{victim}+")
        return pause

    def _whole(self, since: float) -> list[dict[str, Any]]:
        """Lines of the first group's steps in which all groups took part."""
        lines = self._lines(next(iter(self._groups)))
        return [one for one in lines if one["time"] > since and one["world_size"] == RANKS]

    def _lines(self, group: str) -> list[dict[str, Any]]:
        path = self._root / f"{group}.jsonl"
        return list(read_lines(path)) if path.exists() else []

    def _start_group(self, name: str) -> None:
        script = [str(GROUP), str(self._root / f"{name}.jsonl"), PACE]
        self._groups[name] = self._start([sys.executable, *script], name)

    def _start(self, argv: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        with (self._root / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, env=self._env)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _address(self) -> str | None:
        found = re.search(r"listening on:? (\S+)", (self._root / "lighthouse.log").read_text())
        return found[1] if found else None

    def _wait(self, what: Callable[[], _Value | None], name: str) -> _Value:
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if value := what():
                return value
            time.sleep(0.05)
        log = "\n".join(path.read_text()[-2000:] for path in sorted(self._root.glob("*.log")))
        raise BenchError(f"waited {_PATIENCE_S:.0f} s for {name}; logs:\n{log}")
