"""Configured text or tokens, packed into samples of equal length."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvdtrain.data.config import DataConfig
from hvdtrain.data.file_kinds import check_text
from hvdtrain.data.files import hidden_copy, remove_leftovers, split_files
from hvdtrain.data.remote import DataFile
from hvdtrain.data.text import RECORDS, Tokenizer, document_files, encode_file
from hvdtrain.data.token_files import FileTokens, TokenMeta, read_token_files
from hvdtrain.data.tokens import (
    AnyTokens,
    TokenArray,
    TokenWindows,
    split_end,
)
from hvdtrain.errors import UserError
from hvdtrain.files import sync_directory
from hvdtrain.log import logger

_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a run.

    Args:
        train, validation: consecutive arrays.
        meta: metadata of both.
    """

    data: DataConfig
    train: Sequence[AnyTokens]
    validation: Sequence[AnyTokens]
    meta: TokenMeta

    @property
    def has_documents(self) -> bool:
        """Whether an index next to each file tells where documents begin."""
        arrays = (*self.train, *self.validation)
        return all(isinstance(array, FileTokens) and array.has_documents for array in arrays)

    def windows(
        self, context: int, key: str, vocab_size: int, documents: bool = False
    ) -> tuple[TokenWindows, TokenWindows]:
        """(train, validation).

        Args:
            key: the configuration key that sets `context`, for messages.
            vocab_size: number of tokens that the model knows.
            documents: see TokenWindows; `has_documents` is True.

        Raises:
            UserError: one of them would have no sample.
        """
        train = TokenWindows(self.train, context, vocab_size, documents)
        validation = TokenWindows(self.validation, context, vocab_size, documents)
        for split, windows in zip(_SPLITS, (train, validation), strict=True):
            if len(windows) == 0:
                raise UserError(
                    f"{self.data.key(split)}: {windows.tokens} tokens (from {self._source(split)}) "
                    f"are too few for one sample of {key} + 1 = {context + 1}"
                )
        return train, validation

    def _source(self, split: str) -> str:
        """Source of the tokens; validation falls back to a fraction of the training files."""
        data = self.data
        named = data.validation if split == "validation" and data.validation else data.train
        return ", ".join(named) or "the standard library"


def read_packed(
    data: DataConfig, tokenizer: Tokenizer | None, described: TokenMeta | None = None
) -> PackedTokens:
    """Read the tokens of a run.

    Args:
        tokenizer: of text.
        described: see read_token_files.

    Raises:
        UserError: something cannot be read, or training and validation data do not match.
    """
    if data.source != "tokens":
        assert tokenizer is not None
        separator = tokenizer.separator(data.source, data.document_mask)
        if separator is None and data.source in RECORDS:
            logger.warning(
                "%s has no end-of-document token: nothing separates documents", tokenizer.name
            )
        train, validation = read_text(data, tokenizer)
        meta = replace(tokenizer.meta, separator=separator)
        return PackedTokens(data, [train], [validation], meta)
    arrays, meta = read_token_files(data.key("train"), data.train, described)
    if data.validation:
        held_out, other = read_token_files(data.key("validation"), data.validation, described)
        if other != meta:
            raise UserError(
                f"{data.key('train')} is {meta}, but {data.key('validation')} is {other}"
            )
        return PackedTokens(data, arrays, held_out, meta)
    *rest, last = arrays
    last, end = split_end(last, data.validation_fraction)
    return PackedTokens(data, [*rest, last], [end], meta)


def separate_documents(sources: Mapping[str, PackedTokens]) -> tuple[int | None, bool]:
    """How documents are distinguished, with data.document_mask.

    Returns:
        (The token between documents, if it is known; whether the indexes next to all files tell
        where documents begin.)

    Raises:
        UserError: neither is known.
    """
    indexed = all(source.has_documents for source in sources.values())
    metas = {name: source.meta for name, source in sources.items()}
    without = [name for name, meta in metas.items() if meta.separator is None]
    if without and not indexed:
        of_source = f" (data.mixture.{without[0]})" if without[0] else ""
        raise UserError(
            f"data.document_mask needs token files in which documents are separated{of_source}: "
            "make them with `hvdtrain data tokenize --separate`, or write the number of the token "
            "that separates them into tokens.json (separator). Indexes (*.idx, *.ds.index) must "
            "be next to all files"
        )
    return common_meta(metas).separator, indexed


