"""Layers that are frozen, unfrozen and added, and buffers that grow: HVDTRAIN_TEST_LAYERS."""

import os

import torch
from torch import nn

import hvdtrain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 1)])
        self.register_buffer("queue", torch.empty(0, 2))
        self.register_buffer("full", torch.zeros(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x)) + 0.1 * self.queue.sum()
        if what == "buffer in the forward pass" and not hasattr(self, "scale"):
            self.register_buffer("scale", hidden.detach().std())
        return sum(head(hidden) for head in self.heads)


what = os.environ["HVDTRAIN_TEST_LAYERS"]
torch.manual_seed(0)
model = Net()
if what == "lazy":
    model.heads = nn.ModuleList([nn.LazyLinear(1)])
if what in ("thaw", "thaw without optimizer", "group"):
    model.body.requires_grad_(False)
trained = [p for p in model.parameters() if what == "thaw" or p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
data = [*zip(x, x.sum(1, keepdim=True), strict=True)]

with hvdtrain.training(model, optimizer, data) as training:
    for step in training:
        with step:
            if step.index == 4:
                if what.startswith("thaw") or what == "group":
                    model.body.requires_grad_(True)
                if what == "freeze" or (what == "freeze on one rank" and training.rank == 1):
                    model.body.requires_grad_(False)
            if what == "queue" and step.index < 9:
                model.queue = torch.cat([model.queue, torch.full((1, 2), float(step.index))])
            for inputs, wanted in step:
                step.backward((model(inputs) - wanted).square().mean())
            if what == "delete on one rank" and training.rank == 1:
                model.body.weight.grad = None
        if step.index == 3:
            if what == "group":
                optimizer.add_param_group({"params": [*model.body.parameters()]})
            if what == "layer":
                model.heads.append(nn.Linear(8, 1))
            if what == "other layer":
                model.body = nn.Linear(4, 8)
            if what == "longer buffer":
                model.full = torch.cat([model.full, model.full])
if training.rank == 0:
    print("END", [*model.queue.shape], [p.requires_grad for p in model.parameters()])
