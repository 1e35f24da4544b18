"""Layout of a checkpoint directory: names, completion marker, verification.

    step_00000100/
        model.safetensors       parameters and buffers, by name
        optimizer.safetensors   "parameter name/entry"
        ema.safetensors         averaged weights, by name, with optim.ema_decay
        NAME.rank_00003.safetensors   state that only rank 3 holds; most runs have no such file.
                                With parallel.shard.stage 1 the optimizer state is in such files, in
                                shards
        state.json              step, samples, seed, fingerprint of the data, ...
        files.json              size and sha256 of each file above
        complete                sha256 of files.json; without it this is not a checkpoint

A checkpoint is written under a hidden name, with the marker last, synced, and only then renamed:
nothing unfinished ever has a checkpoint's name. Before deletion it is renamed to a hidden name
again. Hidden names contain host and process, so two processes never write into one directory.
Nothing is pickled. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
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
# A hidden directory from another host, whose processes are not visible here, is a leftover if
# nothing was written into it for this long. A writer that wakes up later fails at its rename.
_STALE_SECONDS = 3600.0
_READ = 1 << 20  # bytes; reading this many counts as progress, even on a slow disk

K = TypeVar("K")


def file_of_rank(name: str, rank: int) -> str:
    """Name, without suffix, of the file in which this rank has saved a part."""
    return f"{name}.rank_{rank:05d}"


def part_and_rank(file: str) -> tuple[str, int | None]:
    """Return, for a file name without suffix, the part of the state and the rank that has saved it
    for itself; None if rank 0 has saved it for all ranks."""
    found = re.fullmatch(r"(.+)\.rank_(\d+)", file)
    return (found[1], int(found[2])) if found else (file, None)


class DamagedError(UserError):
    """A finished checkpoint differs from what was written."""


def directory_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(directory: Path) -> int:
    """The step of a directory with a checkpoint's name."""
    return int(directory.name.removeprefix("step_"))


def named(root: Path) -> list[Path]:
    """The directories below `root` with a checkpoint's name, finished or not, oldest first."""
    directories = (path for path in root.glob("step_*") if re.fullmatch(r"step_\d+", path.name))
    return sorted(path for path in directories if path.is_dir())


def finished(root: Path) -> list[Path]:
    """The directories below `root` that are finished checkpoints, oldest first."""
    return [directory for directory in named(root) if (directory / MARKER).exists()]


def loss_of(directory: Path) -> float | None:
    """The validation loss after a checkpoint's step; None if not evaluated then, or not finite."""
    try:
        return loss_in(read_json(directory / STATE))
    except (OSError, ValueError):
        return None


def loss_in(state: Any) -> float | None:
    """The same for the content of state.json."""
    try:
        step, loss = (state.get("evaluations") or [[None, None]])[-1]
        return number(loss) if step == state["step"] else None
    except (AttributeError, ValueError, TypeError, LookupError):
        return None


def best(directories: Iterable[Path]) -> Path | None:
    """The checkpoint with the lowest validation loss; None if none was evaluated."""
    return _lowest({directory: loss_of(directory) for directory in directories})


def _lowest(losses: Mapping[K, float | None]) -> K | None:
    known = {key: loss for key, loss in losses.items() if loss is not None}
    return min(known, key=lambda key: known[key]) if known else None


def retained(losses: Mapping[K, float | None], keep: int) -> set[K]:
    """The checkpoints to keep: the newest ones, and the one with the lowest validation loss.

    Args:
        losses: of each checkpoint, oldest first; None: unknown, or it does not count.
    """
    lowest = _lowest(losses)
    return {*list(losses)[-keep:], *([] if lowest is None else [lowest])}


def hidden_name(directory: Path) -> Path:
    """A hidden name under which this process writes or deletes a checkpoint; unique per call."""
    step = re.search(r"step_\d+", directory.name)
    assert step
    owner = f"{socket.gethostname()}.{os.getpid()}"
    return directory.with_name(f".{step[0]}.{owner}.{uuid4().hex[:8]}.tmp")


def checked_sums(directory: Path) -> dict[str, dict[str, Any]]:
    """File name -> {"bytes": int, "sha256": str}, as it was written.

    Raises:
        DamagedError: files.json differs from what was written.
        OSError: files.json or the marker cannot be read.
    """
    return parse_sums(read_regular(directory / SUMS), read_regular(directory / MARKER), directory)


