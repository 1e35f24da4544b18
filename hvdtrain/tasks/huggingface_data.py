"""Training data of transformers models: packed text, answers to prompts, or labels of texts.

Prompts with their answers and texts with their labels come from JSON lines. A line is read, parsed
and tokenized on access. The lengths of all samples, which batch.max_tokens needs, require a pass
over all lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.files import Fingerprint
from hvdtrain.data.order import Indices, permute
from hvdtrain.data.packed import read_packed
from hvdtrain.data.records import JsonLines
from hvdtrain.data.text import Tokenizer, read
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig
from hvdtrain.tasks.huggingface_model import Classes, ModelDirectory

IGNORED = -100  # a target without loss
_SPLIT_SEED = 0  # the split depends on the data only, not on the run's seed
_LONGEST_BY_DEFAULT = 1024


@dataclass(frozen=True)
class TextData:
    """Data of a run.

    Args:
        datasets: samples as in TokenWindows, Answers or LabeledTexts.
        context: maximum tokens per sample that the model sees.
        tokenizer: None if the data is already tokenized.
        classes: classes of a classifier.
    """

    datasets: Datasets
    context: int
    tokenizer: Tokenizer | None = None
    classes: Classes | None = None


def read_data(config: HuggingFaceTaskConfig, directory: ModelDirectory) -> TextData:
    """Read the data; raise UserError if it cannot be read or does not match the model."""
    context = _context(config.huggingface.context, directory)
    if config.huggingface.learn == "text":
        return _packed(config, directory, context)
    return _of_lines(config, directory, context)


def _context(wanted: int | None, directory: ModelDirectory) -> int:
    positions = directory.positions
    if wanted and positions and wanted > positions:
        raise UserError(
            f"huggingface.context {wanted}: the model in {directory.path} has {positions} positions"
        )
    return wanted or min(positions or _LONGEST_BY_DEFAULT, _LONGEST_BY_DEFAULT)


def tokenizer_file(config: HuggingFaceTaskConfig, directory: ModelDirectory) -> Path:
    """The tokenizer's file; raise UserError if the directory has none and none is configured."""
    return Path(config.data.tokenizer) if config.data.tokenizer else directory.tokenizer


def _read_tokenizer(config: HuggingFaceTaskConfig, directory: ModelDirectory) -> Tokenizer:
    """Raise UserError if there is none, or if it has more tokens than the model."""
    tokenizer = Tokenizer(str(tokenizer_file(config, directory)))
    _check_vocabulary(directory, tokenizer.highest + 1)
    return tokenizer


def _check_vocabulary(directory: ModelDirectory, tokens: int) -> None:
    known = directory.text.vocab_size
    if tokens > known:
        raise UserError(
            f"the tokenizer has {tokens} tokens, but the model in {directory.path} knows {known} "
            "(vocab_size in its config.json): the model was trained with another tokenizer"
        )


def _packed(config: HuggingFaceTaskConfig, directory: ModelDirectory, context: int) -> TextData:
    data = config.data
    if data.document_mask:
        raise UserError("data.document_mask is for the task language_model")
    tokenizer = None if data.source == "tokens" else _read_tokenizer(config, directory)
    packed = read_packed(data, tokenizer)
    if tokenizer is None:
        _check_vocabulary(directory, packed.meta.vocab_size)
    train, validation = packed.windows(context, "huggingface.context")
    return TextData(Datasets(train, validation, train.fingerprint()), context, tokenizer)


def _of_lines(config: HuggingFaceTaskConfig, directory: ModelDirectory, context: int) -> TextData:
    train, validation = _lines(config)
    keys, tokenizer = _keys(config), _read_tokenizer(config, directory)
    end = _number(directory, tokenizer, "eos_token")
    padding = _padding(directory, tokenizer)
    tokens = Tokens(tokenizer, context, end, padding or 0, config.huggingface.truncate)
    file, objects = read(tokenizer_file(config, directory)), train.objects.fingerprint()

    def digest(data: str) -> str:
        rest = repr((data, len(train), context, keys)).encode()
        return hashlib.sha256(file + rest).hexdigest()[:16]

    former = digest(objects.former or str(objects))
    fingerprint = Fingerprint(digest(str(objects)), former, objects.files)
    if config.huggingface.learn == "answers":
        if end is None:
            logger.warning(
                "%s has no eos_token: the model does not learn where answers end", directory.path
            )
        answers = Answers(train, keys, tokens), Answers(validation, keys, tokens)
        return TextData(Datasets(*answers, fingerprint), context, tokenizer)
    classes = Classes(_labels(config, directory, train), padding)
    texts = (
        LabeledTexts(train, keys, tokens, classes.labels),
        LabeledTexts(validation, keys, tokens, classes.labels),
    )
    return TextData(Datasets(*texts, fingerprint), context, tokenizer, classes)


