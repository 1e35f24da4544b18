"""Tokens per second of gpt-small on one GPU beside a plain loop: `python -m tests.gpu.speed`.

Part of tests/gpu/check.py. hvdtrain's loop and a plain loop of the same model, optimizer and batch
take turns in one process, so that both meet the same clocks; one process per variant. MFU by the
same FLOPs and peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

_COMMON = (
    "--data.train hvdtrain/*/*.py --eval.every 0 --checkpoint.every 0 --telemetry.port 0"
    " --schedule.warmup_steps 5 --train.duration 100000 --integrity.replay_every 0"
)
_GPU = "--config gpt-small --batch.global_size 64 --batch.micro_size 16"
_TINY = (
    "--config gpt-nano --model.layers 2 --model.width 64 --model.heads 2"
    " --batch.global_size 8 --batch.micro_size 4"
)
# A small batch: without TF32, a step of 64 samples takes seconds.
_SMALL_BATCH = "--batch.global_size 16 --batch.micro_size 4"
# name -> (flags, whether the plain loop can do the same)
VARIANTS = {
    "bf16": ("--precision.name bf16", True),
    "bf16, compiled, fused": ("--precision.name bf16 --compile true --optim.fused true", True),
    "float32": (f"--precision.name float32 {_SMALL_BATCH}", True),
    "float32 as TF32": (f"--precision.name float32 --precision.tf32 true {_SMALL_BATCH}", True),
    "bf16-params": ("--precision.name bf16-params", False),
    "bf16, exact": ("--precision.name bf16 --exchange.name exact", False),
}
_WARM_UP = 5  # steps
_TURNS = 5
_SECONDS = 2.0  # of a turn


class PlainLoop:
    """The loop that a script would have: one device, accumulation, autocast, clipping."""

    def __init__(self, task: Any, dataset: Dataset[Any], config: Any, device: torch.device) -> None:
        from hvdtrain.optim.optimizer import build_optimizer

        self._task, self._device = task, device
        self._model: Any = task.model().to(device)
        if config.compile:
            for block in self._model.blocks:
                block.compile()
        self._optimizer = build_optimizer(config.optim, self._model)
        self._passes = config.batch.micro_batches
        self._autocast = config.precision.name == "bf16"
        self._batches = self._read(dataset, config.batch.micro_samples)

    def _read(self, dataset: Dataset[Any], size: int) -> Iterator[Tensor]:
        pinned = self._device.type == "cuda"
        while True:
            for batch in DataLoader(dataset, size, shuffle=True, drop_last=True, pin_memory=pinned):
                yield batch.to(self._device, non_blocking=True)

    def run(self, steps: int) -> None:
        """Train."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            for _ in range(self._passes):
                batch = next(self._batches)
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                    loss = self._task.loss(self._model, batch)["loss"]
                (loss / self._passes).backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()


def measure(flags: list[str], beside_plain: bool) -> dict[str, Any]:
    """Return ms/step of both loops in turns, hvdtrain's tokens per second and its MFU."""
    from hvdtrain.bench.app import AppLoop
    from hvdtrain.config import parse
    from hvdtrain.engine.flops import count
    from hvdtrain.run.data import build_data
    from hvdtrain.telemetry.gpu import peak_of

    settings = parse(flags)
    config = settings.config
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    synchronize: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    task, datasets = build_data(settings)
    loops: dict[str, Any] = {
        "hvdtrain": AppLoop(settings, Path(tempfile.mkdtemp()), (task, datasets))
    }
    if beside_plain:
        loops["plain"] = PlainLoop(task, datasets.train, config, device)
    began = time.perf_counter()
    for loop in loops.values():
        loop.run(_WARM_UP)
    synchronize()
    warm_up = time.perf_counter() - began
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(_TURNS):
        for name, loop in loops.items():
            began, steps = time.perf_counter(), 0
            while time.perf_counter() - began < _SECONDS:
                loop.run(1)
                steps += 1
            synchronize()
            found[name].append(1000 * (time.perf_counter() - began) / steps)
    step = median(found["hvdtrain"]) / 1000
    peak = peak_of(device, torch.bfloat16 if "bf16" in config.precision.name else torch.float32)
    flops = count(task, task.model(), datasets.train, config.batch.micro_samples)
    tokens = config.batch.global_size * (len(datasets.train[0]) - 1)
    return {
        "tokens_per_second": round(tokens / step),
        "mfu": round(flops * config.batch.micro_batches / step / peak, 4)
        if flops and peak
        else None,
        "ms_per_step": {name: [round(ms, 2) for ms in turns] for name, turns in found.items()},
        "plain / hvdtrain": _ratio(found),
        "warm_up_seconds": round(warm_up, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }


def _ratio(found: Mapping[str, list[float]]) -> float | None:
    """Median over the turns of the plain loop's step time by hvdtrain's: 1 is equal, 2 twice as
    fast."""
    if "plain" not in found:
        return None
    return round(median(p / h for p, h in zip(found["plain"], found["hvdtrain"], strict=True)), 4)


def main() -> int:
    """Return 0: everything was measured; 1: something was not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--variant", choices=VARIANTS, help="measure in this process")
    args = parser.parse_args()
    if args.variant:
        flags, beside_plain = VARIANTS[args.variant]
        common = f"{_COMMON} {_GPU if args.gpus else _TINY}"
        print("measured", json.dumps(measure(f"{common} {flags}".split(), beside_plain)))
        return 0
    until = time.monotonic() + args.seconds
    rows: dict[str, Any] = {}
    for name in VARIANTS:
        left = until - time.monotonic()
        if left < 10:
            rows[name] = {"failed": "no time left"}
        else:
            rows[name] = _in_a_process(name, left)
        print(f"{name}: {json.dumps(rows[name])}", flush=True)
        (args.out / "speed.json").write_text(json.dumps(rows, indent=1))
    return int(any("failed" in row for row in rows.values()))


def _in_a_process(name: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.gpu.speed", *sys.argv[1:], "--variant", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(seconds, 120))
    except subprocess.TimeoutExpired:
        return {"failed": "no time left"}
    found = [line[9:] for line in done.stdout.splitlines() if line.startswith("measured ")]
    return json.loads(found[-1]) if found else {"failed": done.stderr.strip()[-600:]}


if __name__ == "__main__":
    sys.exit(main())
