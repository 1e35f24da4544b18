"""AdamW with 8-bit moments (Dettmers et al., arXiv:2110.02861), from bitsandbytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError


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