def classes_of(config: HuggingFaceTaskConfig, directory: ModelDirectory) -> Classes | None:
    """Classes of a trained classifier; the data is read only if nothing else names the classes.

    Raises:
        UserError: the source of the classes is missing.
    """
    if config.huggingface.learn != "labels":
        return None
    labels = _labels(config, directory, None)
    return Classes(labels, _padding(directory, _read_tokenizer(config, directory)))


def _labels(
    config: HuggingFaceTaskConfig, directory: ModelDirectory, train: Lines | None
) -> tuple[str, ...]:
    known = config.huggingface.labels or directory.labels
    labels = known or labels_in(train or _lines(config)[0], _keys(config))
    if len(labels) < 2:
        raise UserError(f"data.train: all lines have the label {', '.join(labels)}")
    return tuple(labels)


def _keys(config: HuggingFaceTaskConfig) -> Keys:
    own = config.huggingface
    names = ("text", "label") if own.learn == "labels" else ("prompt", "answer")
    return Keys(own.input_key or names[0], own.target_key or names[1])


def _lines(config: HuggingFaceTaskConfig) -> tuple[Lines, Lines]:
    """Return (train, validation)."""
    data, learn = config.data, config.huggingface.learn
    if data.source not in ("text", "jsonl") or not data.train:
        raise UserError(
            f"huggingface.learn {learn} needs data.train, files of JSON lines (*.jsonl, *.ndjson), "
            "and data.source text or jsonl"
        )
    train = Lines.of(JsonLines(data.train, data.cache, "data.train"))
    if data.validation:
        return train, Lines.of(JsonLines(data.validation, data.cache, "data.validation"))
    if len(train) < 2:
        raise UserError(
            f"data.train: {len(train)} lines are too few to split off validation data; set "
            "data.validation"
        )
    return train.split(data.validation_fraction)


def _padding(directory: ModelDirectory, tokenizer: Tokenizer) -> int | None:
    padding = _number(directory, tokenizer, "pad_token")
    return _number(directory, tokenizer, "eos_token") if padding is None else padding


def _number(directory: ModelDirectory, tokenizer: Tokenizer, name: str) -> int | None:
    """Number of a special token, from the tokenizer's configuration or else from config.json."""
    token = directory.special_token(name)
    number = tokenizer.number_of(token) if token is not None else None
    return directory.number_of(f"{name}_id") if number is None else number


# --- samples from JSON lines --------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """A selection of lines from files of JSON lines.

    Args:
        objects: objects of all lines.
        chosen: the numbers of the selected lines, int64.
    """

    objects: JsonLines
    chosen: Indices

    @classmethod
    def of(cls, objects: JsonLines) -> Lines:
        return cls(objects, np.arange(len(objects)))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Line:
        """Raise UserError if the line is not a JSON object."""
        number = int(self.chosen[index])
        return Line(self.objects[number], self.objects, number)

    def split(self, fraction: float) -> tuple[Lines, Lines]:
        """(train, validation): at least one line, in random order, goes to validation."""
        order = permute(np.arange(len(self)), len(self), _SPLIT_SEED, epoch=0)
        ends = max(int(len(self) * fraction), 1)
        parts = np.sort(order[ends:]), order[:ends]
        train, validation = (Lines(self.objects, self.chosen[part]) for part in parts)
        return train, validation


@dataclass(frozen=True)
class Line:
    """An object and its number among all lines."""

    content: dict[str, Any]
    objects: JsonLines
    number: int

    @property
    def where(self) -> str:
        """Location of the line, for messages."""
        return self.objects.where(self.number)

    def text(self, key: str, name: str) -> str:
        """The text under `name`, which the configuration key `key` sets.

        Raises:
            UserError: the value is missing or not text.
        """
        value = self._value(key, name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name!r} is not text, but {json.dumps(value)[:40]}")
        return value

    def label(self, key: str, name: str) -> str | int:
        """Same as `text`, but a whole number is allowed too."""
        value = self._value(key, name)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise UserError(
                f"{self.where}: {name!r} is neither text nor a whole number, but "
                f"{json.dumps(value)[:40]}"
            )
        return value

    def _value(self, key: str, name: str) -> Any:
        if name not in self.content:
            raise UserError(
                f"{self.where}: no key {name!r}, only "
                f"{', '.join(self.content) or 'an empty object'}; set {key}"
            )
        return self.content[name]


@dataclass(frozen=True)
class Keys:
    """Names of an object's prompt or text, and of its answer or label."""

    input: str
    target: str

    def input_of(self, line: Line) -> str:
        return line.text("huggingface.input_key", self.input)

    def answer_of(self, line: Line) -> str:
        return line.text("huggingface.target_key", self.target)

    def label_of(self, line: Line) -> str | int:
        return line.label("huggingface.target_key", self.target)


@dataclass(frozen=True)
class Tokens:
    """Options for tokenizing texts.

    Args:
        tokenizer: for a tokenizer.json.
        context: maximum number of tokens that the model sees.
        end: the token that ends an answer; None: no end token.
        padding: the token that pads a text at its end.
        truncate: truncate longer text at its end; otherwise it is an error.
    """

    tokenizer: Tokenizer
    context: int
    end: int | None = None
    padding: int = 0
    truncate: bool = False

    def too_long(self, where: str, count: int) -> UserError:
        return UserError(
            f"{where}: {count} tokens exceed huggingface.context {self.context}: increase it, "
            "shorten the line, or truncate lines with huggingface.truncate true"
        )


