"""torch._dynamo, the tracer behind torch.compile: imported by those who compile, and not before.

torch's optimizers import it in their first call, to tell it what not to trace. That is a third of
the CPU time in which a rank starts (1.1 of 3.2 s with torch 2.13), and after every restart
training resumes that much later.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _Untraced(ModuleType):
    """Stands in its place until more of it is asked for than optimizers do outside of a trace."""

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        """Outside of a trace there is no graph to break."""

    def disable(self, function: Any = None, *args: Any, **more: Any) -> Any:
        """Outside of a trace the function itself is called.

        Only torch marks its own functions without wrapping them; what a user excludes from a
        trace is to be excluded when they compile.
        """
        if function is not None and more.get("wrapping") is False:
            return function
        return self.__getattr__("disable")(function, *args, **more)

    def __getattr__(self, name: str) -> Any:
        # Whoever looks at all modules (inspect, warnings) asks for __file__ and the like.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def defer() -> None:
    """Keeps torch from importing it without need; nothing where it is imported already."""
    sys.modules.setdefault(_NAME, _Untraced(_NAME))
