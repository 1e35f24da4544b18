"""Tokens of text that were made once, for the ranks of a host and later starts."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hvdtrain.data.tokens import TokenArray
from hvdtrain.errors import UserError
from hvdtrain.files import sync_folder

_SPLITS = ("train", "validation")


def cache_name(files: Iterable[Path], *settings: object) -> str:
    """Changes with the settings, and with a file's path, size or time of change."""
    stats = ((str(path.absolute()), path.stat()) for path in files)
    found = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return hashlib.sha256(json.dumps([found, settings]).encode()).hexdigest()[:16]


def cached(
    folder: Path, name: str, make: Callable[[], tuple[TokenArray, TokenArray]]
) -> tuple[TokenArray, TokenArray]:
    """What `make` returns, memory-mapped; it is called where nobody has done so under this name.

    Processes that come here at the same time each call it, and use what the first one has kept.

    Raises:
        UserError: the folder cannot be written.
    """
    kept = folder.expanduser() / name
    new = kept.with_name(f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        if not kept.is_dir():
            tokens = make()
            new.mkdir(parents=True)
            _write(new, tokens)
            try:
                new.rename(kept)
            except OSError:
                if not kept.is_dir():
                    raise
            sync_folder(kept.parent)
        train, validation = (_read(kept / f"{split}.npy") for split in _SPLITS)
    except (OSError, ValueError) as error:
        raise UserError(f"data.cache: {kept}: {error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return train, validation


def _write(folder: Path, tokens: tuple[TokenArray, TokenArray]) -> None:
    for split, array in zip(_SPLITS, tokens, strict=True):
        with open(folder / f"{split}.npy", "wb") as file:
            np.save(file, array)
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> TokenArray:
    tokens: TokenArray = np.load(path, mmap_mode="r")
    return tokens
