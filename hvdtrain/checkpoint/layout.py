"""A checkpoint's folder: what it is called, what says that it is finished, whether it is whole.

    step_00000100/
        model.safetensors       parameters and buffers, by name
        optimizer.safetensors   "parameter name/entry"
        ema.safetensors         averaged weights, by name, with optim.ema_decay
        NAME.rank_00003.safetensors   what rank 3 alone holds; most runs have no such file. With
                                parallel.zero the optimizer's state lies in such files, in pieces
        state.json              step, samples, seed, fingerprint of the data, ...
        files.json              size and sha256 of each file above
        complete                sha256 of files.json; without it this is no checkpoint

It is written under a hidden name, its marker last, synced, and only then renamed: nothing
unfinished ever has a checkpoint's name. It gets a hidden name again before it is deleted.
Hidden names carry host and process, so two processes never write into one folder. Nothing
is pickled. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

from hvdtrain.errors import UserError
from hvdtrain.runtime import heartbeat
from hvdtrain.untrusted import (
    is_of,
    number,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    shown,
)

MARKER = "complete"
SUMS = "files.json"
STATE = "state.json"
TENSORS = ".safetensors"
MODEL = "model" + TENSORS
# A hidden folder of another host, of whose process nothing can be known, is a leftover when
# nothing was written into it for this long. A writer that wakes up later fails at its rename.
_STALE_SECONDS = 3600.0
_READ = 1 << 20  # bytes; reading so many is progress, on a slow disk too


def file_of_rank(name: str, rank: int) -> str:
    """What the file of a part is called, without its ending, that this rank has saved."""
    return f"{name}.rank_{rank:05d}"


def part_and_rank(file: str) -> tuple[str, int | None]:
    """Of a file, without its ending: the part of the state, and which rank has saved it for
    itself alone; None: rank 0 for all."""
    found = re.fullmatch(r"(.+)\.rank_(\d+)", file)
    return (found[1], int(found[2])) if found else (file, None)


class DamagedError(UserError):
    """A checkpoint that was finished once is not what was written."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def named(root: Path) -> list[Path]:
    """The folders below `root` that have a checkpoint's name, finished or not, oldest first."""
    folders = (path for path in root.glob("step_*") if re.fullmatch(r"step_\d+", path.name))
    return sorted(path for path in folders if path.is_dir())


def finished(root: Path) -> list[Path]:
    """Those of them that have their marker."""
    return [folder for folder in named(root) if (folder / MARKER).exists()]


def loss_of(folder: Path) -> float | None:
    """The validation loss after a checkpoint's step; None: not evaluated then, or not finite."""
    try:
        state = read_json(folder / STATE)
        step, loss = (state.get("evaluations") or [[None, None]])[-1]
        return number(loss) if step == state["step"] else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def best(folders: Iterable[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss, where one was evaluated."""
    losses = {folder: loss_of(folder) for folder in folders}
    known = {folder: loss for folder, loss in losses.items() if loss is not None}
    return min(known, key=lambda folder: known[folder]) if known else None


def hidden_name(folder: Path) -> Path:
    """Where this process writes or deletes a checkpoint; another name each time."""
    step = re.search(r"step_\d+", folder.name)
    assert step
    owner = f"{socket.gethostname()}.{os.getpid()}"
    return folder.with_name(f".{step[0]}.{owner}.{uuid4().hex[:8]}.tmp")


def checked_sums(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"bytes": int, "sha256": str}, as it was written.

    Raises:
        DamagedError: files.json is not what was written.
        OSError: it or the marker cannot be read.
    """
    content = read_regular(folder / SUMS)
    if hashlib.sha256(content).hexdigest().encode() != read_regular(folder / MARKER):
        raise DamagedError(f"checkpoint {folder}: {SUMS} or {MARKER} was altered")
    try:
        sums = parse_json(content)
        for name, wanted in sums.items():
            # A name must not lead out of the folder.
            if name != Path(name).name or not is_of(wanted, dict[str, Any]):
                raise ValueError(f"it lists {shown(name)}")
            if not is_of(wanted.get("bytes"), int) or not is_of(wanted.get("sha256"), str):
                raise ValueError(f"{shown(name)} has no size or no checksum")
    except (ValueError, AttributeError) as error:
        raise DamagedError(f"checkpoint {folder}: {SUMS}: {error}") from None
    return dict(sums)


def parse_state(content: bytes) -> dict[str, Any]:
    """The content of state.json.

    Raises:
        ValueError: it is not as hvdtrain writes it.
    """
    state = parse_json(content)
    if not is_of(state, dict[str, Any]) or not is_of(state.get("step"), int):
        raise ValueError(f"{STATE} has no step")
    return dict(state)


def compare(folder: Path, name: str, wanted: dict[str, Any], size: int, sha256: str) -> None:
    """Raises DamagedError, with the file's name, where size (bytes) or sum is another."""
    if size != wanted["bytes"]:
        raise DamagedError(
            f"checkpoint {folder}: {name} has {size} bytes instead of {wanted['bytes']}"
        )
    if sha256 != wanted["sha256"]:
        raise DamagedError(f"checkpoint {folder}: {name} was altered (checksum differs)")


def verify(folder: Path, contents: bool = True) -> int:
    """Compares every file with its size and its checksum.

    Args:
        contents: False compares sizes alone, which reads next to nothing.

    Returns:
        bytes of all files together.

    Raises:
        DamagedError: what differs, by name, or the checkpoint has no marker.
    """
    check_marker(folder)
    total = 0
    try:
        for name, wanted in checked_sums(folder).items():
            size = (folder / name).stat().st_size
            total += size
            compare(folder, name, wanted, size, wanted["sha256"])
            if contents:
                compare(folder, name, wanted, size, sha256_of(folder / name))
        return total
    except OSError as error:
        raise DamagedError(f"checkpoint {folder}: {error.filename}: {error.strerror}") from None


def check_marker(folder: Path) -> None:
    """Raises DamagedError where the checkpoint has no marker."""
    if not (folder / MARKER).exists():
        raise DamagedError(f"checkpoint {folder}: it has no marker (the file {MARKER!r})")


def sha256_of(path: Path) -> str:
    """Return the checksum of a file.

    Raises:
        OSError: it cannot be read.
        RankLostError: this rank's generation is over.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_READ):
            digest.update(block)
            heartbeat.OWN.advance()
    return digest.hexdigest()


def delete(folder: Path) -> None:
    """Deletes a checkpoint, or what another process left of one: at once, or not at all.

    Raises:
        OSError: it cannot be deleted. That another process did so already is no error.
    """
    hidden = hidden_name(folder)
    try:
        os.rename(folder, hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden)


def delete_leftovers(root: Path) -> None:
    """Deletes the hidden folders of processes that are gone; those of living ones stay."""
    for folder in root.glob(".step_*.tmp"):
        if _is_left(folder):
            delete(folder)


def _is_left(folder: Path) -> bool:
    owner = re.fullmatch(r"\.step_\d+\.(.+)\.(\d+)\.\w+\.tmp", folder.name)
    if owner is None:
        return True
    host, process = owner.groups()
    if host == socket.gethostname() and not Path(f"/proc/{process}").exists():
        return True
    try:
        newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except FileNotFoundError:  # its owner is at work
        return False
    return time.time() - newest > _STALE_SECONDS
