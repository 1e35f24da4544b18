"""A script that clips the gradient of the global batch by itself, in the block of a step.

HVDTRAIN_TEST_PAIRS=1: losses are (sum, weight) with weights that differ between micro-batches.
HVDTRAIN_TEST_KILL: index of the step in which rank 1 is killed before a backward pass, once: it
creates the file HVDTRAIN_TEST_KILLED.
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = 0.5 * x.sum(1, keepdim=True)
data = [*zip(x, y, strict=True)]
pairs = os.environ.get("HVDTRAIN_TEST_PAIRS") == "1"
killed = Path(os.environ.get("HVDTRAIN_TEST_KILLED", ""))
kill = int(os.environ.get("HVDTRAIN_TEST_KILL", "-1"))

with hvdtrain.training(model, optimizer, data) as training:
    for step in training:
        with step:
            for inputs, wanted in step:
                errors = (model(inputs) - wanted).square()
                weights = (inputs[:, :1] > 0).float() + 0.5
                loss = ((errors * weights).sum(), weights.sum()) if pairs else errors.mean()
                if step.index == kill and training.rank == 1 and not killed.exists():
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(loss)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            model[0].weight.grad.mul_(0.5)
            model[2].bias.grad = None  # frozen by hand: no update, no momentum
        training.log(step, own_norm=float(norm))
bias = float(model[2].bias.detach())
if training.rank == 0:
    print("END", bias, training.size)
