"""Chats whose words say who wrote them, and whether the labels of a chat template are right."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface_chat import ChatTemplate
from hvdtrain.tasks.huggingface_lines import Keys, LineFormat

# What tokenizers of these families have as special tokens, in addition to <|...|>.
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|?>|<[^|<>\s'\"{}/]+\|>|<｜[^<>'\"]+｜>|\[/?[A-Z][A-Z_]+\]|</?s>"
    r"|<(?:start|end)_of_(?:turn|utterance)>|<seed:[a-z_]+>|\]~[a-z!]+[\[\]]|\[e~\["
    r"|<(?:bos|eos|sep|sop)>|\[gMASK\]|<end_of_sentence>|<SPECIAL_\d+>|</assistant>"
)
_BY_ROLE = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "end", "endoftext")]
# Tokens that no template has in one piece.
_OTHERS = ["<｜hy_eos:opensource｜>"]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _result(text: str, number: int = 0) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"call{number:05}",
        "name": "get_weather",
        "content": text,
    }


_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "DESCRIBED weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "DESCRIBED city"}},
            "required": ["city"],
        },
    },
}
_SYSTEM = {"role": "system", "content": "SYSTEMTEXT be brief."}
_ASK, _ASK2 = _user("USERONE asks?"), _user("USERTWO asks?")
_SAY, _SAY2 = _assistant("ANSWERONE says."), _assistant("ANSWERTWO says.")
_CITY, _CITY_TEXT = {"city": "CITYARG"}, json.dumps({"city": "CITYARG"})
_PARALLEL = [_call("get_weather", _CITY), _call("get_weather", {"city": "CITYTWO"}, 1)]
_THOUGHT = "<think>\nTHOUGHTONE here\n</think>\n\nANSWERONE says."
CHATS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [_ASK, _SAY]},
    "system": {"messages": [_SYSTEM, _ASK, _SAY]},
    "developer": {"messages": [{**_SYSTEM, "role": "developer"}, _ASK, _SAY]},
    "two turns": {"messages": [_ASK, _SAY, _ASK2, _SAY2]},
    "system, two turns": {"messages": [_SYSTEM, _ASK, _SAY, _ASK2, _SAY2]},
    "only the last turn": {"messages": [_ASK, {**_SAY, "weight": 0}, _ASK2, _SAY2]},
    "only the first turn": {"messages": [_ASK, _SAY, _ASK2, {**_SAY2, "weight": 0}]},
    "assistant first": {"messages": [_SAY, _ASK, _SAY2]},
    "spaces": {"messages": [_user("\n USERONE  asks? "), _assistant("\n ANSWERONE\n\n says. \n")]},
    "quotes": {"messages": [_user('USERONE "<b>"?'), _assistant('ANSWERONE\t"é" & \\n\n')]},
    "think": {"messages": [_ASK, _assistant(_THOUGHT)]},
    "think, two turns": {"messages": [_ASK, _assistant(_THOUGHT), _ASK2, _SAY2]},
    "reasoning": {"messages": [_ASK, {**_SAY, "reasoning_content": "THOUGHTONE here"}]},
    "call, last": {"messages": [_ASK, _assistant(None, tool_calls=[_call("get_weather", _CITY)])]},
    "call": {
        "messages": [
            _ASK,
            _assistant(None, tool_calls=[_call("get_weather", _CITY)]),
            _result("RESULTONE 20 C"),
            _SAY,
        ],
        "tools": [_TOOL],
    },
    "call as JSON text": {
        "messages": [
            _ASK,
            _assistant(None, tool_calls=[_call("get_weather", _CITY_TEXT)]),
            _result("RESULTONE 20 C"),
            _SAY,
        ],
        "tools": [_TOOL],
    },
    "call and text": {
        "messages": [
            _ASK,
            _assistant("ANSWERONE looks.", tool_calls=[_call("get_weather", _CITY)]),
            _result('{"RESULTONE": "20 C"}'),
            _SAY2,
        ],
        "tools": [_TOOL],
    },
    "two calls": {
        "messages": [
            _ASK,
            _assistant(None, tool_calls=_PARALLEL),
            _result("RESULTONE 20 C"),
            _result("RESULTTWO 10 C", 1),
            _SAY,
        ],
        "tools": [_TOOL],
    },
    "unused tool": {"messages": [_ASK, _SAY], "tools": [_TOOL]},
}
DAY = date(2031, 2, 3)
_WORDS = re.compile(
    r"(?:SYSTEM|USER|ANSWER|THOUGHT|RESULT)(?:TEXT|ONE|TWO)|CITYARG|CITYTWO|get_weather|DESCRIBED"
)
_OF_ASSISTANT = ("ANSWER", "THOUGHT", "CITY", "get_")


def tokenizer_of(file: Path, root: Path) -> ChatTemplate:
    """A template with a tokenizer of bytes, and the special tokens that the template names."""
    source = file.read_text()
    tokenizer = Tokenizer(models.BPE(_bytes(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        sorted({*_SPECIAL.findall(source), *_BY_ROLE, *_OTHERS, "<s>", "</s>"})
    )
    tokenizer.save(str(root / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    directory: Any = SimpleNamespace(special_token=tokens.get)
    return ChatTemplate(source, str(file), root / "tokenizer.json", directory, DAY)


def _bytes() -> dict[str, int]:
    return {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def faults(template: ChatTemplate, row: dict[str, Any]) -> str:
    """What is wrong with the labels of a chat; empty if nothing is.

    Raises:
        UserError: the chat is refused.
    """
    line: Any = SimpleNamespace(content=row, where="line 1", value=lambda _, name: row[name])
    chat = LineFormat("chat", Keys("messages", ""), chats=True).read(line)
    tokens, trained = template.encode(chat, line)
    tokenizer = template._tokenizer
    runs, before = [], False
    for token, used in zip(tokens, trained, strict=True):
        if used:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = used
    texts = [tokenizer.decode(run) for run in runs]
    messages = [row["messages"][number] for number in chat.trained]
    if len(texts) != len(messages):  # of marks
        texts, runs, messages = ["".join(texts)], [[*chain.from_iterable(runs)]], [messages]
    if not texts:
        return f"{len(texts)} parts instead of {len(messages)}: {texts}"
    for text, run, message in zip(texts, runs, messages, strict=True):
        wanted = set(_WORDS.findall(json.dumps(message)))
        found = set(_WORDS.findall(text))
        if found != wanted:
            return f"{wanted - found} missing, {found - wanted} too much in {text!r}"
        if '\\"city' in text or "'city'" in text:
            return f"arguments in {text!r}"
        special = tokenizer.added_tokens_decoder
        ending = [token for token in run if tokenizer.decode([token]).strip()]
        if ending[-1] not in special and template.trains_end():  # else a warning says so
            return f"no end token: {text!r}"
        tail = re.search(r"(?:<[^\w/]*assistant\W*>|CHATBOT\S*)\s*$", text)
        if tail:
            return f"next header: {text!r}"
    other = [m for n, m in enumerate(row["messages"]) if n not in chat.trained]
    wanted = set(_WORDS.findall(json.dumps([other, row.get("tools") or []])))
    missing = wanted - set(_WORDS.findall(tokenizer.decode(tokens)))
    return f"{missing} missing in the whole" if missing else ""


def works(file: Path, root: Path, names: Sequence[str]) -> bool:
    """Whether a template gives right labels for all of these chats; otherwise it refuses one."""
    template = tokenizer_of(file, root)
    for name in names:
        try:
            found = faults(template, CHATS[name])
        except UserError:
            return False
        assert not found, (file.name, name, found)
    return True
