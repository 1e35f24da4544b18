"""Text as tokens: the bytes of files, or what a `tokenizers` file makes of them.

The tokens are held in memory, once a rank. Text of many gigabytes is better
tokenized once (`hvdtrain data tokenize`) and memory-mapped (`data.source tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdtrain.data.config import DataConfig
from hvdtrain.data.files import expand, split, standard_library
from hvdtrain.data.token_bytes import bytes_of_tokens
from hvdtrain.data.tokens import TokenArray, TokenMeta, with_separator
from hvdtrain.errors import UserError

BYTES_VOCABULARY = 256
# Names that tokenizers give to the token that ends a document.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


class Tokenizer:
    """Bytes, or a tokenizer.json of the `tokenizers` library.

    Args:
        path: the file; None = bytes, vocabulary 256.

    Raises:
        UserError: the library is not installed, or the file cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        self._tokenizer = None
        self._path = path
        self.vocab_size = BYTES_VOCABULARY
        self.name = "bytes"
        if path is None:
            return
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise UserError(
                "data.tokenizer needs the tokenizers library: pip install 'hvdtrain[tokenizers]'"
            ) from None
        try:
            self._tokenizer = Library.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"data.tokenizer: {path}: {error}") from None
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.name = Path(path).name

    @property
    def end(self) -> int | None:
        """The token that ends a document; None: there is none. Of bytes it is 0, not in text."""
        if self._tokenizer is None:
            return 0
        found = (self._tokenizer.token_to_id(name) for name in _ENDS)
        return next((number for number in found if number is not None), None)

    @property
    def meta(self) -> TokenMeta:
        """What is to be known of its tokens; documents are not separated."""
        sizes = None if self._path is None else bytes_of_tokens(self._path, self.vocab_size)
        return TokenMeta(self.vocab_size, self.name, token_bytes=sizes)

    def separator(self) -> int:
        """The token between two documents: the one that ends the first.

        Raises:
            UserError: there is none.
        """
        if self.end is None:
            raise UserError(
                f"{self.name} has no token that ends a document, which would separate documents "
                f"(one of {', '.join(_ENDS)})"
            )
        return self.end

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds the vocabulary."""
        return np.min_scalar_type(self.vocab_size - 1)

    def encode(self, text: bytes) -> TokenArray:
        """Tokens of a whole file; bytes that are not UTF-8 are replaced, where text is needed."""
        if self._tokenizer is None:
            return np.frombuffer(text, dtype=np.uint8)
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids
        return np.asarray(ids, dtype=self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(t for t in tokens if t < BYTES_VOCABULARY).decode(
                "utf-8", errors="replace"
            )
        return self._tokenizer.decode(list(tokens))


def read(path: Path) -> bytes:
    """A file's bytes. Raises UserError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def text_files(config: DataConfig) -> tuple[list[Path], list[Path]]:
    """(train, validation) files; validation is empty where a single file has to be cut.

    Raises:
        UserError: no file where the configuration says there are some.
    """
    train = expand("data.train", config.train) if config.train else standard_library()
    if config.validation:
        return train, expand("data.validation", config.validation)
    if len(train) == 1:
        return train, []
    return split(train, config.validation_fraction)


def read_text(
    config: DataConfig, tokenizer: Tokenizer, separator: int | None = None
) -> tuple[TokenArray, TokenArray]:
    """(train, validation) tokens of the configured text.

    Args:
        separator: a token that is put after each file; None: files follow each other.

    Raises:
        UserError: no file, or one that cannot be read.
    """

    def tokens(files: Sequence[Path]) -> TokenArray:
        parts = [with_separator(tokenizer.encode(read(path)), separator) for path in files]
        return np.concatenate(parts)

    train_files, validation_files = text_files(config)
    train = tokens(train_files)
    if validation_files:
        return train, tokens(validation_files)
    return cut(train, config.validation_fraction)


def cut(tokens: TokenArray, fraction: float) -> tuple[TokenArray, TokenArray]:
    """Cuts the end off for validation."""
    at = len(tokens) - int(len(tokens) * fraction)
    return tokens[:at], tokens[at:]
