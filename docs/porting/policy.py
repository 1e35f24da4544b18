import torch
from torch import nn
from torch.distributions import Categorical

import hvdtrain


class Corridor:
    """Walk to the end of a corridor whose doors open to the left or to the right."""

    length = 6

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.doors = torch.randint(2, (self.length,), generator=generator)
        self.place = 0

    def observation(self):
        return torch.tensor([float(self.doors[self.place]), self.place / self.length])

    def step(self, action):
        passed = action == self.doors[self.place]
        self.place += 1
        return float(passed), self.place == self.length


torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
config = {"batch.global_size": 24, "train.duration": 60}


def play(seed, baseline):
    """Return the loss of an episode, and its reward."""
    world, terms, rewards, done = Corridor(seed), [], [], False
    while not done:
        choice = Categorical(logits=policy(world.observation()))
        action = choice.sample()
        reward, done = world.step(action)
        terms.append(-choice.log_prob(action))
        rewards.append(reward)
    to_go = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    return (torch.stack(terms) * (to_go - baseline)).sum(), torch.tensor(sum(rewards))


with hvdtrain.training(policy, optimizer, config=config, metrics=["reward"]) as training:
    training.state["baseline"] = 0.0
    for step in training:
        baseline = training.state["baseline"]
        with step:
            for seeds in step:
                episodes = [play(seed, baseline) for seed in seeds.tolist()]
                loss, reward = (
                    torch.stack(values).mean() for values in zip(*episodes, strict=True)
                )
                step.backward(loss, reward=reward)
        training.state["baseline"] = 0.9 * baseline + 0.1 * step.result["reward"] / 2
