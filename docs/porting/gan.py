import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged

import hvdtrain


def network(outputs):
    layers = nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)
    return nn.Sequential(*layers)


torch.manual_seed(0)
data = torch.randn(1024, 2) * 0.3 + torch.tensor([2.0, -1.0])
torch.manual_seed(1)
generator, critic = network(2), network(1)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizers = {"generator": generator_optimizer, "critic": critic_optimizer}
config = {"batch.global_size": 32, "train.duration": "2epochs"}
model = nn.ModuleList([generator, critic])
with hvdtrain.training(model, optimizers, data, config=config) as training:
    for step in training:
        with step:
            for real in step:
                fake = generator(torch.randn(len(real), 2))
                true, false = torch.ones(len(real), 1), torch.zeros(len(real), 1)
                critic_loss = judged(critic(real), true) + judged(critic(fake.detach()), false)
                step.backward(critic_loss, optimizer="critic")
                generator_loss = judged(critic(fake), true)
                step.backward(generator_loss, optimizer="generator")
