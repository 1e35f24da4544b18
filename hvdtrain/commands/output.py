"""Output of commands: files, plots, JSON."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic


def write_out(path: Path, text: str, make_directory: bool = False) -> None:
    """Write the file that `--out` names.

    Args:
        make_directory: create the parent directory if it is missing.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if make_directory:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another place with --out"
        ) from None


def check_plot(path: Path) -> None:
    """Check the destination of a plot before measuring.

    Raises:
        UserError: the file cannot be written, or the plotting package is missing.
    """
    if path.suffix != ".svg":
        raise UserError(f"--plot {path}: the file name must end in .svg")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"--plot {path} cannot be written; choose another place")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"--plot requires {error.name}, which is not installed: pip install 'hvdtrain[report]'"
        ) from None


def finite(value: Any) -> Any:
    """Replace non-finite values by None, because JSON has no number for them."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
