"""Output of commands: files and plots."""

from __future__ import annotations

import os
from pathlib import Path

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
        UserError: the file cannot be written.
    """
    if path.suffix != ".html":
        raise UserError(f"--plot {path}: the file name must end in .html")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"--plot {path} cannot be written; choose another place")
