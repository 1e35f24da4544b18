"""Values of samples as JSON, to compare them with values that another library has returned."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import torch


def canonical(value: Any) -> Any:
    """Return a value as JSON: its type, dtype and shape, and its bytes in hexadecimal."""
    if isinstance(value, dict):
        return ["dict", {name: canonical(each) for name, each in value.items()}]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [canonical(each) for each in value]]
    if isinstance(value, torch.Tensor):
        content = value.reshape(-1).view(torch.uint8) if value.numel() else value
        return ["tensor", str(value.dtype), [*value.shape], content.numpy().tobytes().hex()]
    if isinstance(value, (np.ndarray, np.generic)):
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return [kind, value.dtype.str, [*value.shape], value.tobytes().hex()]
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return ["image", value.mode, [*value.size], value.tobytes().hex()]
    if isinstance(value, (bytes, memoryview)):
        return ["bytes", value.hex()]
    if isinstance(value, float):
        return ["float", value.hex()]
    assert value is None or isinstance(value, (bool, int, str, Decimal)), type(value)
    return [type(value).__name__, str(value)]
