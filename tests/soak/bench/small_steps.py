"""Cost of one step of small models: plain torch, Lightning, Accelerate, DDP, and hvdtrain.

Lightning is installed without its own torch: it uses this environment's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from hvdtrain.bench.jobs import ControlledJob, cpu_per_step, take_turns, train
from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.launch.commands import horovodrun, mpirun
from tests.soak.bench import small_steps_ranks
from tests.soak.bench.small_steps_ranks import BATCH, LIGHTNING, TASKS, WIDTHS

PIN = "pytorch-lightning==2.6.6"
PINS = [PIN, "lightning-utilities==0.15.3", "torchmetrics==1.9.0"]
RANKS = 2
_WARM_UP_STEPS = 100
_LAUNCHERS: Mapping[str, Callable[[int, Sequence[str]], list[str]] | None] = {
    "": None, "Gloo": horovodrun, "MPI": mpirun,
}  # fmt: skip


def small_steps(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Let ten jobs on this host take turns, for one model after the other.

    Args:
        flags: keys of hvdtrain's jobs.

    Raises:
        BenchError: a job failed, or Lightning cannot be installed.
    """
    _install()
    metrics = []
    for model in WIDTHS:
        metrics += _metrics_of(model, flags, steps, rounds)
    facts = {"batch": BATCH, "ranks_with_DDP_or_a_launcher": RANKS}
    versions = {"Lightning": PIN.partition("==")[2], "Accelerate": version("accelerate")}
    return Report("small-steps", metrics, {**facts, **versions})


def _install() -> None:
    if (LIGHTNING / "pytorch_lightning").exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    if subprocess.run([*pip, str(LIGHTNING), *PINS]).returncode:
        raise BenchError("Lightning cannot be installed")


def _metrics_of(model: str, flags: Sequence[str], steps: int, rounds: int) -> list[BenchMetric]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        jobs = {}
        for name, (argv, root) in _commands(model, flags, Path(directory)).items():
            (root / "bench").mkdir(parents=True)
            jobs[name] = stack.enter_context(ControlledJob(argv, root, patient=True))
            jobs[name].wait_for_more(_WARM_UP_STEPS)
            jobs[name].freeze()
        turns = take_turns(jobs, steps, rounds)
        cpu = {name: cpu_per_step(job, turns[name]) for name, job in jobs.items()}
    wall = {name: [turn.step for turn in turns[name]] for name in jobs}
    metrics = []
    for name in jobs:
        for clock, seconds in (("CPU", cpu[name]), ("wall", wall[name])):
            values = [1000 * value for value in seconds]
            metrics.append(BenchMetric(f"{model}: {name}, {clock}", "ms/step", values))
    return [*metrics, *_differences(model, cpu), *_ratios(model, wall)]


def _commands(
    model: str, flags: Sequence[str], directory: Path
) -> dict[str, tuple[list[str], Path]]:
    """Command line and directory of each job by name."""
    script = small_steps_ranks.__file__
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    commands = {}
    for name, words in {"plain": [], "Lightning": [], "Accelerate": [], "DDP": torchrun}.items():
        root = directory / name
        metrics = str(root / "bench/metrics.jsonl")
        argv = [sys.executable, *words, script, name.lower(), model, metrics]
        commands[name] = argv, root
    for where, launch in _LAUNCHERS.items():
        micro_size = BATCH // (RANKS if launch else 1)
        sizes = [f"--batch.global_size={BATCH}", f"--batch.micro_size={micro_size}"]
        keys = [*sizes, "--optim.clip_norm=0", "--runtime.threads=1", *flags]
        for kind in ("loop", "task"):
            root = directory / f"{kind}-{where or 'alone'}"
            argv = train(sys.executable, keys, root)
            if kind == "loop":
                argv = [sys.executable, script, kind, model, *argv[3:]]
            else:
                argv.append(f"--task={small_steps_ranks.__name__}:{TASKS[model]}")
            name = f"{kind}, {where}" if where else kind
            commands[name] = launch(RANKS, argv) if launch else argv, root
    return commands


def _differences(model: str, cpu: Mapping[str, Sequence[float]]) -> list[BenchMetric]:
    """CPU time beyond the plain loop's; and the loop's beyond Lightning's and Accelerate's."""
    metrics = []
    for one, other, at_most in (
        ("Lightning", "plain", None),
        ("Accelerate", "plain", None),
        ("task", "plain", None),
        ("loop", "plain", 0.30),
        ("loop", "Lightning", 0.0),
        ("loop", "Accelerate", 0.0),
    ):
        values = [1000 * (a - b) for a, b in zip(cpu[one], cpu[other], strict=True)]
        name = f"{model}: {one} - {other}, CPU"
        metrics.append(BenchMetric(name, "ms/step", values, at_most=at_most))
    return metrics


def _ratios(model: str, wall: Mapping[str, Sequence[float]]) -> list[BenchMetric]:
    """Step time of DDP over that of hvdtrain on 2 ranks."""
    metrics = []
    for name in wall:
        if not name.endswith(("Gloo", "MPI")):
            continue
        values = [a / b for a, b in zip(wall["DDP"], wall[name], strict=True)]
        at_least = 1.05 if model == "medium" else None
        ratio = f"{model}: DDP / {name}, wall"
        metrics.append(BenchMetric(ratio, "x", values, at_least=at_least))
    return metrics
