"""The usual recipe for Muon: matrices with Muon, the rest with AdamW, one loss for both.

HVDTRAIN_TEST_CALLS: how the script calls step.backward: "one", "each" (for each optimizer), or
"sum": each optimizer has a loss of its own, from one forward pass.
"""

import os

import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
matrices = [p for p in model.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() != 2]
optimizers = {
    "muon": torch.optim.Muon(matrices, lr=0.02),
    "adamw": torch.optim.AdamW(others, lr=0.01),
}
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
data = [*zip(x, x.sum(1, keepdim=True), strict=True)]

with hvdtrain.training(model, optimizers, data, metrics=["mae"]) as training:
    for step in training:
        with step:
            for inputs, wanted in step:
                error = model(inputs) - wanted
                loss, mae = error.square().mean(), error.abs().mean()
                match os.environ["HVDTRAIN_TEST_CALLS"]:
                    case "one":
                        step.backward(loss, mae=mae)
                    case "each":
                        loss = loss.reshape(1)
                        step.backward(loss, optimizer="muon", mae=mae)
                        step.backward(loss, optimizer="adamw")
                    case "sum":
                        step.backward(loss, optimizer="muon", mae=mae)
                        # Not mae: its signs cancel out, and AdamW enlarges rounding errors.
                        step.backward(error.pow(4).mean(), optimizer="adamw")
