"""A script whose micro-batches use different parameters: most ranks lack gradients of some."""

import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
trunk = nn.Linear(4, 4)
heads = nn.ModuleList([nn.Linear(4, 1) for _ in range(5)])  # the last one is never used
model = nn.ModuleList([trunk, heads])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = [*torch.randn(256, 4, generator=torch.Generator().manual_seed(1))]

with hvdtrain.training(model, optimizer, data) as training:
    for step in training:
        with step:
            for batch in step:
                head = heads[int(batch.sum() * 1000) % 4]
                step.backward((head(trunk(batch)) - batch.sum(1, keepdim=True)).square().mean())
