"""A script that changes model and optimizer outside the blocks of its steps.

HVDTRAIN_TEST_WHAT: "target" (a moving average of a net, inside the model), "decay" (of parameters),
"averages" (an optimizer that switches between two sets of weights after the block), "switch" (it
switches back before the block) or "before" (it evaluates before the block).
HVDTRAIN_TEST_KILL: "block 5" or "evaluation 5": where and in which step rank 1 is killed, once: it
creates the file HVDTRAIN_TEST_KILLED. HVDTRAIN_TEST_PACE: seconds of pause in each step.
"""

import os
import signal
import time
from pathlib import Path

import torch
from pytorch_optimizer import ScheduleFreeSGD
from torch import nn

import hvdtrain

what = os.environ["HVDTRAIN_TEST_WHAT"]
killed = Path(os.environ.get("HVDTRAIN_TEST_KILLED", ""))
kill = os.environ.get("HVDTRAIN_TEST_KILL", "")
pace = float(os.environ.get("HVDTRAIN_TEST_PACE", "0"))

torch.manual_seed(0)
online = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
target = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)
model = nn.ModuleDict({"online": online, "target": target})
if what in ("averages", "switch"):
    optimizer = ScheduleFreeSGD(online.parameters(), lr=0.1)
    optimizer.train()
else:
    optimizer = torch.optim.AdamW(online.parameters(), lr=0.05)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
history: list[float] = []


def die_in(place: str) -> None:
    if f"{place} {step.index}" == kill and training.rank == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def validate(numbers: range) -> tuple[torch.Tensor, int]:
    die_in("evaluation")
    own = [*numbers]
    return (online(x[own]) - y[own]).square().sum(), len(own)


def validate_share() -> tuple[torch.Tensor, int]:
    return validate(training.share(256))


with hvdtrain.training(model, optimizer, [*zip(x, y, strict=True)]) as training:
    training.state["history"] = history
    for step in training:
        time.sleep(pace)
        if what == "before" and step.index % 2:
            history.append(training.evaluate(validate, items=256))
        if what == "switch":
            optimizer.train()
        with step:
            for inputs, wanted in step:
                error = online(inputs) - wanted - 0.1 * target(inputs)
                die_in("block")
                step.backward(error.square().mean())
        if what == "target":
            with torch.no_grad():
                for a, b in zip(target.parameters(), online.parameters(), strict=True):
                    a.lerp_(b, 0.1)
        if what == "decay":
            with torch.no_grad():
                for p in online.parameters():
                    p.mul_(0.99)
        if what in ("averages", "switch"):
            optimizer.eval()
        if what != "before":
            history.append(training.evaluate(validate, items=256))
            history.append(round(training.evaluate(validate_share), 3))
        if what == "averages":
            optimizer.train()
if training.rank == 0:
    print("END", history, sum(float(p.double().sum()) for p in model.parameters()))
