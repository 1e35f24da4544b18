"""Chat templates of transformers: the tokens of a chat, and which of them the assistant writes.

https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import re
from datetime import date, datetime, time
from functools import cached_property
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface_chat_check import lost, python_arguments
from hvdtrain.tasks.huggingface_lines import Chat, Line
from hvdtrain.tasks.huggingface_model import ModelDirectory, library

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Special tokens that a template may use by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# A chat that shows how a template ends the assistant's turn.
_ANSWER = "hvdtrain"
_EXAMPLE = Chat(
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}], trained=[1]
)
_LAST = 3  # tokens at the end of a turn: white space may follow the end token
# Characters of a text in a message, before and after the first that differs.
_SHOWN_BEFORE, _SHOWN = 16, 32
_HEADER = 256  # characters, at most, of the text that begins a message
_Span = tuple[int, int]  # first and last + 1 character
# The function for the current time, and what its format may contain.
_NOW, _CODES = "strftime_now", (*"aAbBcdeHIjmMpSUwWxXyYzZ", "-d", "-m")


class _RejectedError(UserError):
    """The template raises an error, or does not expect arguments of calls as they are."""


class ChatTemplate:
    """A chat template with its tokenizer.

    Args:
        source: the template, or several by name as in transformers ("default", "tool_use").
        name: where it comes from, for messages.
        tokenizer: path of a tokenizer.json.
        directory: names the special tokens.
        day: that templates write as the current date; None: today.

    Attributes:
        dated: whether the template writes a date.
    """

    def __init__(
        self,
        source: str | dict[str, str],
        name: str,
        tokenizer: Path,
        directory: ModelDirectory,
        day: date | None = None,
    ) -> None:
        self.source = source
        self.name = name
        sources = source if isinstance(source, dict) else {"": source}
        self.dated = any(_NOW in each for each in sources.values())
        if day is not None and self.dated:
            sources = {name: _with_day(each, day) for name, each in sources.items()}
        self._tokenizer: Any = library().PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizer), chat_template=sources.get("", sources)
        )
        for kind in _NAMED_TOKENS:
            token = directory.special_token(kind)
            if token in self._tokenizer.get_vocab():  # an unknown one would be added
                setattr(self._tokenizer, kind, token)

    def encode(self, chat: Chat, line: Line | None = None) -> tuple[list[int], list[bool]]:
        """(tokens, whether each is part of a message to train on).

        A message to train on ends with the tokens that end its turn. The template marks messages of
        the assistant with {% generation %}; without these marks they are located by rendering the
        chat up to each message.

        Args:
            line: location of the chat, for messages.

        Raises:
            UserError: the template rejects the chat or drops a part of it, or the messages cannot
                be located.
        """
        try:
            return self._encode(chat, line)
        except _RejectedError as error:
            other = chat.with_json_arguments()  # some templates insert them as text
            if other is None:
                raise
            try:
                return self._encode(other, line)
            except _RejectedError:
                raise error from None

    def _encode(self, chat: Chat, line: Line | None) -> tuple[list[int], list[bool]]:
        marks = bool(_GENERATION.search(self._tokenizer.get_chat_template(None, chat.tools)))
        if marks:
            text, tokens, spans, places = self._marked(chat, line)
        else:
            text, spans = self._located(chat, line)
            found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            tokens, places = found["input_ids"], found["offset_mapping"]
        where = f"{_where(line)}{self.name}"
        if (name := python_arguments(chat, text)) is not None:
            raise _RejectedError(
                f"{where} writes the arguments of {name!r} as Python does, not as JSON"
            )
        trained = [text[begin:end] for begin, end in spans]
        if (part := lost(chat, text, trained, marks)) is not None:
            raise UserError(
                f"{where} drops {part}: name a template that writes it with "
                "huggingface.chat_template, or remove it from the line"
            )
        return tokens, _inside(places, spans)

    def _marked(
        self, chat: Chat, line: Line | None
    ) -> tuple[str, list[int], list[_Span], list[_Span]]:
        """(text, tokens, spans to train on by the template's marks, place of each token)."""
        found = self._render(
            line, chat.messages, chat.tools, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )  # fmt: skip
        places, marks = found["offset_mapping"], found["assistant_masks"]
        groups = groupby(range(len(marks)), key=marks.__getitem__)
        runs = [[*tokens] for mark, tokens in groups if mark]
        assistant = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant"]
        if len(runs) == len(assistant):
            runs = [run for n, run in zip(assistant, runs, strict=True) if n in chat.trained]
        elif assistant != chat.trained:
            inside = _inside(places, self._located(chat, line)[1])
            runs = [kept for run in runs if (kept := [token for token in run if inside[token]])]
        text = self._text(line, chat.messages, chat.tools)
        return text, found["input_ids"], [(places[r[0]][0], places[r[-1]][1]) for r in runs], places

    def _located(self, chat: Chat, line: Line | None) -> tuple[str, list[_Span]]:
        """(text, span of each message to train on)."""
        text, spans = self._text(line, chat.messages, chat.tools), []
        for number in chat.trained:
            if number == 0:
                raise UserError(
                    f"{_where(line)}message 1 is the assistant's, so nothing asks for it: begin "
                    "the chat with another message, or give this one the weight 0"
                )
            prompt = self._text(line, chat.messages[:number], chat.tools, prompt=True)
            whole = self._text(line, chat.messages[: number + 1], chat.tools)
            if (problem := self._misplaced(number + 1, prompt, whole, text)) is not None:
                raise UserError(
                    f"{_where(line)}{self.name} {problem}, so its tokens cannot be located: put "
                    "{% generation %} and {% endgeneration %} around the assistant's messages in a "
                    "copy of the template, and name it with huggingface.chat_template"
                )
            spans.append((len(prompt), len(whole)))
        return (text, spans) if self._closes else self._closed(chat, text, spans)

    def _misplaced(self, number: int, prompt: str, whole: str, text: str) -> str | None:
        """Why a message is not what `whole` adds to `prompt`; None: it is.

        Args:
            prompt: the chat up to the message, which it asks for.
            whole: the chat up to the message's end.
            text: the whole chat.
        """
        if not whole.startswith(prompt):
            asked, written = _difference(prompt, whole)
            return f"asks for message {number} with {asked}, but writes {written} there"
        if not text.startswith(whole):
            last, later = _difference(whole, text)
            return f"writes {last} in message {number} if it is the last one, but {later} if not"
        ends = {self._from_last_token(each) for each in (prompt, whole)}
        if whole != prompt and len(ends) == 1 and "" not in ends:
            return f"asks for another answer in message {number}"
        return None

    def _from_last_token(self, text: str) -> str:
        """The end of a text, from its last special token on; empty if that is far from the end."""
        begin = max(len(text) - _HEADER, 0)
        return next(
            (text[found.start() :] for found in [*self._special.finditer(text, begin)][-1:]), ""
        )

    def _closed(self, chat: Chat, text: str, spans: list[_Span]) -> tuple[str, list[_Span]]:
        """Text and spans; a turn then ends with the special token that begins the next one."""
        if spans[-1][1] == len(text):
            calls = bool(chat.messages[-1].get("tool_calls"))
            text += self._token_after(chat) if calls else self._token_after(_EXAMPLE)
        ends = [self._special.match(text, end) for _, end in spans]
        return text, [
            (begin, token.end() if token else end)
            for (begin, end), token in zip(spans, ends, strict=True)
        ]

    def _token_after(self, chat: Chat) -> str:
        """Special token that begins the message after a chat; empty if there is none."""
        role = "tool" if chat.messages[-1].get("tool_calls") else "user"
        try:
            text = self._text(None, chat.messages, chat.tools)
            more = self._text(None, [*chat.messages, {"role": role, "content": "a"}], chat.tools)
        except UserError:
            return ""  # it requires other chats
        found = self._special.match(more, len(text)) if more.startswith(text) else None
        return found.group() if found else ""

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches a special token."""
        tokens = [str(token) for token in self._tokenizer.added_tokens_decoder.values()]
        return re.compile("|".join(map(re.escape, sorted(tokens, key=len)[::-1])) or "(?!)")

    @cached_property
    def _after_answer(self) -> str | None:
        """Text after an answer that ends a chat; None: the template requires other chats."""
        try:
            return self._text(None, _EXAMPLE.messages, None).rpartition(_ANSWER)[2]
        except UserError:
            return None

    @property
    def _closes(self) -> bool:
        """Whether the template writes a special token after an answer."""
        return self._after_answer is None or self._special.search(self._after_answer) is not None

    def question(self, prompt: str) -> list[int]:
        """Tokens of a chat in which the assistant answers a user's first message next."""
        messages = [{"role": "user", "content": prompt}]
        found = self._render(None, messages, None, return_dict=True, add_generation_prompt=True)
        tokens: list[int] = found["input_ids"]
        return tokens

    def end_of_turn(self) -> list[int]:
        """The special token that ends the assistant's turn, if one is known."""
        if self._after_answer is None:
            return []
        found = self._special.search(self._after_answer)
        token = found.group() if found else self._token_after(_EXAMPLE)
        return [self._tokenizer.convert_tokens_to_ids(token)] if token else []

    def trains_end(self) -> bool:
        """Whether the tokens to train on include a special token that ends the turn."""
        try:
            tokens, trained = self.encode(_EXAMPLE)
        except UserError:
            return True  # it requires other chats
        own = [token for token, used in zip(tokens, trained, strict=True) if used]
        return any(token in self._tokenizer.added_tokens_decoder for token in own[-_LAST:])

    def _text(
        self, line: Line | None, messages: list[dict[str, Any]], tools: Any, prompt: bool = False
    ) -> str:
        """The chat as text; `prompt`: up to the beginning of the assistant's next message."""
        text = self._render(line, messages, tools, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text

    def _render(
        self, line: Line | None, messages: list[dict[str, Any]], tools: Any, **options: Any
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # a template is a program
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise _RejectedError(
                f"{_where(line)}{self.name} cannot render the chat: {reason}"
            ) from None


def _inside(places: list[_Span], spans: list[_Span]) -> list[bool]:
    """Whether each token, of which the places are given, begins in a span."""
    return [any(a <= begin < b for a, b in spans) for begin, _ in places]


def _difference(text: str, other: str) -> tuple[str, str]:
    """Where two texts begin to differ, as Python strings."""
    pairs = enumerate(zip_longest(text, other))
    differ = next(place for place, (own, another) in pairs if own != another)
    begin, end = max(differ - _SHOWN_BEFORE, 0), differ + _SHOWN
    return repr(text[begin:end]), repr(other[begin:end])


def _with_day(source: str, day: date) -> str:
    """A template whose function strftime_now formats a day instead of the current time."""
    moment = datetime.combine(day, time())
    codes = (f"%{code}" for code in _CODES)
    steps = "".join(f" | replace({code!r}, {moment.strftime(code)!r})" for code in codes)
    macro = f"{{% macro {_NOW}(format) %}}{{{{ format{steps} }}}}{{% endmacro %}}"
    return f"{macro}{{{{ '' }}}}{source}"  # a line break after a block would be dropped


def _where(line: Line | None) -> str:
    return f"{line.where}: " if line else ""


def find_template(
    file: str | None, tokenizer: Path, directory: ModelDirectory, day: date | None = None
) -> ChatTemplate | None:
    """The chat template to use; None if there is none.

    Args:
        file: a template to use instead of the directory's.
        tokenizer: path of a tokenizer.json.
        day: as of ChatTemplate.

    Raises:
        UserError: a file cannot be read.
    """
    path = Path(file).expanduser() if file else directory.path / "chat_template.jinja"
    if file or path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
            return ChatTemplate(source, str(path), tokenizer, directory, day)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UserError(f"huggingface.chat_template: {path}: {reason}") from None
    found = directory.tokenizer_facts.get("chat_template")
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}
    if not found:
        return None
    name = f"the chat_template in {directory.path / 'tokenizer_config.json'}"
    return ChatTemplate(found, name, tokenizer, directory, day)
