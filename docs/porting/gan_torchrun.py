import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def network(outputs):
    layers = nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs)
    return nn.Sequential(*layers)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = torch.randn(1024, 2) * 0.3 + torch.tensor([2.0, -1.0])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
torch.manual_seed(1)
generator, critic = DistributedDataParallel(network(2)), DistributedDataParallel(network(1))
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
steps = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for real in loader:
        fake = generator(torch.randn(len(real), 2))
        true, false = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        critic_loss = judged(critic(real), true) + judged(critic(fake.detach()), false)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        generator_loss = judged(critic(fake), true)
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        steps += 1
        if dist.get_rank() == 0 and steps % 10 == 0:
            print(steps, critic_loss.item(), generator_loss.item())
dist.destroy_process_group()
