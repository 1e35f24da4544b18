"""A loop that draws random numbers everywhere: mixup, an augmentation, a noisy evaluation, and an
optimizer.

HVDTRAIN_TEST_WHOLE: the evaluation is one function of a rank's share of the data.
"""

import os
import random

import numpy as np
import torch
from torch import nn

import hvdtrain


class Noisy(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=0.01)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1))
optimizer = Noisy(model.parameters(), lr=0.01)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)


def error_of(numbers: list[int]) -> tuple[torch.Tensor, int]:
    noisy = x[numbers] + torch.randn(len(numbers), 4) * np.random.rand() * random.random()
    return (model(noisy) - y[numbers]).square().sum().double(), len(numbers)


def validate() -> tuple[torch.Tensor, int]:
    return error_of([*training.share(50)])


with hvdtrain.training(model, optimizer, [*zip(x, y, strict=True)]) as training:
    training.state["drawn"] = 0.0
    for step in training:
        scale = random.random()
        with step:
            share, shift = np.random.beta(0.4, 0.4), torch.rand(4)
            for inputs, wanted in step:
                mixed = share * inputs + (1 - share) * inputs.flip(0) * scale + shift
                step.backward((model(mixed) - wanted).square().mean())
            later = random.random()
            if training.rank == 0:
                torch.rand(3), np.random.rand(), random.random()
        training.state["drawn"] = torch.rand(()).item() + np.random.rand() + later
        if step.index % 3 == 2:
            whole = "HVDTRAIN_TEST_WHOLE" in os.environ
            loss = training.evaluate(validate) if whole else training.evaluate(error_of, items=50)
            again = training.evaluate(error_of, items=50)
            training.log(step, validation_loss=loss, again=again, drawn=training.state["drawn"])
if training.rank == 0:
    print("END", training.state["drawn"])
