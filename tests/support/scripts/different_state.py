"""A loop that makes something different on each rank.

HVDTRAIN_TEST_WHAT: object, buffer or gradient.
"""

import os

import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = [(torch.ones(4) * i / 64, torch.ones(1)) for i in range(64)]
with hvdtrain.training(model, optimizer, data) as training:
    training.state["best"], training.state["queue"] = 0.0, torch.zeros(3)
    for step in training:
        with step:
            for x, y in step:
                step.backward((model(x) - y).square().mean())
            if os.environ["HVDTRAIN_TEST_WHAT"] == "gradient":
                model[0].weight.grad.mul_(1 + training.rank)
            if os.environ["HVDTRAIN_TEST_WHAT"] == "object":
                training.state["queue"][0] = training.rank
        if os.environ["HVDTRAIN_TEST_WHAT"] == "buffer":
            model[1].running_mean.add_(training.rank)
