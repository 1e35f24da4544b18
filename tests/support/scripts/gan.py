"""A GAN: two optimizers of one model, whose gradients come from two losses."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged

import hvdtrain


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))


torch.manual_seed(0)
gan = Gan()
optimizers = {
    "generator": torch.optim.Adam(gan.generator.parameters(), 1e-3),
    "critic": torch.optim.Adam(gan.critic.parameters(), 2e-3),
}
data = torch.randn(256, 2, generator=torch.Generator().manual_seed(1)) + 3

with hvdtrain.training(gan, optimizers, [*data]) as training:
    for step in training:
        with step:
            for real in step:
                fake = gan.generator(torch.randn(len(real), 2))
                true, false = torch.ones(len(real), 1), torch.zeros(len(real), 1)
                loss = judged(gan.critic(real), true) + judged(gan.critic(fake.detach()), false)
                step.backward(loss, optimizer="critic")
                step.backward(judged(gan.critic(fake), true), optimizer="generator")
