"""Whether a rendered chat has all that its messages hold: a chat template drops what it ignores."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hvdtrain.tasks.huggingface_lines import Chat

_THINK = re.compile(r"</?think>")
_SWITCH = re.compile(r"/(?:no_?)?think\b")  # for reasoning; templates read and remove it
_REASONING = ("reasoning_content", "thinking", "reasoning")  # as in transformers


def lost(chat: Chat, text: str, trained: Sequence[str], marks: bool) -> str | None:
    """What a rendered chat lacks, such as "the reasoning of message 2 (assistant)"; None: nothing.

    White space does not count, and text may be escaped as in JSON.

    Args:
        text: the whole chat.
        trained: the texts to train on: of each message to train on, or of parts of them.
        marks: the template's marks select these texts, and may leave out reasoning or messages.
    """
    if len(trained) != len(chat.trained):
        joined = text if marks and len(trained) < len(chat.trained) else "".join(trained)
        trained = [joined] * len(chat.trained)
    own = dict(zip(chat.trained, map(_compact, trained), strict=True))
    whole = _compact(text)
    for number, message in enumerate(chat.messages):
        where = f"message {number + 1} ({message['role']})"
        found = own.get(number, whole)
        reasoning, content = _parts(message)
        if not all(_has(found, part) for part in _SWITCH.split(content)):
            return f"the content of {where}"
        own_reasoning = whole if marks else found
        if number in own and not all(_has(own_reasoning, part) for part in reasoning):
            return f"the reasoning of {where}"
        begin = 0
        for function in _functions(message):
            name, arguments = str(function.get("name")), function.get("arguments")
            begin = found.find(_compact(name), begin) + 1
            if not begin:
                return f"the call of {name!r} in {where}"
            for key in arguments if isinstance(arguments, dict) else ():
                if not _has(found, key):
                    return f"the argument {key!r} of {name!r} in {where}"
    called = Counter(str(f.get("name")) for m in chat.messages for f in _functions(m))
    for tool in chat.tools or []:
        declared = _function(tool).get("name")
        if isinstance(declared, str) and whole.count(_compact(declared)) <= called[declared]:
            return f"the tool {declared!r}"
    return None


def python_arguments(chat: Chat, text: str) -> str | None:
    """Name of a function whose arguments a template inserts as a Python object; None: of none."""
    for message in chat.messages:
        for function in _functions(message):
            arguments = function.get("arguments")
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return str(function.get("name"))
    return None


def _functions(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The called functions of a message, each with its name and arguments."""
    calls = message.get("tool_calls")
    found = [*(calls if isinstance(calls, list) else []), message.get("function_call")]
    yield from (_function(call) for call in found if isinstance(call, dict))


def _function(described: Any) -> dict[str, Any]:
    """The inner part of {"type": "function", "function": {...}}."""
    inner = described.get("function", described) if isinstance(described, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _parts(message: dict[str, Any]) -> tuple[list[str], str]:
    """(reasoning, content) of a message."""
    content = message["content"]
    reasoning = [message[key] for key in _REASONING if isinstance(message.get(key), str)]
    if message["role"] == "assistant":
        *inside, content = _THINK.split(content)
        reasoning += inside
    return reasoning, content


def _has(text: str, part: str) -> bool:
    """Whether a text, without its white space, has a part, plain or as in a JSON string."""
    part = part.strip()
    forms = (part, *(json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    return any(_compact(form) in text for form in forms)


def _compact(text: str) -> str:
    return "".join(text.split())
