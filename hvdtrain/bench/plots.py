"""Check of a plot's destination."""

from __future__ import annotations

import os
from pathlib import Path

from hvdtrain.errors import UserError


def check_plot(path: Path) -> None:
    """Check the destination of a plot before measuring.

    Raises:
        UserError: the file cannot be written, or the plotting package is missing.
    """
    if path.suffix != ".svg":
        raise UserError(f"--plot {path}: it is drawn as SVG, so the name must end in .svg")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"--plot {path} cannot be written; choose another place")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"--plot needs {error.name}, which is not installed: pip install 'hvdtrain[report]'"
        ) from None
