"""A loop that trains parts of third parties side by side: models, optimizers and their schedules.

The loss is the sum of the parts' losses, so no part changes another part's gradients.

HVDTRAIN_TEST_PARTS: names of the parts, as JSON. HVDTRAIN_TEST_END: the tensors at the end are
saved there, with the rank's number appended. HVDTRAIN_TEST_KILL: rank 1 is killed once in a step,
after it has created this file; the other ranks then wait for a new process, and make slow steps
until it has joined.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import hvdtrain
from tests.support.third_parties import built
from tests.support.third_parties.part import INPUTS

KILLED_IN, RANKS, JOIN_SECONDS = 5, 3, 60
parts = built(json.loads(os.environ["HVDTRAIN_TEST_PARTS"]))
killed = Path(os.environ.get("HVDTRAIN_TEST_KILL", os.devnull))
joining = killed.with_suffix(".replaced")
if killed.is_file():
    joining.touch()
numbers = {name: str(number) for number, name in enumerate(parts)}  # names of modules have no dots
model = nn.ModuleDict({numbers[name]: part.model for name, part in parts.items()})
optimizers = {name: part.optimizer for name, part in parts.items()}
x = torch.randn(256, INPUTS, generator=torch.Generator().manual_seed(1))
data = [*zip(x, x.sum(1, keepdim=True), strict=True)]

with hvdtrain.training(model, optimizers, data) as training:
    for name, part in parts.items():
        training.state |= {f"{name}: {key}": value for key, value in part.state.items()}
    for step in training:
        for part in parts.values():
            part.before()
        with step:
            for inputs, wanted in step:
                if step.index == KILLED_IN and training.rank == 1 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(sum(part.loss(inputs, wanted) for part in parts.values()))
        if step.index > KILLED_IN and killed.is_file() and training.size < RANKS:
            deadline = time.monotonic() + JOIN_SECONDS
            while not joining.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            time.sleep(1)
        for part in parts.values():
            part.after(step.index)
ends = {name: part.end() for name, part in parts.items()}
torch.save(ends, f"{os.environ['HVDTRAIN_TEST_END']}.{training.rank}")
