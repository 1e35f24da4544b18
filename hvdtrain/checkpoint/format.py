"""A checkpoint on disk: safetensors and JSON, checksums, and a marker that is written last.

    step_00000100/
        model.safetensors       parameters and buffers, by name
        optimizer.safetensors   "parameter name/entry"
        state.json              step, samples, seed, fingerprint of the data, ...
        files.json              size and sha256 of each file above
        complete                sha256 of files.json; without it this is no checkpoint

Everything is written into a temporary folder, synced, renamed, and marked. Deleting
takes the marker first. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.files import sync_folder, write_synced

MARKER = "complete"
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


class DamagedError(UserError):
    """A checkpoint that was finished once is not what was written."""


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


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write(root: Path, checkpoint: Checkpoint) -> Path:
    """Writes a checkpoint below `root`; a folder of the same step is replaced.

    Returns:
        The finished folder.

    Raises:
        OSError: nothing that looks finished was left behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / folder_name(checkpoint.state["step"])
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        _write_files(temporary, checkpoint)
        if final.exists():
            delete(final)
        os.rename(temporary, final)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(root)
    write_synced(final / MARKER, _sha256(final / "files.json").encode())
    sync_folder(final)
    return final


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    for name, tensors in zip(_FILES, (checkpoint.model, checkpoint.optimizer), strict=False):
        # Tied weights have one name in the file: safetensors holds no shared memory.
        save_file({key: t.detach().contiguous() for key, t in tensors.items()}, folder / name)
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    write_synced(folder / "state.json", json.dumps(checkpoint.state, indent=1).encode())
    sums = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        for name in _FILES
    }
    write_synced(folder / "files.json", json.dumps(sums, indent=1).encode())
    sync_folder(folder)


def verify(folder: Path) -> None:
    """Compares every file with its checksum.

    Raises:
        DamagedError: what differs, by name.
    """
    try:
        sums_now = _sha256(folder / "files.json")
        if sums_now.encode() != (folder / MARKER).read_bytes():
            raise DamagedError(f"checkpoint {folder}: files.json or {MARKER} was altered")
        for name, wanted in json.loads((folder / "files.json").read_text()).items():
            size = (folder / name).stat().st_size
            if size != wanted["bytes"]:
                raise DamagedError(
                    f"checkpoint {folder}: {name} has {size} bytes instead of {wanted['bytes']}"
                )
            if _sha256(folder / name) != wanted["sha256"]:
                raise DamagedError(f"checkpoint {folder}: {name} was altered (checksum differs)")
    except OSError as error:
        raise DamagedError(f"checkpoint {folder}: {error.filename}: {error.strerror}") from None


def read(folder: Path) -> Checkpoint:
    """Verifies and reads a checkpoint, onto the CPU.

    Raises:
        DamagedError: it is not what was written.
    """
    if not (folder / MARKER).exists():
        raise DamagedError(f"checkpoint {folder}: it was never finished (no file {MARKER!r})")
    verify(folder)
    try:
        return Checkpoint(
            load_file(folder / "model.safetensors"),
            load_file(folder / "optimizer.safetensors"),
            json.loads((folder / "state.json").read_text()),
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise DamagedError(f"checkpoint {folder}: {error}") from None


def delete(folder: Path) -> None:
    """Deletes a checkpoint; a half-deleted one has no marker and counts as none."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)
