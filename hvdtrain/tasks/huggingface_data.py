"""Training data of transformers models: packed text, answers to prompts, or labels of texts.

Answers, chats and texts with their labels come from JSON lines. A line is read, parsed and
tokenized on access. The lengths of all samples, which batch.max_tokens and huggingface.pack need,
require a pass over all lines.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.config import DataConfig
from hvdtrain.data.files import Fingerprint
from hvdtrain.data.order import Indices
from hvdtrain.data.packed import read_packed, separate_documents
from hvdtrain.data.text import Tokenizer, read
from hvdtrain.data.token_files import TokenMeta
from hvdtrain.data.tokens import tokens_of
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface_chat import ChatTemplate, find_template
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig
from hvdtrain.tasks.huggingface_lines import (
    Answer,
    Chat,
    Keys,
    Line,
    LineFormat,
    Lines,
    alpaca_prompt,
    holds_lines,
    open_records,
    recognize,
)
from hvdtrain.tasks.huggingface_model import Classes, ModelDirectory
from hvdtrain.text import plural

IGNORED = -100  # a target without loss
_LONGEST_BY_DEFAULT = 1024
_PROMPT = 16  # tokens of packed text to continue


@dataclass(frozen=True)
class TextData:
    """Data of a run.

    Args:
        datasets: samples as in TokenWindows, Answers, Packed or LabeledTexts.
        context: maximum tokens per sample that the model sees.
        tokenizer: None if the data is already tokenized.
        prompt: tokens of the validation data that a sample of the model continues.
        ends: tokens that end the sample.
        separator: the token that ends each document, if samples lack the numbers of documents.
        apart: documents of a sample do not see each other.
        classes: classes of a classifier.
    """

    datasets: Datasets
    context: int
    tokenizer: Tokenizer | None = None
    prompt: Sequence[int] = ()
    ends: Sequence[int] = ()
    separator: int | None = None
    apart: bool = False
    classes: Classes | None = None


def read_data(config: HuggingFaceTaskConfig, directory: ModelDirectory) -> TextData:
    """Read the data; raise UserError if it cannot be read or does not match the model."""
    own, data = config.huggingface, config.data
    context = _context(own.context, directory)
    tokenizer = None if data.source == "tokens" else _read_tokenizer(config, directory)
    lines = holds_lines("data.train", data.train, data.source)
    if data.validation and lines != holds_lines("data.validation", data.validation, data.source):
        raise UserError("data.train and data.validation must both be JSON lines, or neither")
    if not lines:
        if own.learn in ("answers", "labels"):
            raise UserError(
                f"huggingface.learn {own.learn} needs data.train, files of JSON lines (*.jsonl, "
                "*.ndjson), or Parquet or Arrow files and data.source parquet or arrow"
            )
        return _windows(config, data, directory, tokenizer, context)
    assert tokenizer is not None
    file = tokenizer_file(config, directory)
    template = find_template(own.chat_template, file, directory, own.day)
    data = replace(data, source="jsonl") if data.source == "text" else data
    form = recognize(own, data, template is not None)
    if form.kind == "text":
        found = _windows(config, data, directory, tokenizer, context)
    elif form.chats and template is None:
        raise UserError(
            f"huggingface.model: {directory.path} has no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json), and the lines of data.train are chats: name "
            "a template's file with huggingface.chat_template"
        )
    else:
        found = _of_lines(config, directory, form, tokenizer, template, context)
    notes = [f"data.train: {form.describe()}", *found.datasets.notes]
    if form.chats and template is not None and template.dated:
        notes.append(
            f"chat template: the current date is {own.day} in all chats (huggingface.date)"
        )
    return replace(found, datasets=found.datasets._replace(notes=notes, format=form.name))


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


def _windows(
    config: HuggingFaceTaskConfig,
    data: DataConfig,
    directory: ModelDirectory,
    tokenizer: Tokenizer | None,
    context: int,
) -> TextData:
    """Samples of consecutive text."""
    if data.mixture:
        raise UserError("data.mixture is for the task language_model")
    if config.huggingface.pack or config.huggingface.chat_template is not None:
        raise UserError(
            "huggingface.pack and huggingface.chat_template are for answers and chats, and "
            "data.train is text: its samples are always packed, and data.document_mask keeps the "
            "documents apart"
        )
    vocab_size = directory.text.vocab_size
    packed = read_packed(data, tokenizer, TokenMeta(vocab_size, str(directory.path)))
    if tokenizer is None:
        _check_vocabulary(directory, packed.meta.vocab_size)
    apart = data.document_mask
    separator, indexed = separate_documents({"": packed}) if apart else (None, False)
    separator = None if indexed else separator
    train, validation = packed.windows(context, "huggingface.context", vocab_size, indexed)
    datasets = Datasets(train, validation, train.fingerprint())
    prompt = tokens_of(validation[0][None])[0, : min(_PROMPT, context - 1)].tolist()
    return TextData(datasets, context, tokenizer, prompt, separator=separator, apart=apart)


def _of_lines(
    config: HuggingFaceTaskConfig,
    directory: ModelDirectory,
    form: LineFormat,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    context: int,
) -> TextData:
    own = config.huggingface
    if config.data.document_mask:
        raise UserError("data.document_mask is for text; for answers and chats, huggingface.pack")
    train, validation = _lines(config)
    end = _number(directory, tokenizer, "eos_token")
    padding = _padding(directory, tokenizer)
    template = template if form.chats else None
    tokens = Tokens(tokenizer, context, end, padding or 0, own.truncate, template)
    file, objects = read(tokenizer_file(config, directory)), train.objects.fingerprint()
    more: tuple[Any, ...] = (form.name, template and template.source, own.pack)
    if template is not None and template.dated:
        more += (str(own.day),)
    unusual = more not in (("answer", None, False), ("label", None, False))

    def digest(data: str) -> str:
        rest = repr((data, len(train), context, form.keys, *(more if unusual else ()))).encode()
        return hashlib.sha256(file + rest).hexdigest()[:16]

    fingerprint = Fingerprint(digest(str(objects)), objects.files)
    if form.kind != "label":
        if template is None and end is None:
            logger.warning(
                "%s has no eos_token: the model does not learn where answers end", directory.path
            )
        if template is not None and not template.trains_end():
            logger.warning(
                "%s ends the assistant's messages, or its {%% generation %%} marks, without a "
                "special token: the model does not learn where answers end",
                template.name,
            )
        return _of_answers(train, validation, form, tokens, own.pack, fingerprint)
    classes = Classes(_labels(config, directory, train), padding)
    texts = (
        LabeledTexts(train, form.keys, tokens, classes.labels),
        LabeledTexts(validation, form.keys, tokens, classes.labels),
    )
    LabeledTexts(Lines.of(train.objects), form.keys, tokens, classes.labels)[0]  # as in _of_answers
    return TextData(Datasets(*texts, fingerprint), context, tokenizer, classes=classes)


def _of_answers(
    train: Lines,
    validation: Lines,
    form: LineFormat,
    tokens: Tokens,
    pack: bool,
    fingerprint: Fingerprint,
) -> TextData:
    # Report what is wrong with the lines before the run begins; the first may be in validation.
    Answers(Lines.of(train.objects), form, tokens).encoded(0)
    answers = Answers(train, form, tokens), Answers(validation, form, tokens)
    prompt = answers[1].prompt(0)[: tokens.context - 1]
    ends = tokens.template.end_of_turn() if tokens.template is not None else []
    if not pack:
        datasets = Datasets(*answers, fingerprint)
        return TextData(datasets, tokens.context, tokens.tokenizer, prompt, ends)
    packed = [Packed(each) for each in answers]
    used = packed[0].lengths().sum() / (len(packed[0]) * tokens.context)
    note = (
        f"data.train: {plural(len(train), 'line')} packed into "
        f"{plural(len(packed[0]), 'sample')} of {tokens.context} tokens, {used:.0%} full"
    )
    datasets = Datasets(packed[0], packed[1], fingerprint, [note])
    return TextData(datasets, tokens.context, tokens.tokenizer, prompt, ends)


def prompt_of(
    config: HuggingFaceTaskConfig, directory: ModelDirectory, prompt: str, data_format: str | None
) -> tuple[Tokenizer, list[int], list[int]]:
    """(tokenizer, tokens of a prompt, tokens that end the text after it).

    Args:
        data_format: see HuggingFace.generate.

    Raises:
        UserError: the tokenizer or the chat template is missing, or does not fit.
    """
    tokenizer, file = _read_tokenizer(config, directory), tokenizer_file(config, directory)
    end = _number(directory, tokenizer, "eos_token")
    ends = [*dict.fromkeys([*([] if end is None else [end]), *directory.ends])]
    if data_format == "chat":
        template = find_template(config.huggingface.chat_template, file, directory)
        if template is None:
            raise UserError(f"huggingface.model: {directory.path} has no chat template any longer")
        ends += [token for token in template.end_of_turn() if token not in ends]
        return tokenizer, template.question(prompt), ends
    text = alpaca_prompt(prompt) if data_format == "alpaca" else prompt
    return tokenizer, Tokens(tokenizer, 0, end).of_prompt(text), ends


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
    labels = known or labels_in(train or _lines(config)[0], _keys_of_labels(config))
    if len(labels) < 2:
        raise UserError(f"data.train: all lines have the label {', '.join(labels)}")
    return tuple(labels)


def _keys_of_labels(config: HuggingFaceTaskConfig) -> Keys:
    return recognize(config.huggingface, config.data, template=False).keys


def _lines(config: HuggingFaceTaskConfig) -> tuple[Lines, Lines]:
    """Return (train, validation)."""
    data = config.data
    train = Lines.of(open_records("data.train", data.train, data))
    if data.validation:
        return train, Lines.of(open_records("data.validation", data.validation, data))
    if len(train) < 2:
        raise UserError(
            f"data.train: {plural(len(train), 'line')}: too few to split off validation data; set "
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
class Tokens:
    """Options for tokenizing texts.

    Args:
        tokenizer: for a tokenizer.json.
        context: maximum number of tokens that the model sees.
        end: the token that ends an answer; None: no end token.
        padding: the token that pads a text at its end.
        truncate: truncate longer text at its end; otherwise it is an error.
        template: for chats.
    """

    tokenizer: Tokenizer
    context: int
    end: int | None = None
    padding: int = 0
    truncate: bool = False
    template: ChatTemplate | None = None

    def too_long(self, where: str, count: int) -> UserError:
        return UserError(
            f"{where}: {count} tokens exceed huggingface.context {self.context}: increase it, "
            "shorten the line, or truncate lines with huggingface.truncate true"
        )

    def of_prompt(self, prompt: str) -> list[int]:
        """Tokens of a prompt, without the end token that some files add to a text."""
        tokens = self.tokenizer.ids(prompt)
        return tokens[:-1] if tokens and tokens[-1] == self.end else tokens

    def encode(self, found: Answer | Chat, line: Line) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is trained on). `line`: their location, for messages.

        A prompt and its answer are tokenized separately, because at inference the prompt is
        tokenized alone.
        """
        if isinstance(found, Chat):
            assert self.template is not None
            return self.template.encode(found, line)
        prompt = self.of_prompt(found.prompt)
        answer = self.tokenizer.ids(found.answer, special=False)
        if self.end is not None:
            answer.append(self.end)
        return prompt + answer, [False] * len(prompt) + [True] * len(answer)


