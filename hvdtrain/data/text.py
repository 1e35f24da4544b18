"""Text as tokens: the bytes of files, or what a `tokenizers` file makes of them.

The tokens are held in memory, once a rank. Text of many gigabytes is better
tokenized once (`hvdtrain data tokenize`) and memory-mapped (`data.source tokens`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hvdtrain.data.config import DataConfig
from hvdtrain.data.files import expand, split, standard_library
from hvdtrain.data.tokens import TokenArray
from hvdtrain.errors import UserError

BYTES_VOCABULARY = 256


class Tokenizer:
    """Bytes, or a tokenizer.json of the `tokenizers` library.

    Args:
        path: the file; None = bytes, vocabulary 256.

    Attributes:
        vocab_size: how many tokens there are.
        highest: the highest number of one; a file may leave numbers out.

    Raises:
        UserError: the library is not installed, or the file cannot be read.
    """

    def __init__(self, path: str | None) -> None:
        self._tokenizer = None
        self.vocab_size = BYTES_VOCABULARY
        self.highest = BYTES_VOCABULARY - 1
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
        # Some files say that a text is cut or padded to the length that one model was made for.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.highest = max(self._tokenizer.get_vocab().values(), default=0)
        self.name = Path(path).name

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every token."""
        return np.min_scalar_type(self.highest)

    def encode(self, text: bytes) -> TokenArray:
        """Tokens of a whole file; bytes that are not UTF-8 are replaced, where text is needed."""
        if self._tokenizer is None:
            return np.frombuffer(text, dtype=np.uint8)
        ids = self._tokenizer.encode(text.decode("utf-8", errors="replace")).ids
        return np.asarray(ids, dtype=self.dtype)

    def ids(self, text: str, special: bool = True, longest: int | None = None) -> list[int]:
        """Tokens of one text, of a tokenizer.json.

        Args:
            special: with those that the file puts around a text, such as [CLS] and [SEP].
            longest: tokens with these; of a longer text the end is left out, but not these.
        """
        assert self._tokenizer is not None
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if longest is not None:
            around = self._tokenizer.num_special_tokens_to_add(False) if special else 0
            encoding.truncate(max(longest - around, 0))
        if special:
            encoding = self._tokenizer.post_process(encoding)
        found: list[int] = encoding.ids
        return found

    def number_of(self, token: str) -> int | None:
        """Of a token such as "</s>"; None: the vocabulary does not have it."""
        assert self._tokenizer is not None
        number: int | None = self._tokenizer.token_to_id(token)
        return number

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
    config: DataConfig, encode: Callable[[bytes], TokenArray]
) -> tuple[TokenArray, TokenArray]:
    """(train, validation) tokens of the configured text.

    Raises:
        UserError: no file, or one that cannot be read.
    """
    train_files, validation_files = text_files(config)
    train = np.concatenate([encode(read(path)) for path in train_files])
    if validation_files:
        return train, np.concatenate([encode(read(path)) for path in validation_files])
    return cut(train, config.validation_fraction)


def cut(tokens: TokenArray, fraction: float) -> tuple[TokenArray, TokenArray]:
    """Cuts the end off for validation."""
    at = len(tokens) - int(len(tokens) * fraction)
    return tokens[:at], tokens[at:]
