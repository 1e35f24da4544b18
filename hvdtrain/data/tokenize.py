"""Tokenization of text to flat token files, shared among any number of ranks.

The tokens of a split's files are concatenated, sorted by path, so the result does not depend on
the world size. A rank processes neighboring files and writes their tokens to its own temporary
file. Rank 0's temporary file is the beginning of the final file; the other ranks append theirs. A
rank holds one file's text and tokens at a time.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hvdtrain.data.file_kinds import check_text
from hvdtrain.data.files import (
    assign_files,
    hidden_copy,
    remove_leftovers,
    split_files,
)
from hvdtrain.data.remote import DataFile
from hvdtrain.data.text import RECORDS, Tokenizer, document_files, encode_file
from hvdtrain.data.token_files import TokenMeta
from hvdtrain.data.token_formats import DTYPES
from hvdtrain.data.tokens import TokenArray, split_end
from hvdtrain.errors import UserError
from hvdtrain.files import sync_directory
from hvdtrain.run_files.owner_token import boot
from hvdtrain.runtime.mpi import RankGroup, on_all_ranks
from hvdtrain.untrusted import checked, read_json

SPLITS = ("train", "validation")
Counts = dict[str, int]  # split -> tokens
_LOCK = ".tokenize.lock"
_AT_ONCE = 256  # documents


@dataclass(frozen=True)
class Writer:
    """Content of `out`/.tokenize.lock: the process that writes there, rank 0 of its run.

    Args:
        boot: boot ID of its host's kernel.
        started: clock ticks from the boot to the start of the process. A restarted container can
            have the same host name and pid.
        tag: see TokenizePlan.
    """

    host: str
    pid: int
    boot: str
    started: int
    tag: str

    @classmethod
    def here(cls, tag: str) -> Writer:
        pid = os.getpid()
        return cls(socket.gethostname(), pid, boot(), _started(pid), tag)

    @property
    def is_dead(self) -> bool:
        """Whether the writer is dead; False if unknown, because it may run on another host."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot() or self.started != _started(self.pid)


@dataclass(frozen=True)
class Source:
    """Text to tokenize, and the options.

    Args:
        patterns: files, directories or globs; none = the standard library
        tokenizer: a tokenizer.json; None = bytes
        validation_fraction: fraction of the bytes for validation, split by file (for a single
            file: its end), as with `data.source text`
        kind: `text`, `jsonl`, `parquet` or `arrow`, as data.source
        text_key: key of a record's text
        separate: put an end-of-document token after each document; records always get one, if the
            tokenizer has it
    """

    patterns: Sequence[str] = ()
    tokenizer: str | None = None
    validation_fraction: float = 0.05
    kind: str = "text"
    text_key: str = "text"
    separate: bool = False


@dataclass(frozen=True)
class TokenizePlan:
    """Work of all ranks; made by rank 0.

    Args:
        out: output directory
        files: (split, path, rank that tokenizes it), in the order of the result
        cut: there is one file, and its end becomes the validation data
        meta: content of tokens.json
        tag: distinguishes the temporary files of this run from another run's
    """

    out: Path
    files: list[tuple[str, DataFile, int]]
    cut: bool
    meta: TokenMeta
    tag: str

    @property
    def suffix(self) -> str:
        return ".u16" if self.meta.vocab_size <= 1 << 16 else ".u32"

    def result(self, name: str) -> Path:
        return self.out / f"{name}{self.suffix}"

    def part(self, name: str, rank: int) -> Path:
        return self.out / f".{name}{self.suffix}.{self.tag}.{rank}.tmp"


def tokenize(source: Source, out: Path, ranks: RankGroup) -> dict[Path, int]:
    """Write train.u16 and validation.u16 (.u32 if the vocabulary needs it) and tokens.json.

    Existing files in `out` are replaced only when all tokens are on disk.

    Args:
        source: text to tokenize.
        out: directory, created if missing; must be the same for all ranks.
        ranks: participants; each calls this with the same arguments.

    Returns:
        Token file -> number of tokens.

    Raises:
        UserError: on every rank, if the input, the tokenizer or `out` is invalid on any rank, or
            another run writes there.
    """
    first = ranks.rank == 0
    plan = on_all_ranks(ranks, lambda: _plan(source, out, ranks.size) if first else None)[0]
    assert plan is not None
    with ExitStack() as parts:
        if first:
            parts.callback(_release, plan)
        on_all_ranks(ranks, lambda: _hold_parts(parts, plan, ranks.rank))
        counts = on_all_ranks(ranks, lambda: _write_parts(plan, source, ranks.rank))
        on_all_ranks(ranks, lambda: _join_part(plan, counts, ranks.rank))
        total = {name: sum(count[name] for count in counts) for name in SPLITS}
        on_all_ranks(ranks, lambda: _publish(plan, total) if first else None)
    return {plan.result(name): total[name] for name in SPLITS}


