"""A loop whose dataset is a generator."""

import torch

import hvdtrain

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = (torch.ones(1) for _ in range(64))
with hvdtrain.training(model, optimizer, samples) as training:  # type: ignore[arg-type]
    for step in training:
        with step:
            for batch in step:
                step.backward(model(batch).square().mean())
