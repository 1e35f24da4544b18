"""A regression with one fault, named by the first argument; "none": without a fault.

Each fault is a mistake that trains well on one rank, or in a run that is never interrupted.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, get_worker_info, random_split

import hvdtrain

fault = sys.argv[1]
if fault != "weights":
    torch.manual_seed(0)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)


class FileData(Dataset):
    """Rows of a file that is opened once, before the data workers are forked."""

    def __init__(self):
        path = Path(tempfile.mkdtemp(), "rows")
        path.write_bytes(torch.cat([x, y], 1).numpy().tobytes())
        self.file = path.open("rb", buffering=0)

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        self.file.seek(index * 20)
        row = torch.frombuffer(bytearray(self.file.read(4)), dtype=torch.float32)
        for _ in range(4):  # other workers move the position meanwhile
            os.sched_yield()
            row = torch.cat([row, torch.frombuffer(bytearray(self.file.read(4)), dtype=row.dtype)])
        return row[:4], row[4:]


class NoisyData(Dataset):
    """Rows with noise of a generator of its own."""

    def __init__(self, seed=None):
        self.generator = np.random.default_rng(seed)

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index] + torch.tensor(self.generator.normal(size=4)).float(), y[index]


class WorkerData(Dataset):
    """Rows that depend on the data worker."""

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        worker = get_worker_info()
        return x[index] * (1 if worker is None else 1 + worker.id), y[index]


class UnorderedSum(torch.autograd.Function):
    """A sum whose gradient is rounded in one of two ways, like atomic additions on a GPU."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 2**-22) if os.urandom(1)[0] % 2 else gradient


class Averaged(nn.Module):
    """Divides by a running mean that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()), persistent=False)

    def forward(self, values):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * values.detach().abs().mean())
        return values / self.mean


class WarmUp(torch.optim.SGD):
    """SGD with a warm-up that counts in an attribute."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1
            for parameter in group["params"]:
                parameter.grad.mul_(min(1.0, self.calls / 15))
        return super().step(closure)


layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
if fault == "batchnorm":
    layers.insert(1, nn.BatchNorm1d(8))
if fault == "buffer":
    layers.insert(1, Averaged())
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if fault == "optimizer":
    optimizer = WarmUp(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7) if fault == "scheduler" else None
dataset = [*zip(x, y, strict=True)]
if fault == "split":
    dataset = random_split(dataset, [200, 56], torch.Generator().manual_seed(os.getpid()))[0]
if fault == "hash":
    words = [f"word {number}" for number in range(256)]
    dataset = Subset(dataset, [words.index(word) for word in {*words}])
if fault == "dataset":
    dataset = NoisyData(seed=0)
if fault == "unseeded":
    dataset = NoisyData()
if fault == "file":
    dataset = FileData()
if fault == "worker":
    dataset = WorkerData()
generator = np.random.default_rng()
momentum, seen, factor = 0.0, 0, 1.0


def validate():
    share = [*training.share(201)]
    return (model(x[share]) - y[share]).square().mean()  # a mean of means over unequal shares


with hvdtrain.training(model, optimizer, dataset) as training:
    if fault == "rank":
        training.state["best"] = 1e9
    for step in training:
        with step:
            if fault == "block":
                factor *= 0.99
            for inputs, wanted in step:
                if fault == "random":
                    inputs = inputs + torch.tensor(generator.normal(size=4)).float()
                out = model(inputs)
                loss = (out - wanted).square().mean()
                if fault == "kernel":
                    loss = (UnorderedSum.apply(out) - wanted).square().mean()
                if fault == "state":
                    loss = loss * (1 + abs(momentum))
                if fault == "carried":
                    seen += 1
                    loss = loss * (1 + 0.01 * seen)
                if fault == "size":
                    loss = loss / training.size
                if fault == "block":
                    loss = loss * factor
                step.backward(loss)
                if fault == "rank":
                    training.state["best"] = min(training.state["best"], loss.item())
        if fault == "state":
            momentum = 0.9 * momentum + 0.1 * step.result["loss"]
        if scheduler is not None:
            scheduler.step()
        if fault == "batchnorm" and step.index % 2:
            share = [*training.share(256)]
            print("validation", (model(x[share]) - y[share]).square().mean().item())
        if fault == "evaluation" and step.index % 4 == 3:
            training.log(step, validation_loss=training.evaluate(validate))
