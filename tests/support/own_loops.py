"""Runs of the scripts in tests/support/scripts, which have loops of their own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import runs, warm
from tests.support.job import Finished
from tests.support.scripts import misuse

PRELOAD = "torch._dynamo"  # as soon as a script makes an optimizer: seconds of CPU time
SCRIPTS = Path(misuse.__file__).parent
FLAGS = [
    *("--train.duration", "12", "--batch.global_size", "12", "--batch.micro_size", "2"),
    *("--telemetry.port", "0"),
]
EXACT = ["--exchange.name", "exact", "--runtime.threads", "1"]
SECONDS = 90
SHORT_LOOP = """\
import torch, hvdtrain
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hvdtrain.training(model, optimizer, [torch.ones(2)] * 64) as training:
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
"""


def start(root: Path, run: str, script: str, launcher: str, *flags: str, **env: str) -> Finished:
    """Run a script as the run `run` in `root`; return its output and exit code."""
    argv = [*FLAGS, *flags, "--run.root", str(root), "--run.id", run]
    ranks = int([*launcher.split(":"), "1"][1])
    command = [warm.python(ranks, PRELOAD), str(SCRIPTS / script)]
    return runs.start(root / "output", argv, launcher, env, command).wait(SECONDS)


def train(root: Path, run: str, script: str, launcher: str = "", *flags: str, **env: str) -> str:
    """Run a script to its end; return what it has printed after "END"."""
    done = start(root, run, script, launcher, *flags, **env)
    assert done.returncode == 0, done
    return "".join(re.findall(r"END (.*)", done.stdout))


def error(root: Path, run: str, script: str, launcher: str = "", *flags: str, **env: str) -> str:
    """Run a script that is refused; return the message, which each rank may print."""
    done = start(root, run, script, launcher, *flags, **env)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    found = {*re.findall(r"hvdtrain: error: (?:rank \d+ on \S+: )?(.*)", done.stderr)}
    assert len(found) == 1, done
    return str(found.pop())


def curve(directory: Path, *more: str) -> list[tuple[object, ...]]:
    """Return loss and gradient norm of each step, and further values of its line."""
    names = ("step", "loss", "grad_norm", *more)
    return [tuple(line.get(name) for name in names) for line in runs.metrics(directory)]
