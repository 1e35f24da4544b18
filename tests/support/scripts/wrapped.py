"""A model that the script wraps: HVDTRAIN_TEST_WRAPPER is "", compile, layer, parallel or both."""

import os

import torch
from torch import nn
from torch.distributed import HashStore, init_process_group
from torch.nn.parallel import DataParallel, DistributedDataParallel

import hvdtrain


def wrapped(model: nn.Module) -> nn.Module:
    match os.environ["HVDTRAIN_TEST_WRAPPER"]:
        case "compile":
            return torch.compile(model, backend="eager")
        case "layer":
            model[0] = torch.compile(model[0], backend="eager")
        case "parallel":
            return DataParallel(model)
        case "both":
            init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            return torch.compile(DistributedDataParallel(model), backend="eager")
    return model


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
model = wrapped(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
data = [*zip(x, x.sum(1, keepdim=True), strict=True)]

with hvdtrain.training(model, optimizer, data) as training:
    for step in training:
        with step:
            for inputs, wanted in step:
                step.backward((model(inputs) - wanted).square().mean())
