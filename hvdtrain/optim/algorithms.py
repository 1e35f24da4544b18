"""Optimizers that torch does not have: Lion, Muon with AdamW, and 8-bit AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv:2302.06675, algorithm 2.

    Args:
        betas: decay rates of the update's interpolation and of the stored momentum.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(momentum.lerp(p.grad, 1 - beta1).sign_(), alpha=-lr)
                momentum.lerp_(p.grad, 1 - beta2)


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


def adamw_8bit(
    groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> Optimizer:
    """Build the optimizer, whose state consists of tensors only.

    Raises:
        UserError: bitsandbytes is not installed.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise UserError(
            "optim.name adamw8bit needs the bitsandbytes library: pip install 'hvdtrain[adamw8bit]'"
        ) from None

    class Saveable(AdamW8bit):
        """AdamW8bit whose step count is a tensor, as in torch's optimizers."""

        def update_step(self, group: Any, p: nn.Parameter, gindex: int, pindex: int) -> None:
            state = self.state[p]
            state["step"] = int(state["step"])
            super().update_step(group, p, gindex, pindex)
            state["step"] = torch.tensor(float(state["step"]))

    optimizer: Optimizer = Saveable(groups, lr=lr, betas=betas, eps=eps)
    return optimizer