def _plan(source: Source, out: Path, ranks: int) -> TokenizePlan:
    fraction = source.validation_fraction
    if not 0 < fraction < 1:
        raise UserError(f"--validation-fraction must lie in (0, 1), not {fraction}")
    tokenizer = Tokenizer(source.tokenizer)
    paths = document_files("--input", source.patterns, source.kind, ("--source", "--text-key"))
    if source.kind not in RECORDS:
        check_text("--input", paths)
    train, validation = (paths, []) if len(paths) == 1 else split_files(paths, fraction)
    files = [("train", path) for path in train] + [("validation", path) for path in validation]
    owners = assign_files([path.stat().st_size for _, path in files], ranks)
    meta = replace(tokenizer.meta, separator=tokenizer.separator(source.kind, source.separate))
    out.mkdir(parents=True, exist_ok=True)
    tag = _claim(out)
    for name in SPLITS:
        remove_leftovers(out, f".{name}.u*.tmp")
    return TokenizePlan(
        out,
        [(name, path, owner) for (name, path), owner in zip(files, owners, strict=True)],
        not validation,
        meta,
        tag,
    )


def _hold_parts(stack: ExitStack, plan: TokenizePlan, rank: int) -> None:
    """Remove this rank's parts at the end; after a kill, the next run in the directory does so."""
    for name in SPLITS:
        stack.enter_context(hidden_copy(plan.part(name, rank)))


def _claim(out: Path) -> str:
    """Make this run the only one that writes to `out`; return its tag.

    Uses exclusive creation of a file, because file system locks do not work between hosts
    everywhere. The file of a dead run on this host is deleted.

    Raises:
        UserError: another run writes there.
    """
    lock, own = out / _LOCK, Writer.here(secrets.token_hex(4))
    before = _writer(out)
    if before is not None and before.is_dead:
        lock.unlink(missing_ok=True)
    try:
        file = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except FileExistsError:
        theirs = _writer(out)
        name = f" (process {theirs.pid} on {theirs.host})" if theirs else ""
        raise UserError(
            f"{out}: another `hvdtrain data tokenize`{name} writes there; wait for it, or delete "
            f"{lock} if that process no longer runs"
        ) from None
    with open(file, "w") as opened:
        json.dump(asdict(own), opened)
    return own.tag


def _started(pid: int) -> int:
    """Start time, see Writer; -1 if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def _writer(out: Path) -> Writer | None:
    """The current writer; None if there is no lock, or if it has just been created."""
    try:
        return checked(Writer, read_json(out / _LOCK))
    except (OSError, ValueError):
        return None


def _release(plan: TokenizePlan) -> None:
    writer = _writer(plan.out)
    if writer is not None and writer.tag == plan.tag:
        with suppress(OSError):
            (plan.out / _LOCK).unlink()


def _write_parts(plan: TokenizePlan, source: Source, rank: int) -> Counts:
    """Tokenize this rank's files; return the number of its tokens per split."""
    tokenizer = Tokenizer(source.tokenizer)
    counts = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        parts = {name: stack.enter_context(open(plan.part(name, rank), "xb")) for name in SPLITS}
        for name, path, owner in plan.files:
            if owner != rank:
                continue
            tokens = _encode(tokenizer, path, source, plan.meta.separator)
            tokens = tokens.astype(DTYPES[plan.suffix])
            pieces = {name: tokens}
            if plan.cut:
                pieces = dict(
                    zip(SPLITS, split_end(tokens, source.validation_fraction), strict=True)
                )
            for piece_name, piece in pieces.items():
                parts[piece_name].write(piece.data)
                counts[piece_name] += len(piece)
    return counts


def _encode(
    tokenizer: Tokenizer, path: DataFile, source: Source, separator: int | None
) -> TokenArray:
    tokens = encode_file(path, tokenizer, source.kind, source.text_key, separator, _AT_ONCE)
    if len(tokens) and tokens.max() >= tokenizer.vocab_size:
        raise UserError(
            f"{path}: token {tokens.max()} is outside the vocabulary of {tokenizer.vocab_size}: "
            f"the token numbers in {tokenizer.name} have gaps"
        )
    return tokens


def _join_part(plan: TokenizePlan, counts: Sequence[Counts], rank: int) -> None:
    """Copy this rank's tokens to their place in rank 0's part, and sync them to disk."""
    for name in SPLITS:
        before = sum(count[name] for count in counts[:rank]) * DTYPES[plan.suffix].itemsize
        with open(plan.part(name, 0), "r+b") as whole:
            if rank > 0:
                whole.seek(before)
                with open(plan.part(name, rank), "rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
            whole.flush()
            os.fsync(whole.fileno())


def _publish(plan: TokenizePlan, total: Counts) -> None:
    """Replace the old files by the new ones; readers need tokens.json, which is written last."""
    for name in SPLITS:
        if total[name] == 0:
            raise UserError(
                f"the {name} data would have no tokens: {len(plan.files)} files are too short for "
                "this --validation-fraction"
            )
        size = plan.part(name, 0).stat().st_size
        if size != total[name] * DTYPES[plan.suffix].itemsize:
            raise UserError(
                f"{plan.out}: {size} bytes of {name} were written; do all ranks share it?"
            )
    # Two runs may have removed the lock of the same dead run.
    writer = _writer(plan.out)
    if writer is None or writer.tag != plan.tag:
        raise UserError(
            f"{plan.out}: another `hvdtrain data tokenize` writes there; start it again"
        )
    (plan.out / "tokens.json").unlink(missing_ok=True)
    for name in SPLITS:
        for suffix in DTYPES:
            (plan.out / f"{name}{suffix}").unlink(missing_ok=True)
        plan.part(name, 0).rename(plan.result(name))
    sync_directory(plan.out)
    plan.meta.write(plan.out)
    sync_directory(plan.out)
