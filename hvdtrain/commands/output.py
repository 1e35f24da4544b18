"""What a command writes where its user wants it."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.files import write_atomic


def write_out(path: Path, text: str) -> None:
    """Writes a file that `--out` names, and the folders above it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another place with --out"
        ) from None
