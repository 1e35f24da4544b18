"""A script's own loop against the same training as a task, and as a loop written for Horovod."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hvdtrain.bench.jobs import ControlledJob, median_range, step_time_ratios, take_turns, train
from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.launch.commands import horovodrun
from tests.soak.bench import own_loop_ranks

_RANKS = 2
_WARM_UP_STEPS = 15


def own_loop(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Let three jobs on 2 ranks of this host take turns.

    Raises:
        BenchError: the losses of the loop and of the task differ.
    """
    script = own_loop_ranks.__file__
    batch = own_loop_ranks.MICRO_SIZE * own_loop_ranks.MICRO_BATCHES
    sizes = [f"--batch.global_size={batch}", f"--batch.micro_size={own_loop_ranks.MICRO_SIZE}"]
    keys = [*sizes, "--optim.clip_norm=0", "--runtime.threads=1", *flags]
    task = f"--task={own_loop_ranks.__name__}:{own_loop_ranks.Mlp.__name__}"
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        roots = {name: Path(directory) / name for name in ("task", "loop", "horovod")}
        commands = {
            "task": [*train(sys.executable, keys, roots["task"]), task],
            "loop": [sys.executable, script, "loop", *train("", keys, roots["loop"])[3:]],
            "horovod": [sys.executable, script, "horovod", str(roots["horovod"] / "bench")],
        }
        jobs = {}
        for name, command in commands.items():
            roots[name].mkdir()
            job = ControlledJob(horovodrun(_RANKS, command), roots[name], patient=True)
            jobs[name] = stack.enter_context(job)
            job.wait_for_more(_WARM_UP_STEPS)
            job.freeze()
        turns = take_turns(jobs, steps, rounds)
        losses = [[line["loss"] for line in jobs[name].lines()] for name in ("loop", "task")]
    if any(own != other for own, other in zip(*losses, strict=False)):
        raise BenchError("the losses of the loop and of the task differ")
    of_task = step_time_ratios(turns, "loop", "task")
    of_horovod = step_time_ratios(turns, "loop", "horovod")
    metrics = [
        *(
            BenchMetric(name, "ms/step", [turn.step * 1000 for turn in turns[name]])
            for name in turns
        ),
        BenchMetric("loop / task", "x", of_task, at_most=1.01),
        BenchMetric("loop / horovod", "x", of_horovod, at_most=1.00),
    ]
    ranges = {
        name: "{:.4f} to {:.4f} (95 %)".format(*median_range(values))
        for name, values in (("loop / task", of_task), ("loop / horovod", of_horovod))
    }
    same = min(map(len, losses))
    return Report("own-loop", metrics, {**ranges, "steps_of_bitwise_identical_losses": same})