def parse_sums(content: bytes, marker: bytes, where: Path | str) -> dict[str, dict[str, Any]]:
    """Parse the contents of files.json and of the marker.

    Args:
        where: location of the checkpoint, for errors.

    Raises:
        DamagedError: files.json differs from what was written.
    """
    if hashlib.sha256(content).hexdigest().encode() != marker:
        raise DamagedError(f"checkpoint {where}: {SUMS} or {MARKER} was altered")
    try:
        sums = parse_json(content)
        for name, wanted in sums.items():
            # A name must not point outside the directory.
            if name != Path(name).name or not is_of(wanted, dict[str, Any]):
                raise ValueError(f"it lists {shown(name)}")
            if not is_of(wanted.get("bytes"), int) or not is_of(wanted.get("sha256"), str):
                raise ValueError(f"{shown(name)} has no size or no checksum")
    except (ValueError, AttributeError) as error:
        raise DamagedError(f"checkpoint {where}: {SUMS}: {error}") from None
    return dict(sums)


def parse_state(content: bytes) -> dict[str, Any]:
    """Parse the content of state.json.

    Raises:
        ValueError: it does not have hvdtrain's format.
    """
    state = parse_json(content)
    if not is_of(state, dict[str, Any]) or not is_of(state.get("step"), int):
        raise ValueError(f"{STATE} has no step")
    return dict(state)


def compare(
    directory: Path | str, name: str, wanted: Mapping[str, Any], size: int, sha256: str
) -> None:
    """Raise DamagedError, with the file's name, if the size (bytes) or checksum differs."""
    if size != wanted["bytes"]:
        raise DamagedError(
            f"checkpoint {directory}: {name} has {size} bytes instead of {wanted['bytes']}"
        )
    if sha256 != wanted["sha256"]:
        raise DamagedError(f"checkpoint {directory}: {name} was altered (checksum differs)")


def verify(directory: Path, contents: bool = True) -> int:
    """Compare every file with its recorded size and checksum.

    Args:
        contents: False compares only sizes, which reads almost nothing.

    Returns:
        bytes of all files together.

    Raises:
        DamagedError: names the file that differs, or says that the marker is missing.
    """
    check_marker(directory)
    total = 0
    try:
        for name, wanted in checked_sums(directory).items():
            size = (directory / name).stat().st_size
            total += size
            compare(directory, name, wanted, size, wanted["sha256"])
            if contents:
                compare(directory, name, wanted, size, sha256_of(directory / name))
        return total
    except OSError as error:
        raise DamagedError(f"checkpoint {directory}: {error.filename}: {error.strerror}") from None


def check_marker(directory: Path) -> None:
    """Raise DamagedError if the checkpoint has no marker."""
    if not (directory / MARKER).exists():
        raise DamagedError(f"checkpoint {directory}: it has no marker (the file {MARKER!r})")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file.

    Raises:
        OSError: it cannot be read.
        RankLostError: this rank's generation has ended.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_READ):
            digest.update(block)
            heartbeat.HEARTBEAT.advance()
    return digest.hexdigest()


def delete(directory: Path) -> None:
    """Delete a checkpoint, or the leftover of another process; atomically where that is possible.

    Raises:
        OSError: it cannot be deleted. It is not an error if another process has deleted it already.
    """
    hidden = hidden_name(directory)
    try:
        os.rename(directory, hidden)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # In a lower layer of an overlay file system, such as a container's image.
        (directory / MARKER).unlink(missing_ok=True)
        hidden = directory
    shutil.rmtree(hidden)


def move(directory: Path, to: Path) -> None:
    """Rename a checkpoint; copy and delete it if it is in a lower layer of a file system.

    Raises:
        OSError: it cannot be renamed.
    """
    try:
        os.rename(directory, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copytree(directory, to)
        delete(directory)


def leftovers(root: Path) -> list[Path]:
    """Return the hidden directories of dead processes, but not of running ones."""
    return [directory for directory in root.glob(".step_*.tmp") if _is_left(directory)]


def _is_left(directory: Path) -> bool:
    owner = re.fullmatch(r"\.step_\d+\.(.+)\.(\d+)\.\w+\.tmp", directory.name)
    if owner is None:
        return True
    host, process = owner.groups()
    if host == socket.gethostname() and not Path(f"/proc/{process}").exists():
        return True
    try:
        newest = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except FileNotFoundError:  # its owner is working on it
        return False
    return time.time() - newest > _STALE_SECONDS
