"""Chat templates of transformers: the tokens of a chat, and which of them the assistant writes.

https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface_lines import Chat, Line
from hvdtrain.tasks.huggingface_model import ModelDirectory, library

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Special tokens that a template may use by name.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTemplate:
    """A chat template with its tokenizer.

    Args:
        source: the template, or several by name as in transformers ("default", "tool_use").
        name: where it comes from, for messages.
        tokenizer: path of a tokenizer.json.
        directory: names the special tokens.
    """

    def __init__(
        self, source: str | dict[str, str], name: str, tokenizer: Path, directory: ModelDirectory
    ) -> None:
        self.source = source
        self._name = name
        self._tokenizer: Any = library().PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizer), chat_template=source
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
            UserError: the template rejects the chat, or the messages cannot be located.
        """
        assistant = [n for n, m in enumerate(chat.messages) if m["role"] == "assistant"]
        marks = bool(_GENERATION.search(self._tokenizer.get_chat_template(None, chat.tools)))
        found = self._render(
            line, chat.messages, chat.tools, return_dict=True, return_assistant_tokens_mask=marks,
            tokenizer_kwargs={"return_offsets_mapping": True},
        )  # fmt: skip
        tokens: list[int] = found["input_ids"]
        trained = (
            [bool(mask) for mask in found["assistant_masks"]] if marks else [True] * len(tokens)
        )
        if not marks or assistant != list(chat.trained):
            spans = list(self._spans(chat, line))
            inside = (any(a <= begin < b for a, b in spans) for begin, _ in found["offset_mapping"])
            trained = [mark and own for mark, own in zip(trained, inside, strict=True)]
        return tokens, trained

    def _spans(self, chat: Chat, line: Line | None) -> Iterator[tuple[int, int]]:
        """First and last + 1 character of each message to train on."""
        text = self._text(line, chat.messages, chat.tools)
        for number in chat.trained:
            prompt = self._text(line, chat.messages[:number], chat.tools, prompt=True)
            whole = self._text(line, chat.messages[: number + 1], chat.tools)
            if not whole.startswith(prompt) or not text.startswith(whole):
                raise UserError(
                    f"{_where(line)}{self._name} renders message {number + 1} of the chat "
                    "differently when it is the last one, so its tokens cannot be located: put "
                    "{% generation %} and {% endgeneration %} around the assistant's messages in a "
                    "copy of the template, and name it with huggingface.chat_template"
                )
            yield len(prompt), len(whole)

    def question(self, prompt: str) -> list[int]:
        """Tokens of a chat in which the assistant answers a user's first message next."""
        messages = [{"role": "user", "content": prompt}]
        found = self._render(None, messages, None, return_dict=True, add_generation_prompt=True)
        tokens: list[int] = found["input_ids"]
        return tokens

    def end_of_turn(self) -> list[int]:
        """The special token that ends the assistant's turn, if there is one."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        tokens, trained = self.encode(Chat(messages, [1]))
        special = self._tokenizer.added_tokens_decoder
        own = [token for token, used in zip(tokens, trained, strict=True) if used]
        return [token for token in own if token in special][-1:]

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
            raise UserError(
                f"{_where(line)}{self._name} cannot render the chat: {reason}"
            ) from None


def _where(line: Line | None) -> str:
    return f"{line.where}: " if line else ""


def find_template(
    file: str | None, tokenizer: Path, directory: ModelDirectory
) -> ChatTemplate | None:
    """The chat template to use; None if there is none.

    Args:
        file: a template to use instead of the directory's.
        tokenizer: path of a tokenizer.json.

    Raises:
        UserError: a file cannot be read.
    """
    path = Path(file).expanduser() if file else directory.path / "chat_template.jinja"
    if file or path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), tokenizer, directory)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UserError(f"huggingface.chat_template: {path}: {reason}") from None
    found = directory.tokenizer_facts.get("chat_template")
    if isinstance(found, list):
        found = {one["name"]: one["template"] for one in found}
    if not found:
        return None
    name = f"the chat_template in {directory.path / 'tokenizer_config.json'}"
    return ChatTemplate(found, name, tokenizer, directory)
