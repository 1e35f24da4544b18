"""Dynamic loss scale for float16: small gradients stay above zero, and overflows are detected.

Micikevicius et al., "Mixed precision training", arXiv:1710.03740; growth, back-off and hysteresis
as in the scalers of DeepSpeed and Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hvdtrain.runtime.device import widened
from hvdtrain.runtime.state_part import Scope

_FIRST = 2.0**16
_SMALLEST = 1.0
_GROWTH, _GROW_AFTER = 2.0, 1000  # good steps in a row
_BACK_OFF, _HYSTERESIS = 0.5, 2


class LossScale:
    """The replicated part "loss_scale": factor applied to a loss before backward.

    A gradient is divided by the scale when backward has computed it, before it is accumulated or
    exchanged. An exchange therefore sees true gradients, whose range does not change with the scale
    (fixed point, the scale of a float16 wire, residuals of error feedback). Elements that
    overflowed are infinite or NaN on the rank where it happened and, after the exchange, on all
    ranks: all skip the step, and all call `update` with the same argument.

    The second overflow since the scale last grew halves the scale, and so does each further one;
    1000 consecutive good steps double it.
    """

    name = "loss_scale"
    scope: Scope = "replicated"

    def __init__(self) -> None:
        self._hooks: list[RemovableHandle] = []
        self._scale = torch.tensor(_FIRST, dtype=torch.float64)
        self._good_steps = torch.tensor(0, dtype=torch.int64)
        self._overflows_left = torch.tensor(_HYSTERESIS, dtype=torch.int64)

    @property
    def value(self) -> float:
        return self._scale.item()

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss`, a scalar, times the scale, in float32 or wider."""
        return widened(loss) * self.value

    def unscale_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Register hooks that divide these parameters' gradients by the scale during backward."""
        for parameter in parameters:
            self._hooks.append(
                parameter.register_hook(lambda gradient: gradient * (1 / self.value))
            )

    def remove_hooks(self) -> None:
        """Undo `unscale_gradients`: a script may train its model in another run."""
        while self._hooks:
            self._hooks.pop().remove()

    def update(self, applied: bool) -> bool:
        """Update the scale after each step, identically on all ranks.

        Args:
            applied: the step's gradient was finite.

        Returns:
            True if the scale may have caused a non-finite gradient: it could be lower.
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

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        [tensors] = saved or [LossScale().tensors()]
        for name, own in self.tensors().items():
            own.copy_(tensors[name])
