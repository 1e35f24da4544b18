"""Layers and other features of models, by torch and third parties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.support.third_parties.part import (
    WIDTH,
    Part,
    layered,
    optimizing,
    package,
    small_model,
)


class Sequence(nn.Module):
    """Applies a layer of sequences to (n, WIDTH): each is a sequence of four positions."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.spread, self.layer = nn.Linear(WIDTH // 4, width), layer
        self.join = nn.Linear(width, WIDTH // 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.spread(x.reshape(len(x), 4, WIDTH // 4))
        return self.join(self.layer(steps)).reshape(len(x), WIDTH)


class Quantized(nn.Module):
    """Applies a codebook and adds its losses."""

    def __init__(self, codebook: nn.Module) -> None:
        super().__init__()
        self.codebook = codebook

    def forward(self, x: Tensor) -> Tensor:
        quantized, _, loss = self.codebook(x[None])
        return quantized[0] + loss.sum()  # type: ignore[no-any-return]


def _fake_quantize() -> Part:
    quantization = package("torch.ao.quantization")
    observer = quantization.MovingAverageMinMaxObserver
    return layered(quantization.FakeQuantize(observer, quant_min=0, quant_max=255))


def _lora() -> Part:
    peft = package("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], lora_dropout=0.1)
    model = peft.get_peft_model(small_model(), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Part(model, torch.optim.AdamW(trained, lr=0.02))


def _metric() -> Part:
    part = optimizing(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    metric = package("torchmetrics").MeanSquaredError()
    metric.persistent(True)  # otherwise its state_dict() is empty
    x = torch.linspace(-1, 1, 64).reshape(16, 4)

    def after(step: int) -> None:
        with torch.no_grad():
            metric.update(part.model(x), x.sum(1, keepdim=True))

    part.state["metric"], part.after = metric, after
    part.results = lambda: [metric.compute()]
    return part


def _codebook(name: str, **options: Any) -> Part:
    kind = getattr(package("vector_quantize_pytorch"), name)
    return layered(Quantized(kind(dim=WIDTH, codebook_size=16, kmeans_init=True, **options)))


def _einops() -> Part:
    layers = package("einops.layers.torch")
    return layered(
        nn.Sequential(
            layers.Rearrange("n (h w) -> n h w", h=2),
            layers.EinMix("n h w -> n h v", weight_shape="h w v", h=2, w=4, v=4),
            layers.Rearrange("n h w -> n (h w)"),
        )
    )


def _x_transformer() -> Part:
    encoder = package("x_transformers").Encoder(
        dim=8, depth=1, heads=2, attn_dim_head=4, layer_dropout=0.1, attn_dropout=0.1
    )
    return layered(Sequence(encoder, 8))


def _performer() -> Part:
    performer = package("performer_pytorch").Performer(
        dim=8, depth=1, heads=2, dim_head=4, nb_features=4, feature_redraw_interval=5
    )
    return layered(Sequence(performer, 8))


# Row -> (distribution, what builds the part).
FEATURES: dict[str, tuple[str, Callable[[], Part]]] = {
    "weight_norm": ("torch", lambda: layered(parametrizations.weight_norm(nn.Linear(8, 8)))),
    "spectral_norm": ("torch", lambda: layered(parametrizations.spectral_norm(nn.Linear(8, 8)))),
    "orthogonal": ("torch", lambda: layered(parametrizations.orthogonal(nn.Linear(8, 8)))),
    "FakeQuantize with observer": ("torch", _fake_quantize),
    "LoRA": ("peft", _lora),
    "MeanSquaredError": ("torchmetrics", _metric),
    "VectorQuantize": ("vector-quantize-pytorch", lambda: _codebook("VectorQuantize", decay=0.8)),
    "ResidualVQ": ("vector-quantize-pytorch", lambda: _codebook("ResidualVQ", num_quantizers=2)),
    "Rearrange, EinMix": ("einops", _einops),
    "Encoder": ("x-transformers", _x_transformer),
    "Performer": ("performer-pytorch", _performer),
}
