"""Configured text or tokens, packed into samples of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.data.config import DataConfig
from hvdtrain.data.text import Tokenizer, cut, read_text
from hvdtrain.data.tokens import TokenArray, TokenMeta, TokenWindows, read_token_files
from hvdtrain.errors import UserError


@dataclass(frozen=True)
class PackedTokens:
    """The tokens of a run.

    Args:
        train, validation: consecutive arrays.
        meta: of both.
    """

    data: DataConfig
    train: Sequence[TokenArray]
    validation: Sequence[TokenArray]
    meta: TokenMeta

    def windows(self, context: int, key: str) -> tuple[TokenWindows, TokenWindows]:
        """(train, validation).

        Args:
            key: the configuration key that sets `context`, for messages.

        Raises:
            UserError: one of them would have no sample.
        """
        train = TokenWindows(self.train, context)
        validation = TokenWindows(self.validation, context)
        for name, windows in (("data.train", train), ("data.validation", validation)):
            if len(windows) == 0:
                raise UserError(
                    f"{name}: {windows.tokens} tokens (from {self._source(name)}) are too few for "
                    f"one sample of {key} + 1 = {context + 1}"
                )
        return train, validation

    def _source(self, name: str) -> str:
        """Source of the tokens; validation falls back to a fraction of the training files."""
        data = self.data
        named = data.validation if name == "data.validation" and data.validation else data.train
        return ", ".join(named) or "the standard library"


def read_packed(data: DataConfig, tokenizer: Tokenizer | None) -> PackedTokens:
    """Args: tokenizer: for text; None for `data.source tokens`.

    Raises:
        UserError: something cannot be read, or training and validation data do not match.
    """
    if tokenizer is not None:
        separator = tokenizer.separator(data.source, data.document_mask)
        train, validation = read_text(data, tokenizer)
        meta = replace(tokenizer.meta, separator=separator)
        return PackedTokens(data, [train], [validation], meta)
    arrays, meta = read_token_files("data.train", data.train)
    if data.validation:
        held_out, other = read_token_files("data.validation", data.validation)
        if other != meta:
            raise UserError(f"data.train is {meta}, but data.validation is {other}")
        return PackedTokens(data, arrays, held_out, meta)
    *rest, last = arrays
    last, end = cut(last, data.validation_fraction)
    return PackedTokens(data, [*rest, last], [end], meta)
