"""Tokens per second of gpt-small on one GPU, hvdtrain and a plain loop in turns.

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
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

_COMMON = (
    "--data.train hvdtrain/*/*.py --eval.every 0 --checkpoint.every 0 --telemetry.port 0"
    " --schedule.warmup_steps 5 --train.duration 4000 --integrity.replay_every 0"
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
    "bf16, exact": ("--precision.name bf16 --exchange.name exact --runtime.threads 4", False),
}
_WARM_UP = 5  # steps
_TURNS = 5
_SECONDS = 2.0  # of a turn


def measure(flags: list[str], with_plain: bool) -> dict[str, Any]:
    """Return ms/step of both loops in turns, hvdtrain's tokens per second and its MFU."""
    from hvdtrain.bench.app import AppLoop
    from hvdtrain.bench.plain import PlainLoop
    from hvdtrain.config import parse
    from hvdtrain.engine.flops import count
    from hvdtrain.process.data import build_data
    from hvdtrain.telemetry.gpu import peak_of

    settings = parse(flags)
    config = settings.config
    task, datasets = build_data(settings)
    app = AppLoop(settings, Path(tempfile.mkdtemp()), (task, datasets))
    loops: dict[str, AppLoop | PlainLoop] = {"hvdtrain": app}
    if with_plain:
        loops["plain"] = plain = PlainLoop(task, datasets.train, config, app.device)
        if config.compile:
            blocks: Any = plain.model.blocks
            for block in blocks:
                block.compile()
    warm_up = sum(loop.run(_WARM_UP) for loop in loops.values())
    steps = {name: max(1, round(3 * _SECONDS / loop.run(3))) for name, loop in loops.items()}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(_TURNS):
        for name, loop in loops.items():
            found[name].append(loop.run(steps[name]) / steps[name])
    step = median(found["hvdtrain"])
    peak = peak_of(app.device, torch.bfloat16 if "bf16" in config.precision.name else torch.float32)
    flops = count(task, task.model(), datasets.train, config.batch.micro_samples)
    tokens = config.batch.global_size * (len(datasets.train[0]) - 1)
    return {
        "tokens_per_second": round(tokens / step),
        "mfu": round(flops * config.batch.micro_batches / step / peak, 4)
        if flops and peak
        else None,
        "ms_per_step": {name: [round(1000 * t, 2) for t in turns] for name, turns in found.items()},
        "plain / hvdtrain": _ratio(found),
        "warm_up_seconds": round(warm_up, 1),
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
        flags, with_plain = VARIANTS[args.variant]
        common = f"{_COMMON} {_GPU if args.gpus else _TINY}"
        print("measured", json.dumps(measure(f"{common} {flags}".split(), with_plain)))
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(seconds, 150))
    except subprocess.TimeoutExpired:
        return {"failed": f"took more than {min(seconds, 150):.0f} s"}
    found = [line[9:] for line in done.stdout.splitlines() if line.startswith("measured ")]
    return json.loads(found[-1]) if found else {"failed": done.stderr.strip()[-600:]}


if __name__ == "__main__":
    sys.exit(main())