class Answers(Dataset[tuple[Tensor, Tensor]]):
    """Sample: tokens and their targets, the next tokens; int64 (context,).

    Targets within the prompt and the padding at the end are IGNORED. The prompt and the answer are
    tokenized separately, because at inference the prompt is tokenized alone.
    """

    def __init__(self, lines: Lines, keys: Keys, tokens: Tokens) -> None:
        self._lines = lines
        self._keys = keys
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._lines)

    def prompt(self, index: int) -> list[int]:
        """Tokens of a sample's prompt."""
        return self._prompt(self._lines[index])

    def _prompt(self, line: Line) -> list[int]:
        ids = self._tokens.tokenizer.ids(self._keys.input_of(line))
        end = self._tokens.end
        return ids[:-1] if ids and ids[-1] == end else ids

    def lengths(self) -> Indices:
        """Number of tokens of each sample, without padding."""
        return np.array([len(self._ids(self._lines[i])[0]) - 1 for i in range(len(self))])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Raise UserError if the line lacks a key or is too long."""
        ids, first = self._ids(self._lines[index])
        context = self._tokens.context
        tokens = torch.full((context,), self._tokens.padding)
        targets = torch.full((context,), IGNORED)
        tokens[: len(ids) - 1] = torch.tensor(ids[:-1])
        targets[first - 1 : len(ids) - 1] = torch.tensor(ids[first:])
        return tokens, targets

    def _ids(self, line: Line) -> tuple[list[int], int]:
        """(prompt and answer, index of the answer's first token)."""
        prompt = self._prompt(line)
        answer = self._tokens.tokenizer.ids(self._keys.answer_of(line), special=False)
        if self._tokens.end is not None:
            answer.append(self._tokens.end)
        context = self._tokens.context
        ids = prompt + answer
        if len(ids) > context + 1 and not self._tokens.truncate:
            raise self._tokens.too_long(line.where, len(ids))
        ids = ids[: context + 1]
        first = max(len(prompt), 1)  # the first token cannot be predicted from anything
        if len(ids) <= first:
            raise UserError(
                f"{line.where}: no token of the answer remains: the answer is empty, or the prompt "
                f"has more tokens ({len(prompt)}) than huggingface.context {context}"
            )
        return ids, first


class LabeledTexts(Dataset[tuple[Tensor, int, int]]):
    """Sample: int64 (context,) tokens, padded at the end; their number; the label's number.

    Args:
        labels: label names. Lines may also use label numbers, unless a name is itself a number.
    """

    def __init__(self, lines: Lines, keys: Keys, tokens: Tokens, labels: Sequence[str]) -> None:
        self._lines = lines
        self._keys = keys
        self._tokens = tokens
        self.labels = labels
        self._numbered = not any(label.lstrip("-").isdigit() for label in labels)

    def __len__(self) -> int:
        return len(self._lines)

    def text(self, index: int) -> str:
        return self._keys.input_of(self._lines[index])

    def lengths(self) -> Indices:
        """Number of tokens of each sample, without padding."""
        return np.array([len(self._ids(self._lines[i])) for i in range(len(self))])

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        """Raise UserError if the line lacks a key, is too long, or has an unknown label."""
        line = self._lines[index]
        ids = self._ids(line)
        tokens = torch.full((self._tokens.context,), self._tokens.padding)
        tokens[: len(ids)] = torch.tensor(ids)
        return tokens, len(ids), self._number(line)

    def _ids(self, line: Line) -> list[int]:
        context = self._tokens.context
        longest = context if self._tokens.truncate else None
        ids = self._tokens.tokenizer.ids(self._keys.input_of(line), longest=longest)
        if len(ids) > context:
            raise self._tokens.too_long(line.where, len(ids))
        if not ids:
            raise UserError(f"{line.where}: {self._keys.input!r} has no token")
        return ids

    def _number(self, line: Line) -> int:
        label = self._keys.label_of(line)
        if str(label) in self.labels:
            return self.labels.index(str(label))
        if self._numbered and isinstance(label, int) and 0 <= label < len(self.labels):
            return label
        known = ", ".join(self.labels[:10]) + (", ..." if len(self.labels) > 10 else "")
        raise UserError(f"{line.where}: label {label!r} is not one of the model's labels: {known}")


def labels_in(lines: Lines, keys: Keys) -> list[str]:
    """The labels of all lines; numbers in numeric order, text sorted alphabetically.

    Raises:
        UserError: a line has no label, or is not a JSON object.
    """
    found = {keys.label_of(lines[index]) for index in range(len(lines))}
    if all(isinstance(label, int) for label in found):
        return [str(label) for label in sorted(found, key=int)]
    return sorted({str(label) for label in found})
