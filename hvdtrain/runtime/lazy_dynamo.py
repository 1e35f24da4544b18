"""Stand-in for torch._dynamo, the tracer behind torch.compile, until a run compiles.

torch's optimizers import torch._dynamo in their first step, only to tell it what not to trace.
Importing hvdtrain.process.session and taking one AdamW step costs 2.3 s of CPU time and 316 MiB
with that import, 1.4 s and 245 MiB without it (torch 2.13 on a CPU, median of 6 processes). Every
rank saves the difference at each start and restart.

A stand-in in sys.modules is the least that does so: torch has no setting that avoids the import
(TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE are read after it), and importlib's LazyLoader loads
a module as soon as an attribute is read, which the optimizers do.

What breaks if torch changes: an attribute that the stand-in lacks imports torch._dynamo as before,
so a run starts later but computes the same. tests/single/test_torch_private.py notices that, and
also if torch no longer needs the stand-in.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _Untraced(ModuleType):
    """Provides what optimizers use outside of a trace; imports torch._dynamo for the rest."""

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        """Do nothing: outside of a trace there is no graph to break."""

    def disable(self, function: Any = None, *args: Any, **more: Any) -> Any:
        """Return the function itself, which is called directly outside of a trace.

        Only torch marks its own functions without wrapping them. A function that a user excludes
        from a trace must stay excluded when they compile.
        """
        if function is not None and more.get("wrapping") is False:
            return function
        return self.__getattr__("disable")(function, *args, **more)

    def __getattr__(self, name: str) -> Any:
        # Code that inspects all modules (inspect, warnings) reads __file__ and similar names.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def defer() -> None:
    """Install the stand-in, unless torch._dynamo is already imported."""
    sys.modules.setdefault(_NAME, _Untraced(_NAME))
