"""Training data of transformers models: packed text, answers to prompts, or labels of texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.data.fingerprint import Fingerprint
from hvdtrain.data.packed import read_packed
from hvdtrain.data.records import JsonLines
from hvdtrain.data.text import Tokenizer, read
from hvdtrain.data.text_lines import (
    Answers,
    Keys,
    LabelledTexts,
    Lines,
    Tokens,
    labels_in,
)
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig
from hvdtrain.tasks.huggingface_model import Folder

_LONGEST_BY_DEFAULT = 1024


@dataclass(frozen=True)
class Classes:
    """Classes of a classifier.

    Args:
        labels: names of the classes.
        padding: the token that pads a text at its end; None if there is none.
    """

    labels: tuple[str, ...]
    padding: int | None


@dataclass(frozen=True)
class TextData:
    """Data of a run.

    Args:
        datasets: samples as in TokenWindows, Answers or LabelledTexts.
        context: maximum tokens per sample that the model sees.
        tokenizer: None if the data is already tokenized.
        classes: of a classifier.
    """

    datasets: Datasets
    context: int
    tokenizer: Tokenizer | None = None
    classes: Classes | None = None


def read_data(config: HuggingFaceTaskConfig, folder: Folder) -> TextData:
    """Read the data; raise UserError if it cannot be read or does not match the model."""
    context = _context(config.huggingface.context, folder)
    if config.huggingface.learn == "text":
        return _packed(config, folder, context)
    return _of_lines(config, folder, context)


def _context(wanted: int | None, folder: Folder) -> int:
    positions = folder.positions
    if wanted and positions and wanted > positions:
        raise UserError(
            f"huggingface.context {wanted}: the model in {folder.path} has {positions} positions, "
            "and no more tokens can stand in a sample"
        )
    return wanted or min(positions or _LONGEST_BY_DEFAULT, _LONGEST_BY_DEFAULT)


def tokenizer_file(config: HuggingFaceTaskConfig, folder: Folder) -> Path:
    """The tokenizer's file; raise UserError if the directory has none and none is configured."""
    return Path(config.data.tokenizer) if config.data.tokenizer else folder.tokenizer


def _read_tokenizer(config: HuggingFaceTaskConfig, folder: Folder) -> Tokenizer:
    """Raise UserError if there is none, or if it has more tokens than the model."""
    tokenizer = Tokenizer(str(tokenizer_file(config, folder)))
    _check_vocabulary(folder, tokenizer.highest + 1)
    return tokenizer


def _check_vocabulary(folder: Folder, tokens: int) -> None:
    known = folder.text.vocab_size
    if tokens > known:
        raise UserError(
            f"the tokenizer has {tokens} tokens, but the model in {folder.path} knows {known} "
            "(vocab_size in its config.json): it was made with another one"
        )


def _packed(config: HuggingFaceTaskConfig, folder: Folder, context: int) -> TextData:
    data = config.data
    if data.document_mask:
        raise UserError("data.document_mask is for the task language_model")
    tokenizer = None if data.source == "tokens" else _read_tokenizer(config, folder)
    packed = read_packed(data, tokenizer)
    if tokenizer is None:
        _check_vocabulary(folder, packed.meta.vocab_size)
    train, validation = packed.windows(context, "huggingface.context")
    return TextData(Datasets(train, validation, train.fingerprint()), context, tokenizer)


def _of_lines(config: HuggingFaceTaskConfig, folder: Folder, context: int) -> TextData:
    train, validation = _lines(config)
    keys, tokenizer = _keys(config), _read_tokenizer(config, folder)
    end = _number(folder, tokenizer, "eos_token")
    padding = _padding(folder, tokenizer)
    tokens = Tokens(tokenizer, context, end, padding or 0, config.huggingface.truncate)
    file, objects = read(tokenizer_file(config, folder)), train.objects.fingerprint()

    def digest(data: str) -> str:
        rest = repr((data, len(train), context, keys)).encode()
        return hashlib.sha256(file + rest).hexdigest()[:16]

    fingerprint = Fingerprint(digest(str(objects)), digest(objects.former))
    if config.huggingface.learn == "answers":
        if end is None:
            logger.warning("%s names no eos_token: answers are learnt without an end", folder.path)
        answers = Answers(train, keys, tokens), Answers(validation, keys, tokens)
        return TextData(Datasets(*answers, fingerprint), context, tokenizer)
    classes = Classes(_labels(config, folder, train), padding)
    texts = (
        LabelledTexts(train, keys, tokens, classes.labels),
        LabelledTexts(validation, keys, tokens, classes.labels),
    )
    return TextData(Datasets(*texts, fingerprint), context, tokenizer, classes)


def classes_of(config: HuggingFaceTaskConfig, folder: Folder) -> Classes | None:
    """Classes of a trained classifier; the data is read only if nothing else names the classes.

    Raises:
        UserError: the source of the classes is missing.
    """
    if config.huggingface.learn != "labels":
        return None
    labels = _labels(config, folder, None)
    return Classes(labels, _padding(folder, _read_tokenizer(config, folder)))


def _labels(config: HuggingFaceTaskConfig, folder: Folder, train: Lines | None) -> tuple[str, ...]:
    known = config.huggingface.labels or folder.labels
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
            f"data.train: {len(train)} lines are too few for a part of validation; name files with "
            "data.validation"
        )
    return train.split(data.validation_fraction)


def _padding(folder: Folder, tokenizer: Tokenizer) -> int | None:
    padding = _number(folder, tokenizer, "pad_token")
    return _number(folder, tokenizer, "eos_token") if padding is None else padding


def _number(folder: Folder, tokenizer: Tokenizer, name: str) -> int | None:
    """Number of a special token, from the tokenizer's configuration or else from config.json."""
    token = folder.special_token(name)
    number = tokenizer.number_of(token) if token is not None else None
    return folder.number_of(f"{name}_id") if number is None else number
