"""Three optimizers with three losses from one graph, as in a VAE with a critic."""

import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("encoder", "decoder", "critic")})
optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in model.items()}
data = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))

with hvdtrain.training(model, optimizers, data) as training:
    for step in training:
        with step:
            for x in step:
                found = model["decoder"](model["encoder"](x).tanh())
                difference = (found - x).square().mean()
                step.backward(difference, optimizer="encoder")
                step.backward(difference, optimizer="decoder")
                step.backward(model["critic"](found.detach()).square().mean(), optimizer="critic")
