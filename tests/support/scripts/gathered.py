"""A regression that scales its gradients by a sum of all ranks, which the argument chooses.

sum: each rank adds its micro-batches, and all_reduce the ranks. rows: as in docs/collectives.md.
"""

import sys

import torch
from torch import nn

import hvdtrain
from hvdtrain import comm

torch.manual_seed(0)
x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

with hvdtrain.training(model, optimizer, x) as training:
    for step in training:
        with step:
            numbers, rows = [], []
            for turn, inputs in enumerate(step):
                loss = (model(inputs) - inputs.roll(1, -1)).square().mean()
                step.backward(loss)
                numbers.append(turn * training.size + training.rank)
                rows.append(loss.detach() * inputs.norm())
            if "sum" in sys.argv:
                total = comm.all_reduce(sum(rows, torch.zeros(())))
            else:
                order = comm.all_gather(torch.tensor(numbers)).argsort()
                total = comm.all_gather(torch.stack(rows))[order].sum(0)
            for parameter in model.parameters():
                parameter.grad.mul_(total)
