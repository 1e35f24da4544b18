"""Two runs one after the other in one process, such as the folds of a cross-validation.

HVDTRAIN_TEST_NAMES: their names, separated by a space.
"""

import os
import sys

import torch

import hvdtrain

data = [(torch.ones(2) * i, torch.ones(1)) for i in range(64)]
for name in os.environ.get("HVDTRAIN_TEST_NAMES", "first second").split():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    words = [*sys.argv[1:], "--run.id", name]
    with hvdtrain.training(model, optimizer, data, argv=words) as training:
        for step in training:
            with step:
                for x, y in step:
                    step.backward((model(x) - y).square().mean())
