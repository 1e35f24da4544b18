"""A scheduler that the script does not register."""

import sys

import torch

import hvdtrain

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
with hvdtrain.training(model, optimizer, [*torch.ones(64, 2)]) as training:
    if "--register" in sys.argv:
        training.state["scheduler"] = scheduler
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
        scheduler.step()