class Answers(Dataset[tuple[Tensor, Tensor]]):
    """Sample: tokens and their targets, the next tokens; int64 (context,).

    Targets outside the answers, or the assistant's turns, and the padding at the end are IGNORED.
    """

    def __init__(self, lines: Lines, form: LineFormat, tokens: Tokens) -> None:
        self._lines = lines
        self._form = form
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self._lines)

    def prompt(self, index: int) -> list[int]:
        """Tokens of a sample before the first that is trained on."""
        ids, trained = self._ids(self._lines[index])
        return ids[: trained.index(True)]

    def lengths(self) -> Indices:
        """Number of tokens of each sample, without padding."""
        return np.array([len(self._ids(self._lines[i])[0]) - 1 for i in range(len(self))])

    def encoded(self, index: int) -> tuple[Tensor, Tensor]:
        """(tokens, targets), each int64 (length,): a sample without padding.

        Raises:
            UserError: the line has another format, is too long, or has nothing to train on.
        """
        ids, trained = self._ids(self._lines[index])
        targets = [token if used else IGNORED for token, used in zip(ids, trained, strict=True)]
        return torch.tensor(ids[:-1]), torch.tensor(targets[1:])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Raise UserError as `encoded`."""
        found = self.encoded(index)
        tokens = torch.full((self.tokens.context,), self.tokens.padding)
        targets = torch.full((self.tokens.context,), IGNORED)
        for whole, part in zip((tokens, targets), found, strict=True):
            whole[: len(part)] = part
        return tokens, targets

    def _ids(self, line: Line) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is a target)."""
        ids, trained = self.tokens.encode(self._form.read(line), line)
        context, count = self.tokens.context, len(ids)
        if count > context + 1 and not self.tokens.truncate:
            raise self.tokens.too_long(line.where, count)
        ids, trained = ids[: context + 1], trained[: context + 1]
        if trained:
            trained[0] = False  # nothing predicts the first token
        if not any(trained):
            raise UserError(
                f"{line.where}: no token to train on remains: the answer is empty, or it begins "
                f"after the first {context} (huggingface.context) of {count} tokens"
            )
        return ids, trained


