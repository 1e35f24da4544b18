"""A loop whose model has buffers that forward passes change.

HVDTRAIN_TEST_MODEL: a key of MODELS.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

import hvdtrain


class Mean(nn.Module):
    """Subtracts a running mean, which is a buffer, a lost one (not persistent) or an attribute."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        if keep == "attribute":
            self.mean = torch.zeros(8)
        else:
            self.register_buffer("mean", torch.zeros(8), persistent=keep == "buffer")

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean = self.mean.lerp(x.mean(0), 0.1)
        return x - self.mean


class Counter(nn.Module):
    """Counts its forward passes, and writes a buffer that stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("ones", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        self.ones = torch.ones(8)
        self.count.data.add_(1)  # without a trace in the version counter
        return x * self.ones / (1 + self.count)


class Keys(nn.Module):
    """A layer, and a frozen one that follows it in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        return self.query(x) - 0.1 * self.key(x)


class Redrawn(nn.Module):
    """Draws a buffer again in every fifth forward pass, as random features are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("features", torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 5 == 0:
            self.features.copy_(torch.randn(8, 8))
        return x @ self.features


class Initialized(nn.Module):
    """Sets its trained scale by the first micro-batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(8)), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.ready = True
        return x * self.scale


class Constrained(nn.Linear):
    """Keeps its weights below a norm in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class Counted(nn.Module):
    """Anneals by a number of Python."""

    updates = 0

    def forward(self, x: Tensor) -> Tensor:
        self.updates += 1
        return x / (1 + self.updates)


def observed() -> nn.Module:
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    return FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.quantize = VectorQuantize(dim=8, codebook_size=16, decay=0.8, kmeans_init=True)

    def forward(self, x: Tensor) -> Tensor:
        quantized, _, loss = self.quantize(x[None])
        return quantized[0] + loss


MODELS = {
    "spectral": lambda: spectral_norm(nn.Linear(8, 8)),
    "observed": observed,
    "mean": lambda: Mean("buffer"),
    "lost": lambda: Mean("lost"),
    "attribute": lambda: Mean("attribute"),
    "counter": Counter,
    "codebook": Codebook,
    "keys": Keys,
    "initialized": Initialized,
    "constrained": lambda: Constrained(8, 8),
    "counted": Counted,
    "redrawn": Redrawn,
}
torch.manual_seed(0)
changing = MODELS[os.environ["HVDTRAIN_TEST_MODEL"]]()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), changing, nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = x.sum(1, keepdim=True)

with hvdtrain.training(model, optimizer, [*zip(x, y, strict=True)]) as training:
    for step in training:
        with step:
            for inputs, wanted in step:
                step.backward((model(inputs) - wanted).square().mean())
        frozen = [p for p in model.parameters() if not p.requires_grad]
        kept = [*model.buffers(), *frozen]
        own = sum(float(value.detach().double().nan_to_num().sum()) for value in kept)
        training.log(step, buffers=own)
if training.rank == 0:
    print("END", own)
