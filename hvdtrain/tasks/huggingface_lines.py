"""Lines or rows of the task huggingface, and their format, which the first one shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from hvdtrain.data.arrow import ArrowRows, of_datasets
from hvdtrain.data.config import DataConfig
from hvdtrain.data.file_kinds import described
from hvdtrain.data.files import expand
from hvdtrain.data.order import Indices, permute
from hvdtrain.data.parquet import ParquetRows
from hvdtrain.data.records import JSON_LINES, JsonLines, unicode_problem
from hvdtrain.data.text import RECORDS, records, text_of
from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface_config import HuggingFaceConfig
from hvdtrain.untrusted import parse_json

_SPLIT_SEED = 0  # the split depends on the data only, not on the run's seed
_ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles of ShareGPT's turns, {"from": ..., "value": ...}.
_SPEAKERS = {
    **{role: role for role in _ROLES},
    "human": "user",
    "gpt": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
_CHATS, _ANSWERS = ("messages", "conversations"), ("completion", "answer")
# The prompt that Stanford Alpaca was trained with:
# https://github.com/tatsu-lab/stanford_alpaca/blob/main/train.py
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n{}"
    "\n\n### Input:\n{}\n\n### Response:"
)
_KNOWN = (
    "chats (messages or conversations), prompts with answers (prompt, and completion or answer), "
    "Alpaca's records (instruction, input, output) and text (text)"
)


Records = JsonLines | ParquetRows | ArrowRows


def open_records(key: str, patterns: Sequence[str], data: DataConfig) -> Records:
    """Open the files of records that `data.source` names.

    Args:
        key: the configuration key the patterns come from, for messages.
    """
    if data.source == "parquet":
        return ParquetRows(patterns, None, data.cache, key)
    if data.source == "arrow":
        return ArrowRows(patterns, None, key)
    return JsonLines(patterns, data.cache, key)


def present(value: Any) -> Any:
    """A value of a row without the keys whose values are null: a table has all keys in each row."""
    if isinstance(value, dict):
        return {key: present(inner) for key, inner in value.items() if inner is not None}
    return [*map(present, value)] if isinstance(value, list) else value


@dataclass(frozen=True)
class Lines:
    """A selection of lines from files of JSON lines, or of rows of Parquet or Arrow files.

    Args:
        objects: objects of all lines.
        chosen: the numbers of the selected lines, int64.
    """

    objects: Records
    chosen: Indices

    @classmethod
    def of(cls, objects: Records) -> Lines:
        return cls(objects, np.arange(len(objects)))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Line:
        """Raise UserError if the line is not a JSON object, or has text that is not Unicode."""
        number = int(self.chosen[index])
        if not isinstance(self.objects, JsonLines):
            return Line(present(self.objects[number]), self.objects, number)
        line = Line(self.objects[number], self.objects, number)
        if problem := unicode_problem(line.content):
            raise UserError(f"{line.where} {problem}")
        return line

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
    objects: Records
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
        value = self.value(key, name)
        if not isinstance(value, str):
            raise UserError(f"{self.where}: {name!r} is not text, but {_short(value)}")
        return value

    def label(self, key: str, name: str) -> str | int:
        """Same as `text`, but a whole number is allowed too."""
        value = self.value(key, name)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise UserError(
                f"{self.where}: {name!r} is neither text nor a whole number, but {_short(value)}"
            )
        return value

    def value(self, key: str, name: str) -> Any:
        """Same as `text`, but anything is allowed."""
        if name not in self.content:
            raise UserError(
                f"{self.where}: no key {name!r}, only "
                f"{', '.join(self.content) or 'an empty object'}; set {key}"
            )
        return self.content[name]


def _short(value: Any) -> str:
    return json.dumps(value)[:40]


@dataclass(frozen=True)
class Keys:
    """Names of an object's prompt, chat or text, and of its answer or label."""

    input: str
    target: str

    def input_of(self, line: Line) -> str:
        return line.text("huggingface.input_key", self.input)

    def answer_of(self, line: Line) -> str:
        return line.text("huggingface.target_key", self.target)

    def label_of(self, line: Line) -> str | int:
        return line.label("huggingface.target_key", self.target)


class Answer(NamedTuple):
    """A prompt, used unchanged, and the answer to train on."""

    prompt: str
    answer: str