def common_meta(metas: Mapping[str, TokenMeta]) -> TokenMeta:
    """Metadata of the tokens of all sources of a mixture.

    Raises:
        UserError: the sources have different tokenizers or separators.
    """
    first, *_ = found = list(metas.values())
    separators = {meta.separator for meta in found}
    tokenizers = {meta.vocabulary for meta in found}
    if len(tokenizers) > 1 or len(separators - {None}) > 1:
        shown = "; ".join(f"{name}: {meta}" for name, meta in metas.items())
        raise UserError(f"data.mixture: the sources were made with different tokenizers: {shown}")
    if len(separators) == 1:
        return first
    # Some sources consist of records, which a token separates, and others of plain text.
    return replace(first, separator=max(separator or 0 for separator in separators))


def text_files(config: DataConfig) -> tuple[list[DataFile], list[DataFile]]:
    """(train, validation) files; validation is empty if a single file has to be split.

    Raises:
        UserError: a configured pattern matches no file.
    """
    source, keys = config.source, ("data.source", "data.text_key")
    train = document_files(config.key("train"), config.train, source, keys)
    if config.validation:
        return train, document_files(config.key("validation"), config.validation, source, keys)
    if len(train) == 1:
        return train, []
    return split_files(train, config.validation_fraction)


def read_text(config: DataConfig, tokenizer: Tokenizer) -> tuple[TokenArray, TokenArray]:
    """(train, validation) tokens of the configured text.

    Raises:
        UserError: a file is missing, unreadable or not text, or the tokenizer cannot separate
            documents.
    """
    separator = tokenizer.separator(config.source, config.document_mask)
    source = config.source, config.text_key, separator
    train_files, validation_files = text_files(config)

    def tokens(files: Sequence[DataFile]) -> TokenArray:
        return np.concatenate([encode_file(path, tokenizer, *source) for path in files])

    def both() -> tuple[TokenArray, TokenArray]:
        if config.source not in RECORDS:
            check_text(config.key("train"), train_files)
            check_text(config.key("validation" if config.validation else "train"), validation_files)
        train = tokens(train_files)
        if validation_files:
            return train, tokens(validation_files)
        return split_end(train, config.validation_fraction)

    if config.cache is None:
        return both()
    tokenizer_files = [Path(config.tokenizer)] if config.tokenizer else []
    name = cache_name(
        [*train_files, *validation_files, *tokenizer_files],
        len(train_files),
        source,
        config.validation_fraction,
    )
    return cached(Path(config.cache), name, both)


# --- cache of tokenized text, for the ranks of a host and later starts --------


def cache_name(files: Iterable[DataFile], *settings: object) -> str:
    """Name that changes with the settings, and with a file's path, size or modification time."""
    stats = ((str(path.absolute()), path.stat()) for path in files)
    found = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return hashlib.sha256(json.dumps([found, settings]).encode()).hexdigest()[:16]


def cached(
    directory: Path, name: str, make: Callable[[], tuple[TokenArray, TokenArray]]
) -> tuple[TokenArray, TokenArray]:
    """Return the result of `make`, memory-mapped; call it only if nothing is cached as `name`.

    Processes that run this at the same time may each call `make`; all use the result that was
    stored first.

    Raises:
        UserError: the directory cannot be written, or its content is damaged.
    """
    kept = directory.expanduser() / name
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


def _write(directory: Path, tokens: tuple[TokenArray, TokenArray]) -> None:
    for name, array in zip(_SPLITS, tokens, strict=True):
        with open(directory / f"{name}.npy", "wb") as file:
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
