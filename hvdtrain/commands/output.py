"""Write output files of commands."""

from __future__ import annotations

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
