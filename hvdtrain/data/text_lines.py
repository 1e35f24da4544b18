"""Samples from JSON lines: prompts with their answers, texts with their labels.

A line is read, parsed and tokenized on access. The lengths of all samples, which batch.max_tokens
needs, require a pass over all lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.order import Indices, permute
from hvdtrain.data.records import JsonLines
from hvdtrain.data.text import Tokenizer
from hvdtrain.errors import UserError

IGNORED = -100  # a target without loss
_SPLIT_SEED = 0  # the split depends on the data only, not on the run's seed


@dataclass(frozen=True)
class Lines:
    """A selection of lines from files of JSON lines.

    Args:
        objects: of all lines.
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
            raise UserError(f"{self.where}: {name!r} is no text, but {json.dumps(value)[:40]}")
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
                f"{self.where}: there is no {name!r}, only {', '.join(self.content) or 'nothing'}; "
                f"{key} says which key it is"
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
            f"{where}: {count} tokens are more than huggingface.context {self.context}: raise "
            "that, shorten the line, or let huggingface.truncate true cut it at its end"
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
                f"{line.where}: no token of the answer is left to learn: it is empty, or its "
                f"prompt has more tokens ({len(prompt)}) than huggingface.context {context}"
            )
        return ids, first


class LabelledTexts(Dataset[tuple[Tensor, int, int]]):
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
        raise UserError(f"{line.where}: label {label!r} is none of the model's: {known}")


def labels_in(lines: Lines, keys: Keys) -> list[str]:
    """The labels of all lines; numbers in numeric order, text sorted alphabetically.

    Raises:
        UserError: a line has no label, or is not a JSON object.
    """
    found = {keys.label_of(lines[index]) for index in range(len(lines))}
    if all(isinstance(label, int) for label in found):
        return [str(label) for label in sorted(found, key=int)]
    return sorted({str(label) for label in found})
