"""The dynamic loss scale of float16: small gradients stay above zero, and an overflow is noticed.

Micikevicius et al., "Mixed precision training", arXiv:1710.03740; growth, back-off and hysteresis
as in DeepSpeed's and Megatron's scalers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hvdtrain.runtime.state_part import Scope

_FIRST = 2.0**16
_SMALLEST = 1.0
_GROWTH, _GROW_AFTER = 2.0, 1000  # good steps in a row
_BACK_OFF, _HYSTERESIS = 0.5, 2


class LossScale:
    """The replicated part "loss_scale": what a loss is multiplied with before backward.

    A gradient is divided by it as soon as backward has it, before it is added up or exchanged: an
    exchange sees true gradients, whose range does not change with the scale (fixed point, the scale
    of a float16 wire, what error feedback owes). What has overflowed is infinite or NaN on the
    rank where it did, and by the exchange on all: all skip the step, and all call `update` alike.

    Of two overflows since the scale last grew the second one halves it, and so does each
    further one; 1000 good steps in a row double it.
    """

    name = "loss_scale"
    scope: Scope = "replicated"

    def __init__(self) -> None:
        self._scale = torch.tensor(_FIRST, dtype=torch.float64)
        self._good_steps = torch.tensor(0, dtype=torch.int64)
        self._overflows_left = torch.tensor(_HYSTERESIS, dtype=torch.int64)

    @property
    def value(self) -> float:
        return self._scale.item()

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss`, a scalar, times the scale, in float32 at least."""
        wide = loss.float() if loss.dtype in (torch.float16, torch.bfloat16) else loss
        return wide * self.value

    def unscale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """From now on each gradient of these is divided by the scale when backward has it."""
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient * (1 / self.value))

    def update(self, applied: bool) -> bool:
        """After each step, alike on all ranks.

        Args:
            applied: its gradient was finite.

        Returns:
            True where a gradient that was not finite may be due to the scale: it could be lower.
        """
        if not applied:
            return self._overflow()
        self._good_steps += 1
        if self._good_steps == _GROW_AFTER:
            self._scale *= _GROWTH
            self._good_steps.zero_()
            self._overflows_left.fill_(_HYSTERESIS)
        return False

    def _overflow(self) -> bool:
        may_be_lower = self.value > _SMALLEST
        self._good_steps.zero_()
        if self._overflows_left > 1:
            self._overflows_left -= 1
        else:
            self._scale.copy_((self._scale * _BACK_OFF).clamp(min=_SMALLEST))
        return may_be_lower

    def tensors(self) -> dict[str, Tensor]:
        return {
            "scale": self._scale,
            "good_steps": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        [tensors] = pieces or [LossScale().tensors()]
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
