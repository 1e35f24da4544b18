"""Wire formats for gradients of the dense exchange, which Horovod calls compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.runtime.state_part import Scope, StatePart

Layout = tuple[torch.Size, tuple[int, ...]] | None

# Gradients of a global batch are mostly far below 1; float16 has no positive number below 6e-8.
_FIRST_SCALE = 2.0**12
_LARGEST_SCALE = 2.0**24
_BACK_OFF = 0.25
_GROW_AFTER = 500  # steps in a row without overflow


class AsItIs:
    """Send a gradient unchanged, as a vector in memory order.

    Horovod requires row-major tensors. A gradient has the memory order of its parameter, on every
    rank, so parameters in another order (channels_last) can be summed too, without a copy.
    """

    def compress(self, gradient: Tensor) -> tuple[Tensor, Layout]:
        if gradient.is_contiguous():
            return gradient, None
        vector = gradient.as_strided((gradient.numel(),), (1,))
        return vector, (gradient.shape, gradient.stride())

    def decompress(self, summed: Tensor, layout: Layout) -> Tensor:
        return summed if layout is None else summed.as_strided(*layout)

    def element_size(self, parameter: Tensor) -> int:
        """Bytes of an element of the parameter's gradient on the wire."""
        return parameter.element_size()

    def commit(self, applied: bool) -> None:
        """Complete a step, applied or skipped; identical on all ranks."""

    def state_parts(self) -> Sequence[StatePart]:
        return ()


class Float16:
    """Send a gradient as float16, times a scale, which halves the bytes.

    An element that is too large becomes infinite, and so does the sum, on every rank: the step is
    skipped, and the scale is divided by 4. After 500 steps without overflow it is doubled. (Loss
    scaling as in Micikevicius et al., "Mixed precision training", arXiv:1710.03740, but of the
    gradient alone.)
    """

    name = "wire"
    scope: Scope = "replicated"

    def __init__(self) -> None:
        self._layout = AsItIs()
        self._scale = torch.tensor(_FIRST_SCALE, dtype=torch.float64)
        self._good_steps = torch.tensor(0, dtype=torch.int64)

    def compress(self, gradient: Tensor) -> tuple[Tensor, tuple[Layout, torch.dtype]]:
        vector, layout = self._layout.compress(gradient)
        return vector.mul(self._scale.item()).half(), (layout, gradient.dtype)

    def decompress(self, summed: Tensor, context: tuple[Layout, torch.dtype]) -> Tensor:
        layout, dtype = context
        return self._layout.decompress(summed.to(dtype).mul_(1 / self._scale.item()), layout)

    def element_size(self, parameter: Tensor) -> int:
        return 2

    def commit(self, applied: bool) -> None:
        if not applied:
            self._scale *= _BACK_OFF
            self._good_steps.zero_()
            return
        self._good_steps += 1
        if self._good_steps == _GROW_AFTER:
            self._scale.copy_((self._scale * 2).clamp(max=_LARGEST_SCALE))
            self._good_steps.zero_()

    def state_parts(self) -> Sequence[StatePart]:
        return (self,)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self._scale, "good_steps": self._good_steps}

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, saved: Sequence[Mapping[str, Any]]) -> None:
        [tensors] = saved or [Float16().tensors()]
        for name, own in self.tensors().items():
            own.copy_(tensors[name])


class BFloat16:
    """Send a gradient as bfloat16, which halves the bytes.

    It has the range of float32, so it needs no scale; of 24 bits of precision 8 are left. Nothing
    is divided on the wire: a gradient was already divided by the micro-batches of the global batch
    in float32.
    """

    def __init__(self) -> None:
        self._layout = AsItIs()

    def compress(self, gradient: Tensor) -> tuple[Tensor, tuple[Layout, torch.dtype]]:
        vector, layout = self._layout.compress(gradient)
        return vector.bfloat16(), (layout, gradient.dtype)

    def decompress(self, summed: Tensor, context: tuple[Layout, torch.dtype]) -> Tensor:
        layout, dtype = context
        return self._layout.decompress(summed.to(dtype), layout)

    def element_size(self, parameter: Tensor) -> int:
        return 2

    def commit(self, applied: bool) -> None:
        """Nothing is kept from step to step."""

    def state_parts(self) -> Sequence[StatePart]:
        return ()


WIRES: dict[str, type[AsItIs] | type[Float16] | type[BFloat16]] = {
    "float32": AsItIs,
    "float16": Float16,
    "bfloat16": BFloat16,
}
