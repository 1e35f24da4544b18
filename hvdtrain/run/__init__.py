"""One training process from its assembly through its generations to its exit code.

This package shares its name with the function `hvdtrain.run`, and Python binds the package to that
name as soon as one of its modules is imported. The package is therefore callable as that function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(
        self,
        task: str | type,
        np: int = 1,
        hosts: str | None = None,
        config: Mapping[str, Any] | None = None,
        max_restarts: int = 0,
    ) -> Any:
        """Start a run and wait for its end: see hvdtrain.api.start.run and docs/python.md."""
        start = importlib.import_module("hvdtrain.api.start")
        return start.run(task, np, hosts, config, max_restarts)


sys.modules[__name__].__class__ = _CallablePackage
