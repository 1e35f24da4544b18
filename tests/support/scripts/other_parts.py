"""An optimizer that wraps another one, a schedule with milestones, and a layer with extra state."""

from collections import Counter
from typing import Any

import pytorch_optimizer
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

import hvdtrain


class Scaled(nn.Linear):
    """A layer with a scale that the script changes, as quantizers do."""

    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


torch.manual_seed(0)
model = nn.Sequential(Scaled(4, 8), nn.Tanh(), nn.Linear(8, 1))
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = pytorch_optimizer.Lookahead(inner, k=3, pullback_momentum="pullback")
schedulers = [LinearLR(inner, 0.1, total_iters=4), MultiStepLR(inner, [2, 4])]
scheduler = SequentialLR(inner, schedulers, milestones=[4])
x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
seen: Counter[str] = Counter()

with hvdtrain.training(model, optimizer, [*zip(x, x.sum(1, True), strict=True)]) as training:
    training.state |= {"scheduler": scheduler, "seen": seen}
    for step in training:
        with step:
            for inputs, wanted in step:
                step.backward((model(inputs) - wanted).square().mean())
        scheduler.step()
        seen.update(["even" if step.index % 2 == 0 else "odd"])
        model[0].scale = 1 + step.index / 10
if training.rank == 0:
    print("END", inner.param_groups[0]["lr"], model[0].scale, *seen.most_common())
