"""Muon for the matrices inside a model, and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

# First component of the name of a model's output layer.
_HEADS = ("head", "heads", "lm_head", "classifier", "score", "fc", "output")
USES_MUON = "muon"


class MuonAndAdamW(Optimizer):
    """Muon on groups whose "muon" is True, AdamW on the others.

    torch.optim.Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) and
    torch.optim.AdamW. Muon's rate is scaled to the size of AdamW's updates (Liu et al.,
    arXiv:2502.16982), so that both use one learning rate and one weight decay. Both keep their
    state in `state` here.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, USES_MUON: False})
        matrices = [group for group in self.param_groups if group[USES_MUON]]
        rest = [group for group in self.param_groups if not group[USES_MUON]]
        self._parts: list[Optimizer] = []
        if matrices:
            scaled = "match_rms_adamw"
            self._parts += [
                torch.optim.Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn=scaled)
            ]
        if rest:
            self._parts += [torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps)]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for part in self._parts:
            part.step()


def muon_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The matrices inside a model: neither embeddings nor its output layer.

    An output layer is a top-level module with one of these names (`head`, `heads`, `lm_head`,
    `classifier`, `score`, `fc`, `output`), or a matrix with as many rows as an embedding.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    outside = {id(m.weight) for m in embeddings}
    vocabularies = {m.num_embeddings for m in embeddings}
    for name, parameter in model.named_parameters():
        inside = id(parameter) not in outside and name.split(".")[0] not in _HEADS
        if parameter.dim() == 2 and inside and parameter.shape[0] not in vocabularies:
            yield parameter