class Chat(NamedTuple):
    """A chat, as templates of transformers expect it.

    Args:
        messages: each with its `role`, its `content`, which is text, and what else it has.
        trained: numbers of the assistant's messages to train on.
        tools: descriptions of the tools that the assistant may use.
    """

    messages: list[dict[str, Any]]
    trained: list[int]
    tools: list[Any] | None = None

    def with_json_arguments(self) -> Chat | None:
        """The chat with arguments of calls as JSON text; None: it has no calls."""
        if not any(message.get("tool_calls") for message in self.messages):
            return None
        return self._replace(messages=[_with_arguments(m, _written) for m in self.messages])


@dataclass(frozen=True)
class LineFormat:
    """Format of all lines.

    Args:
        kind: `chat`: a list of messages; `answer`: a prompt and its answer, each a text or a list
            of messages; `alpaca`: an instruction, perhaps an input, and an output; `label`: a text
            and its label; `text`.
        keys: names in a line.
        chats: each line becomes a chat, which the chat template renders.
    """

    kind: Literal["chat", "answer", "alpaca", "label", "text"]
    keys: Keys
    chats: bool = False

    @property
    def name(self) -> str:
        """Name in manifest.json: what a model trained on these lines expects as a prompt."""
        return "chat" if self.chats else self.kind

    def describe(self) -> str:
        """What the lines are, and what is trained on; for the log."""
        keys = ", ".join(filter(None, (self.keys.input, self.keys.target)))
        how = "as chats" if self.chats else "used unchanged"
        if self.kind == "alpaca" and not self.chats:
            how = "in Alpaca's prompt"
        return {
            "chat": f"chats ({keys}); trained on: the assistant's turns",
            "answer": f"prompts and answers ({keys}), {how}; trained on: the answers",
            "alpaca": f"Alpaca's records ({keys}), {how}; trained on: the outputs",
            "label": f"texts and labels ({keys}); trained on: the labels",
            "text": f"text ({keys}); trained on: all tokens",
        }[self.kind]

    def read(self, line: Line) -> Answer | Chat:
        """The chat on a line if the format has `chats`, otherwise the prompt and the answer.

        Raises:
            UserError: the line has another format.
        """
        if self.kind == "chat":
            return self._chat(line)
        if self.kind == "alpaca":
            prompt, answer = self._instruction(line), self.keys.answer_of(line)
        elif self.chats:
            prompt = line.value("huggingface.input_key", self.keys.input)
            answer = line.value("huggingface.target_key", self.keys.target)
        else:
            prompt, answer = self.keys.input_of(line), self.keys.answer_of(line)
        if not self.chats:
            return Answer(prompt, answer)
        before = _messages(line, self.keys.input, prompt, "user")
        after = _messages(line, self.keys.target, answer, "assistant")
        return _checked(line, before + after, len(before))

    def _chat(self, line: Line) -> Chat:
        turns = line.value("huggingface.input_key", self.keys.input)
        return _checked(line, _messages(line, self.keys.input, turns), first=0)

    def _instruction(self, line: Line) -> str:
        instruction, given = self.keys.input_of(line), line.content.get("input") or ""
        if not isinstance(given, str):
            raise UserError(f"{line.where}: 'input' is not text, but {_short(given)}")
        if not self.chats:
            return alpaca_prompt(instruction, given)
        return f"{instruction}\n{given}" if given else instruction


def alpaca_prompt(instruction: str, given: str = "") -> str:
    """Alpaca's published prompt; `given`: the input, empty if there is none."""
    return _ALPACA_WITH_INPUT.format(instruction, given) if given else _ALPACA.format(instruction)


def _messages(line: Line, name: str, found: Any, role: str = "") -> list[dict[str, Any]]:
    """The messages of a list; `role`: role of a text that stands for one message."""
    if role and isinstance(found, str):
        return [{"role": role, "content": found}]
    if not isinstance(found, list) or not found:
        raise UserError(f"{line.where}: {name!r} is not a list of messages, but {_short(found)}")
    return [_message(line, f"{name}[{number}]", turn) for number, turn in enumerate(found)]


