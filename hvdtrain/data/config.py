"""Configuration of token data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.errors import require


@dataclass
class DataConfig:
    """Text or tokens to train on.

    Args:
        source: `text` (files of any kind) or `tokens` (made by `hvdtrain data tokenize`)
        train: files, folders or globs; empty = the source files of Python's standard library
        validation: the same for validation; empty = a fraction of `data.train`
        validation_fraction: that fraction, taken by file (of a single file: its end)
        tokenizer: a tokenizer.json of the `tokenizers` library, for `data.source text`;
            null = bytes
    """

    source: Literal["text", "tokens"] = "text"
    train: list[str] | str = field(default_factory=list)
    validation: list[str] | str = field(default_factory=list)
    validation_fraction: float = 0.05
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.train, str):
            self.train = [self.train]
        if isinstance(self.validation, str):
            self.validation = [self.validation]
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must lie in (0, 1), not {self.validation_fraction}",
        )
        require(
            self.source == "text" or bool(self.train),
            "data.source tokens needs data.train: the token files made by `hvdtrain data tokenize`",
        )
        require(
            self.source == "text" or self.tokenizer is None,
            "data.tokenizer is for data.source text; token files are tokenized already",
        )
