"""What a command writes where its user wants it."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic


def write_out(path: Path, text: str, make_folder: bool = False) -> None:
    """Writes a file that `--out` names.

    Args:
        make_folder: the one that it lies in, where there is none.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another place with --out"
        ) from None