def _message(line: Line, name: str, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UserError(f"{line.where}: {name} is not a message, but {_short(turn)}")
    speaker = turn.get("role", turn.get("from"))
    role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise UserError(
            f"{line.where}: {name} has the role {_short(speaker)}; known are {', '.join(_ROLES)}, "
            "and from ShareGPT human and gpt"
        )
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _joined(content)
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{line.where}: the content of {name} is not text, but {_short(content)}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return _with_arguments({**rest, "role": role, "content": content}, _parsed)


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A message with changed arguments of its calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and "arguments" in function:
            function = {**function, "arguments": change(function["arguments"])}
            call = {**call, "function": function} if "function" in call else function
        changed.append(call)
    return {**message, "tool_calls": changed}


def _parsed(arguments: Any) -> Any:
    """The object in a JSON text, which is OpenAI's form; anything else is returned unchanged."""
    try:
        found = parse_json(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _written(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _joined(parts: list[Any]) -> Any:
    """The text of several parts; the parts themselves if one is not text, such as an image."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(parts) else parts


def _checked(line: Line, messages: list[dict[str, Any]], first: int) -> Chat:
    """A chat whose assistant's messages from number `first` on are trained on.

    A message of `weight` 0 is not trained on, as in OpenAI's files.
    """
    trained = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight") != 0 and number >= first
    ]
    if not trained:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"{line.where}: no message of the assistant to train on, only the roles {roles}: "
            "complete or remove the line"
        )
    tools = line.content.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{line.where}: 'tools' is not a list, but {_short(tools)}")
    return Chat(messages, trained, tools)


# --- recognition --------------------------------------------------------------


def holds_lines(key: str, patterns: Sequence[str], source: str) -> bool:
    """Whether files are JSON lines; they never count as text by mistake.

    Args:
        key: the configuration key the patterns come from, for messages.
        source: as `data.source`.

    Raises:
        UserError: some files are JSON lines and others are not, or the files are whole JSON files.
    """
    if source != "text" or not patterns:
        return source in RECORDS and bool(patterns)
    files = expand(key, patterns)
    lines = [path for path in files if path.name.endswith(JSON_LINES.suffixes)]
    others = [path for path in files if not path.name.endswith(JSON_LINES.suffixes)]
    if lines and others:
        what = described(others[0]) or "not: name files of one kind"
        raise UserError(f"{key}: {lines[0]} is a {JSON_LINES.name}, and {others[0]} is {what}")
    if all(path.suffix == ".json" for path in others) and others:
        raise UserError(
            f"{key}: {others[0]} is a JSON file, and as text its raw content would be trained on: "
            "write one object per line, such as with `jq -c '.[]' x.json > x.jsonl`, or name it "
            "*.jsonl if it has one object per line"
        )
    return bool(lines)


def recognize(own: HuggingFaceConfig, data: DataConfig, template: bool) -> LineFormat:
    """The format of the lines of `data.train`, from the first one and the configuration.

    Args:
        template: whether there is a chat template.

    Raises:
        UserError: the first line is not a JSON object, or has no known format.
    """
    source = data.source if data.source in RECORDS else "jsonl"
    form = RECORDS[source]
    files = expand("data.train", data.train, form.suffixes, form.name)
    path = of_datasets("data.train", files)[0]
    where, line = next(records(path, source), ("", None))
    if line is None:
        raise UserError(f"data.train: {path} has only empty lines")
    if source != "jsonl":
        line = present(line)
    if own.learn == "labels":
        return LineFormat("label", Keys(own.input_key or "text", own.target_key or "label"))
    text = LineFormat("text", Keys(data.text_key, ""))
    if own.learn == "text":
        return text
    found = _with_answers(line, own, template)
    named = own.learn is not None or own.input_key is not None or own.target_key is not None
    if found is None and not named and _has_text(line, data.text_key):
        return text
    if found is None:
        keys = ", ".join(line) or "none"
        for key in ("input_key", "target_key"):
            name = getattr(own, key)
            if name is not None and name not in line:
                raise UserError(
                    f"huggingface.{key}: {path}: {where} has no key {name!r}, only {keys}"
                )
        raise UserError(
            f"{path}: {where} has an unknown format, with the keys {keys}. Known are {_KNOWN}; "
            "other keys are named by huggingface.input_key and huggingface.target_key, or by "
            "data.text_key"
        )
    return found


def _has_text(line: dict[str, Any], key: str) -> bool:
    try:
        text_of(line, key)
    except ValueError:
        return False
    return True


def _with_answers(
    line: dict[str, Any], own: HuggingFaceConfig, template: bool
) -> LineFormat | None:
    for name in (own.input_key,) if own.input_key else _CHATS:
        if isinstance(line.get(name), list) and own.target_key not in line:
            return LineFormat("chat", Keys(name, ""), chats=True)
    prompt = own.input_key or "prompt"
    for name in (own.target_key,) if own.target_key else _ANSWERS:
        if prompt in line and name in line:
            texts = isinstance(line[prompt], str) and isinstance(line[name], str)
            chats = not texts or own.chat_template is not None
            return LineFormat("answer", Keys(prompt, name), chats)
    if (
        own.input_key is None
        and own.target_key is None
        and {"instruction", "output"} <= line.keys()
    ):
        return LineFormat("alpaca", Keys("instruction", "output"), chats=template)
    return None
