"""A checkpoint's content, written to disk and read from it; layout.py says how it lies there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain.checkpoint.layout import (
    MARKER,
    STATE,
    SUMS,
    TENSORS,
    DamagedError,
    check_marker,
    checked_sums,
    compare,
    delete,
    folder_name,
    hidden_name,
)
from hvdtrain.checkpoint.tensor_file import read_file, unpack, write_tensors
from hvdtrain.files import sync_folder, write_synced


@dataclass
class Checkpoint:
    """What is saved.

    Args:
        model: parameters and buffers by name
        optimizer: as `optim.optimizer.state_tensors` gives them
        state: anything JSON can hold; "step" (int) must be there
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]


def write(root: Path, checkpoint: Checkpoint, confirm: Callable[[], None] = lambda: None) -> Path:
    """Writes a checkpoint below `root`; a folder of the same step is replaced.

    Args:
        confirm: called before it gets its name; raises OSError where it must not.

    Returns:
        The finished folder.

    Raises:
        OSError: nothing that looks finished was left behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / folder_name(checkpoint.state["step"])
    hidden = hidden_name(final)
    hidden.mkdir()
    try:
        _write_files(hidden, checkpoint)
        confirm()
        try:
            os.rename(hidden, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            delete(final)
            os.rename(hidden, final)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    sync_folder(root)
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    contents = zip(TENSORS, (checkpoint.model, checkpoint.optimizer), strict=True)
    sums = {name: write_tensors(folder / name, tensors) for name, tensors in contents}
    state = json.dumps(checkpoint.state, indent=1).encode()
    write_synced(folder / STATE, state)
    sums[STATE] = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    listed = json.dumps(sums, indent=1).encode()
    write_synced(folder / SUMS, listed)
    sync_folder(folder)
    write_synced(folder / MARKER, hashlib.sha256(listed).hexdigest().encode())
    sync_folder(folder)


def read(folder: Path) -> Checkpoint:
    """Verifies and reads a checkpoint, onto the CPU.

    Raises:
        DamagedError: it is not what was written.
    """
    check_marker(folder)
    try:
        sums = checked_sums(folder)
        names = (*TENSORS, STATE)
        with ThreadPoolExecutor(len(names)) as pool:  # hashing one is slower than a good disk
            files = list(pool.map(read_file, [folder / name for name in names]))
        for name, (_, found) in zip(names, files, strict=True):
            compare(folder, name, sums[name], found["bytes"], found["sha256"])
        model, optimizer, state = (content for content, _ in files)
        return Checkpoint(unpack(model), unpack(optimizer), json.loads(state.numpy().tobytes()))
    except OSError as error:
        raise DamagedError(f"checkpoint {folder}: {error.filename}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise DamagedError(f"checkpoint {folder}: {error}") from None
