"""Language model with a metric that shows whether the backward passes of a rank are interleaved."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig


class OpenGraphs(LanguageModel):
    """Metric "open_graphs": training micro-batches whose backward pass has not begun."""

    metrics = ("open_graphs",)

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__(config)
        self._open = 0

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        found = super().loss(model, batch)
        loss = found["loss"][0] if isinstance(found["loss"], tuple) else found["loss"]
        if loss.requires_grad:
            self._open += 1
            loss.register_hook(self._begin_backward)
        return {**found, "open_graphs": torch.tensor(float(self._open))}

    def _begin_backward(self, _: torch.Tensor) -> None:
        self._open -= 1
