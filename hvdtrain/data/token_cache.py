"""Cache of tokenized text, for the ranks of a host and later starts."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hvdtrain.data.hidden_copy import hidden_copy, remove_leftovers
from hvdtrain.data.tokens import TokenArray
from hvdtrain.errors import UserError
from hvdtrain.files import sync_directory

_SPLITS = ("train", "validation")


def cache_name(files: Iterable[Path], *settings: object) -> str:
    """Name that changes with the settings, and with a file's path, size or modification time."""
    stats = ((str(path.absolute()), path.stat()) for path in files)
    found = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return hashlib.sha256(json.dumps([found, settings]).encode()).hexdigest()[:16]


def cached(
    folder: Path, name: str, make: Callable[[], tuple[TokenArray, TokenArray]]
) -> tuple[TokenArray, TokenArray]:
    """Return the result of `make`, memory-mapped; call it only if nothing is cached as `name`.

    Processes that run this at the same time may each call `make`; all use the result that was
    stored first.

    Raises:
        UserError: the directory cannot be written, or its content is damaged.
    """
    kept = folder.expanduser() / name
    new = kept.with_name(f".{name}.{secrets.token_hex(4)}.tmp")
    remove_leftovers(kept.parent, f".{'[0-9a-f]' * 16}.*.tmp")
    if not kept.is_dir():
        tokens = make()
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with hidden_copy(new):
                new.mkdir()
                _write(new, tokens)
                _rename(new, kept)
            sync_directory(kept.parent)
        except OSError as error:
            raise UserError(f"data.cache: {kept}: {error}") from None
    train, validation = (_read(kept, split) for split in _SPLITS)
    return train, validation


def _rename(new: Path, kept: Path) -> None:
    try:
        new.rename(kept)
    except OSError:
        if not kept.is_dir():  # otherwise another process was faster
            raise


def _write(folder: Path, tokens: tuple[TokenArray, TokenArray]) -> None:
    for split, array in zip(_SPLITS, tokens, strict=True):
        with open(folder / f"{split}.npy", "wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


def _read(kept: Path, split: str) -> TokenArray:
    try:
        tokens: TokenArray = np.load(kept / f"{split}.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"data.cache: {kept / f'{split}.npy'} cannot be read ({error}): delete the directory "
            f"{kept}, and the next start makes it again"
        ) from None
    return tokens