class Packed(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Sample: tokens, targets and positions of several answers in a row; int64 (context,).

    Positions begin at 0 in each answer, and in the padding at the end.
    """

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        lengths = answers.lengths()
        self._samples = best_fit(lengths.tolist(), answers.tokens.context)
        self._lengths = np.array([lengths[sample].sum() for sample in self._samples])

    def __len__(self) -> int:
        return len(self._samples)

    def lengths(self) -> Indices:
        """Number of tokens of each sample, without padding."""
        return self._lengths

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Raise UserError as `Answers.encoded`."""
        context, padding = self._answers.tokens.context, self._answers.tokens.padding
        parts = [self._answers.encoded(line) for line in self._samples[index]]
        rest = context - sum(len(tokens) for tokens, _ in parts)
        parts.append((torch.full((rest,), padding), torch.full((rest,), IGNORED)))
        tokens, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        return tokens, targets, torch.cat([torch.arange(len(part)) for part, _ in parts])


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack items into bins of `size`, with best-fit decreasing (Johnson et al., 1974).

    Args:
        lengths: length of each item, at most `size`.

    Returns:
        The items of each bin, each in increasing order; bins by their first item.
    """
    with_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # sorted keys of with_room
    bins: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        at = bisect_left(rooms, lengths[item])
        if at < len(rooms):
            room = rooms[at]
            chosen = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            room, chosen = size, []
            bins.append(chosen)
        chosen.append(item)
        room -= lengths[item]
        if room not in with_room:
            insort(rooms, room)
        with_room.setdefault(room, []).append(chosen)
    return sorted(sorted(chosen) for chosen in bins)


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
