"""Cost of replays: two jobs on 2 ranks of this host take turns, with replays and without."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from hvdtrain.bench.jobs import ControlledJob, step_time_ratios, take_turns, train
from hvdtrain.bench.processes import BenchError
from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.engine.config import DEFAULT_REPLAY_EVERY
from hvdtrain.launch.commands import horovodrun

_RANKS = 2
_WARM_UP_STEPS = 15
_EVERY = 5
_JOBS = {f"every {_EVERY}": _EVERY, f"every {DEFAULT_REPLAY_EVERY}": DEFAULT_REPLAY_EVERY, "off": 0}


def replays(flags: Sequence[str], steps: int, rounds: int) -> Report:
    """Compare step times with replays every 5 steps, every 200 steps and without.

    In a job that replays every 5 steps, steps with replays are also compared with the steps
    between them: this gives the cost of one replay, of which the default has 1 in 200 steps.

    Raises:
        BenchError: the losses of the jobs differ.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        jobs = {}
        for name, every in _JOBS.items():
            root = Path(directory) / name.replace(" ", "-")
            root.mkdir()
            own = [*flags, "--runtime.threads=1", f"--integrity.replay_every={every}"]
            job = ControlledJob(
                horovodrun(_RANKS, train(sys.executable, own, root)), root, patient=True
            )
            jobs[name] = stack.enter_context(job)
            job.wait_for_more(_WARM_UP_STEPS)
            job.freeze()
        turns = take_turns(jobs, steps, rounds)
        lines = {name: job.lines() for name, job in jobs.items()}
    losses = [[line["loss"] for line in found] for found in lines.values()]
    if any(len({*step}) > 1 for step in zip(*losses, strict=False)):
        raise BenchError("the losses of the jobs differ")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for line in lines[f"every {_EVERY}"][_WARM_UP_STEPS:]:
        seconds[line["step"] % _EVERY == 0].append(line["step_seconds"])
    plain = median(seconds[False])
    costs = [100 * (one - plain) / (DEFAULT_REPLAY_EVERY * plain) for one in seconds[True]]
    metrics = [
        *(
            BenchMetric(name, "ms/step", [turn.step * 1000 for turn in turns[name]])
            for name in turns
        ),
        *(
            BenchMetric(f"{name} / off", "x", step_time_ratios(turns, name, "off"))
            for name in (f"every {_EVERY}", f"every {DEFAULT_REPLAY_EVERY}")
        ),
        BenchMetric(
            f"one replay in {DEFAULT_REPLAY_EVERY} steps", "% of the steps", costs, at_most=1.0
        ),
    ]
    return Report(
        "replays", metrics, {"steps_of_bitwise_identical_losses": min(map(len, losses))}
    )  # fmt: skip
