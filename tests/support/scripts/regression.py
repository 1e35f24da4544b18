"""A regression with a scheduler, an evaluation and values of its own.

HVDTRAIN_TEST_PACE: seconds of pause after each step. HVDTRAIN_TEST_FINISH: index of the step after
which rank 0 asks for the end.
"""

import os
import time

import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)
history: list[int] = []  # the script's own name for what it registers


def validate() -> tuple[torch.Tensor, int]:
    own = [*training.share(256)]
    return (model(x[own]) - y[own]).square().sum().double(), len(own)


with hvdtrain.training(model, optimizer, [*zip(x, y, strict=True)], metrics=["mae"]) as training:
    training.state["scheduler"] = scheduler
    training.state["best"] = float("inf")
    training.state["evaluations"] = 0
    training.state["history"] = history
    for step in training:
        with step:
            for inputs, wanted in step:
                error = model(inputs) - wanted
                step.backward(error.square().mean(), mae=error.abs().mean())
        time.sleep(float(os.environ.get("HVDTRAIN_TEST_PACE", "0")))
        scheduler.step()
        history.append(step.index)
        if training.rank == 0 and str(step.index) == os.environ.get("HVDTRAIN_TEST_FINISH"):
            training.finish()
        if step.index % 5 == 4:
            loss = training.evaluate(validate)
            training.state["best"] = min(training.state["best"], loss)
            training.state["evaluations"] += 1
            training.log(step, validation_loss=loss)
kept = training.state
if training.rank == 0:
    assert history == [*range(len(history))] == kept["history"]
    print("END", kept["best"], kept["evaluations"], optimizer.param_groups[0]["lr"], len(history))
