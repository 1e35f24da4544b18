"""Meta tensors as a device other than the CPU: waits for it are counted, mixtures are refused.

It runs what a GPU would run, in a process without one. A mock, because meta tensors have no values:
the CPU reads zeros (and True) from them, so it shows nothing about numbers, kernels or streams.
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hvdtrain

META = torch.device("meta")

_aten = torch.ops.aten
_JOINS = (_aten.cat.default, _aten.stack.default)
# The size of their result, or the result itself, is known to the device only.
_SIZES = (_aten.nonzero.default, _aten.masked_select.default, _aten.equal.default)
# They copy Python numbers to the device, which dispatch does not show.
_OF_NUMBERS = (torch.tensor, torch.as_tensor)
_DISPATCH = ("/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/eval_frame.py")
_ROOTS = sorted((str(Path(m.__file__ or "").parents[1]) for m in (hvdtrain, torch)), key=len)


class MixedDevicesError(AssertionError):
    """An operation got tensors of the CPU and of the device."""


class ForeignDevice(TorchDispatchMode):
    """Records what happens on the device.

    Attributes:
        waits: line of code -> how often the CPU waited there for the device.
        widest: elements of the largest float64 tensor that was made on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.widest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            self.waits[_line()] += 1
            return torch.full((), args[0].dtype == torch.bool, dtype=args[0].dtype).item()
        if func is _aten._to_copy.default:
            device = torch.device(kwargs.get("device") or args[0].device)
            if self._leaves(args[0], device, kwargs):
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        elif func is _aten.copy_.default:
            if self._leaves(args[1], args[0].device, {"non_blocking": True in args[2:], **kwargs}):
                return args[0].zero_()
        else:
            self._check(func, args, kwargs)
        found = func(*args, **kwargs)
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and made.is_meta and made.dtype == torch.float64:
                self.widest = max(self.widest, made.numel())
        return found

    def _leaves(self, source: Tensor, device: torch.device, options: dict[str, Any]) -> bool:
        """Count a copy that waits; return whether it is one from the device to the CPU."""
        if source.device.type != device.type and not options.get("non_blocking"):
            self.waits[_line()] += 1
        return source.is_meta and device.type == "cpu"

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # An operation reads a scalar of the CPU as a number.
        devices = {t.device.type for t in tensors if t.dim() or func in _JOINS}
        if len(devices) > 1:
            raise MixedDevicesError(f"{func} of tensors on {sorted(devices)}: {_line()}")
        masked = func is _aten.index.Tensor and any(t.dtype == torch.bool for t in tensors[1:])
        if "meta" in devices and (func in _SIZES or masked):
            self.waits[_line()] += 1


class _OfNumbers(TorchFunctionMode):
    """Counts tensors that are made on the device from Python numbers."""

    def __init__(self, device: ForeignDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _OF_NUMBERS and found.is_meta and not isinstance(args[0], Tensor):
            self._device.waits[_line()] += 1
        return found


@contextmanager
def foreign_device() -> Iterator[ForeignDevice]:
    """Context in which meta tensors are on a foreign device."""
    with ForeignDevice() as device, _OfNumbers(device):
        yield device


def _line() -> str:
    """Return the innermost line outside of torch's dispatch: "package/module.py:12 code"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(_DISPATCH)
    ):
        frame = frame.f_back
    assert frame is not None
    file, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, number).strip()
    for root in reversed(_ROOTS):  # an environment may be inside the repository
        if file.startswith(f"{root}/"):
            file = file[len(root) + 1 :]
            break
    return f"{file}:{number} {code}"
