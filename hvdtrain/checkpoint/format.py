"""Writing and reading of a checkpoint's content; layout.py describes the files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
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
    directory_name,
    hidden_name,
    parse_state,
    part_and_rank,
    sha256_of,
)
from hvdtrain.checkpoint.tensor_file import read_file, unpack, write_tensors
from hvdtrain.files import sync_directory, write_atomic, write_synced
from hvdtrain.runtime.tensor_shards import ShardPosition

# Longest wait for the files of other ranks: a file system may hang for a minute.
_OTHERS_TIMEOUT_S = 120.0
_LOOK_SECONDS = 0.05
# Suffix in the hidden directory only: size and sha256 of a file that another rank has finished.
_SUM = ".sum"


@dataclass(frozen=True)
class SharedDirectory:
    """A checkpoint that several ranks write into one directory, each rank its own files.

    Args:
        directory: hidden name of the directory, chosen by rank 0.
        others: the files of the other ranks, without suffix; rank 0 waits for them.
        given_up: set when waiting is pointless: a rank may be gone, or has failed.
        failures: why other ranks could not write their files, as far as they have reported it.
    """

    directory: str
    others: tuple[str, ...] = ()
    given_up: Event = field(default_factory=Event)
    failures: list[str] = field(default_factory=list)


@dataclass
class Checkpoint:
    """Content of a checkpoint.

    Args:
        parts: tensors by name for each part of the state, see StatePart. A part that one rank
            saves for itself is named by `file_of_rank`.
        state: anything JSON can hold; "step" (int) is required
        shared: None if rank 0 writes the checkpoint alone.
        directory: directory from which it was read.
        positions: for each of `parts` with shards of larger tensors, the position of each shard.
    """

    parts: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    shared: SharedDirectory | None = None
    directory: Path | None = None
    positions: dict[str, dict[str, ShardPosition]] = field(default_factory=dict)


def write(root: Path, checkpoint: Checkpoint, confirm: Callable[[], None] = lambda: None) -> Path:
    """Write a checkpoint below `root`, on rank 0; replace a directory of the same step.

    Args:
        confirm: called before the final rename; raises OSError to prevent it.

    Returns:
        The finished directory.

    Raises:
        OSError: writing failed; nothing that looks finished was left behind.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / directory_name(checkpoint.state["step"])
    shared = checkpoint.shared
    hidden = hidden_name(final) if shared is None else root / shared.directory
    hidden.mkdir(exist_ok=shared is not None)
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
    sync_directory(root)
    return final


def _write_files(directory: Path, checkpoint: Checkpoint) -> None:
    sums = _write_parts(directory, checkpoint)
    state = json.dumps(checkpoint.state, indent=1).encode()
    write_synced(directory / STATE, state)
    sums[STATE] = {"bytes": len(state), "sha256": hashlib.sha256(state).hexdigest()}
    if checkpoint.shared is not None:
        sums |= _sums_of_others(directory, checkpoint.shared)
    listed = json.dumps(sums, indent=1).encode()
    write_synced(directory / SUMS, listed)
    sync_directory(directory)
    write_synced(directory / MARKER, hashlib.sha256(listed).hexdigest().encode())
    sync_directory(directory)


def _write_parts(directory: Path, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    written = {}
    for part, tensors in checkpoint.parts.items():
        name = f"{part}{TENSORS}"
        written[name] = write_tensors(directory / name, tensors, checkpoint.positions.get(part))
    return written


def write_own_files(root: Path, checkpoint: Checkpoint) -> None:
    """Write this rank's files of a shared checkpoint, on every rank but rank 0.

    Raises:
        OSError: a file could not be written, or rank 0 has given up the checkpoint.
    """
    assert checkpoint.shared is not None
    directory = root / checkpoint.shared.directory
    directory.mkdir(parents=True, exist_ok=True)  # any rank may be the first
    for name, found in _write_parts(directory, checkpoint).items():
        write_atomic(directory / f"{name}{_SUM}", json.dumps(found).encode())


def _sums_of_others(directory: Path, shared: SharedDirectory) -> dict[str, dict[str, Any]]:
    """Wait for the files of the other ranks; return their sizes and checksums.

    Raises:
        OSError: a file has not arrived in time.
    """
    deadline = time.monotonic() + _OTHERS_TIMEOUT_S
    sums = {}
    for name in (f"{other}{TENSORS}" for other in shared.others):
        found = directory / f"{name}{_SUM}"
        while not found.exists():
            if shared.failures:
                raise OSError(errno.EIO, "; ".join(shared.failures))
            if shared.given_up.is_set() or time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT,
                    "another rank has not written it: is run.root one directory for all hosts?",
                    name,
                )
            time.sleep(_LOOK_SECONDS)
        sums[name] = json.loads(found.read_bytes())
        found.unlink()
    return sums


def read(directory: Path) -> Checkpoint:
    """Verify a checkpoint and read what rank 0 has saved for all ranks, onto the CPU.

    Raises:
        DamagedError: it differs from what was written.
    """
    return _read(directory, lambda rank: rank is None)


def read_files_of_ranks(directory: Path, wanted: Callable[[int], bool]) -> Checkpoint:
    """Verify a checkpoint and read what some ranks have saved for themselves, onto the CPU.

    Args:
        wanted: whether to read the files of a rank.

    Raises:
        DamagedError: it differs from what was written.
    """
    return _read(directory, lambda rank: rank is not None and wanted(rank), verify_others=False)


def _read(
    directory: Path, wanted: Callable[[int | None], bool], verify_others: bool = True
) -> Checkpoint:
    check_marker(directory)
    try:
        sums = checked_sums(directory)
        content = _Content(directory, sums)
        names = [file.removesuffix(TENSORS) for file in sums if file.endswith(TENSORS)]
        own = [name for name in names if wanted(part_and_rank(name)[1])]
        others = [name for name in names if name not in own] if verify_others else []
        with ThreadPoolExecutor(4) as pool:  # hashing one is slower than a good disk
            checks = [pool.submit(content.check, f"{name}{TENSORS}") for name in others]
            *files, state = pool.map(content.read, [*(f"{name}{TENSORS}" for name in own), STATE])
            for check in checks:
                check.result()
        parts = {name: unpack(file) for name, file in zip(own, files, strict=True)}
        return Checkpoint(parts, parse_state(state.numpy().tobytes()), directory=directory)
    except OSError as error:
        raise DamagedError(f"checkpoint {directory}: {error.filename}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise DamagedError(f"checkpoint {directory}: {error}") from None


@dataclass(frozen=True)
class _Content:
    """The files of a checkpoint, each compared with its recorded size and checksum."""

    directory: Path
    sums: Mapping[str, dict[str, Any]]

    def read(self, name: str) -> Tensor:
        content, found = read_file(self.directory / name)
        compare(self.directory, name, self.sums[name], found["bytes"], found["sha256"])
        return content

    def check(self, name: str) -> None:
        path = self.directory / name
        compare(self.directory, name, self.sums[name], path.stat().st_size, sha256_of(path))
