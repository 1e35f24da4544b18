"""Chat templates, official ones and ones of the same construction: labels, or the right refusal."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from hvdtrain.errors import UserError
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface import HuggingFace
from hvdtrain.tasks.huggingface_config import HuggingFaceConfig, HuggingFaceTaskConfig
from hvdtrain.tasks.huggingface_data import IGNORED, prompt_of
from tests.support.chat_templates import CHATS, faults, tokenizer_of, works
from tests.support.runs import REPOSITORY
from tests.support.transformer_directories import CHATML, MARKED_CHATML, add_template, make, write

ASK = {"role": "user", "content": "the work?"}
SAY = {"role": "assistant", "content": "License"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"city": "Bonn"}}}],
}
RESULT = {"role": "tool", "content": 'a "b"'}
TOOL = {"type": "function", "function": {"name": "f"}}


def _with_calls(call: str) -> str:
    """ChatML with calls, of which `call` is written."""
    calls = f"{{% for call in m.tool_calls or [] %}}{call}{{% endfor %}}"
    return CHATML.replace("{{ m.content }}", f"{{{{ m.content }}}}{calls}")


OBJECTS = _with_calls("{{ call.function.name }}({{ call.function.arguments | tojson }})")
TEXTS = _with_calls("{{ call.function.name + '(' + call.function.arguments + ')' }}")
PYTHON = _with_calls("{{ call.function.name }}({{ call.function.arguments }})")
# As in Llama 3.1: calls in the place of the text; results as JSON.
INSTEAD = OBJECTS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
ESCAPED = OBJECTS.replace(
    "{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"
)
# As in GLM-4.5: the next message's header ends a turn.
HEADERS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As in Phi-3: a token ends the whole chat.
CLOSED = CHATML.replace("{% endif %}", "{% else %}</s>{% endif %}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = add_template(
        make(
            tmp_path_factory.mktemp("a") / "m", "llama", vocab_size=330, max_position_embeddings=128
        )
    )
    file = root / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens([f"<|{role}|>" for role in ("user", "assistant", "tool")])
    tokenizer.save(str(file))
    return root


def _read(directory: Path, root: Path, template: str, row: Any, **keys: Any) -> Datasets:
    (root / "t.jinja").write_text(template)
    write(root / "a.jsonl", [row] * 3)
    own = {"model": str(directory), "chat_template": str(root / "t.jinja"), **keys}
    config = HuggingFaceTaskConfig(HuggingFaceConfig(**own))
    config.data.train = [str(root / "a.jsonl")]
    return HuggingFace(config).datasets()


def _labels(directory: Path, root: Path, template: str, row: Any, **keys: Any) -> tuple[str, str]:
    """(the chat, its parts to train on, divided by |) as text."""
    tokens, targets = _read(directory, root, template, row, **keys).train.encoded(0)  # type: ignore[attr-defined]
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    trained = [[]]  # type: ignore[var-annotated]
    for target in targets.tolist():
        if target != IGNORED:
            trained[-1].append(target)
        elif trained[-1]:
            trained.append([])
    parts = [tokenizer.decode(part, skip_special_tokens=False) for part in trained]
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False), "|".join(
        filter(None, parts)
    )


def _chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [*messages], **more}


# --- official templates -------------------------------------------------------


def _official() -> Path:
    trl = importlib.util.find_spec("trl")  # importing it takes seconds
    assert trl is not None and trl.submodule_search_locations
    return Path(trl.submodule_search_locations[0]) / "chat_templates"


REASONS = (
    r"line 1: T (drops the (content|reasoning|call|argument|tool)\b.*: name a template that writes"
    r"|cannot render the chat: "
    r"|(asks for|writes) .* so its tokens cannot be located: put {% generation %})"
    r"|line 1: message 1 is the assistant's"
)


def test_official_templates_give_right_labels_or_a_reason(tmp_path: Path) -> None:
    right, files = 0, sorted(_official().glob("*.jinja"))
    for file in files:
        template = tokenizer_of(file, tmp_path)
        for name, chat in CHATS.items():
            try:
                found = faults(template, chat)
            except UserError as error:
                assert re.match(REASONS, str(error).replace(str(file), "T")), error
            else:
                assert not found, (file.name, name, found)
                right += 1
    assert len(files) > 60 and right > len(files) * len(CHATS) / 2


COLUMNS = (("one turn", "spaces"), ("two turns",), ("call",), ("two calls",), ("reasoning",))


def test_docs_tell_what_official_templates_support(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/huggingface.md").read_text()
    section = text.partition("## Families of chat templates")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    named = set()
    for _, names, *cells in rows[2:]:
        for name in re.findall(r"`([a-z0-9_]+)`", names):
            named.add(name)
            base, marked = (_official() / f"{name}{end}.jinja" for end in ("", "_training"))
            found = [
                "yes"
                if works(base, tmp_path, chats)
                else "marks"
                if marked.is_file() and works(marked, tmp_path, chats)
                else "no"
                for chats in COLUMNS
            ]
            assert cells == found, name
    official = {file.stem for file in _official().glob("*.jinja")}
    assert named == {name for name in official if not name.endswith("_training")}


# --- what a template drops ----------------------------------------------------

THOUGHT = {"role": "assistant", "content": "<think>so</think>License"}
DROPPED: dict[str, tuple[str, dict[str, Any], str]] = {
    "call": (CHATML, _chat(ASK, CALL, RESULT, SAY), r"the call of 'f' in message 2 \(assistant\)"),
    "last call": (CHATML, _chat(ASK, CALL), r"the call of 'f' in message 2"),
    "old form": (
        CHATML,
        _chat(ASK, {"role": "assistant", "content": "", "function_call": {"name": "f"}}),
        "the call of 'f' in message 2",
    ),
    "second call": (
        OBJECTS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
        _chat(ASK, {**CALL, "tool_calls": CALL["tool_calls"] * 2}),  # type: ignore[operator]
        "the call of 'f' in message 2",
    ),
    "arguments": (_with_calls("{{ call.function.name }}"), _chat(ASK, CALL), "the argument 'city'"),
    "text with calls": (
        INSTEAD,
        _chat(ASK, {**CALL, "content": "I look."}),
        "the content of message 2",
    ),
    "reasoning": (
        CHATML,
        _chat(ASK, {**SAY, "reasoning_content": "so"}),
        "the reasoning of message 2",
    ),
    "think": (
        CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
        _chat(ASK, THOUGHT),
        "the reasoning of message 2",
    ),
    "marked": (MARKED_CHATML, _chat(ASK, CALL), "the call of 'f' in message 2"),
    "role": (
        CHATML.replace("messages %}", "messages if m.role != 'developer' %}"),
        _chat({"role": "developer", "content": "Brief."}, ASK, SAY),
        r"the content of message 1 \(developer\)",
    ),
    "tool": (OBJECTS, _chat(ASK, CALL, RESULT, SAY, tools=[TOOL]), "the tool 'f'"),
}


@pytest.mark.parametrize("case", DROPPED)
def test_chat_of_which_the_template_drops_a_part_is_refused(
    directory: Path, tmp_path: Path, case: str
) -> None:
    template, row, part = DROPPED[case]
    with pytest.raises(UserError, match=f"a.jsonl: line 1: .*t.jinja drops {part}") as raised:
        _read(directory, tmp_path, template, row)
    assert "name a template that writes it with huggingface.chat_template" in str(raised.value)


WRITTEN: list[tuple[str, dict[str, Any], str]] = [
    (CHATML, _chat(ASK, THOUGHT), "<think>so</think>License<|im_end|>\n"),
    (
        ESCAPED,
        _chat(ASK, CALL, RESULT, SAY),
        'f({"city": "Bonn"})<|im_end|>\n|License<|im_end|>\n',
    ),
    (
        CHATML.replace("m.content", "m.content | trim"),
        _chat(ASK, {**SAY, "content": " a\n"}),
        "a<|im_end|>\n",
    ),
    (  # as in SmolLM3 and Nemotron
        CHATML.replace("m.content", "m.content.replace('/no_think', '')"),
        _chat({"role": "system", "content": "Be /no_think brief."}, ASK, SAY),
        "License<|im_end|>\n",
    ),
    (  # reasoning of an answer that is not trained on may be dropped
        CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
        _chat(ASK, {**THOUGHT, "weight": 0}, ASK, SAY),
        "License<|im_end|>\n",
    ),
]


@pytest.mark.parametrize(("template", "row", "trained"), WRITTEN)
def test_chat_that_is_written_in_another_form_is_trained_on(
    directory: Path, tmp_path: Path, template: str, row: Any, trained: str
) -> None:
    assert _labels(directory, tmp_path, template, row)[1] == trained


# --- arguments of calls -------------------------------------------------------


@pytest.mark.parametrize("template", [OBJECTS, TEXTS, PYTHON])
@pytest.mark.parametrize("arguments", [{"city": "Bonn"}, '{"city":"Bonn"}'])
def test_arguments_are_written_as_json_once(
    directory: Path, tmp_path: Path, template: str, arguments: Any
) -> None:
    call = {**CALL, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    _, trained = _labels(directory, tmp_path, template, _chat(ASK, call, RESULT, SAY))
    assert trained == 'f({"city": "Bonn"})<|im_end|>\n|License<|im_end|>\n'


def test_arguments_that_are_not_an_object_are_kept(directory: Path, tmp_path: Path) -> None:
    call = {**CALL, "tool_calls": [{"name": "f", "arguments": "[" * 5000}]}
    template = _with_calls("{{ call.name + call.arguments[:3] }}")
    assert _labels(directory, tmp_path, template, _chat(ASK, call))[1] == "f[[[<|im_end|>\n"


# --- ends of turns ------------------------------------------------------------


def test_next_header_ends_a_turn_without_an_end_token(directory: Path, tmp_path: Path) -> None:
    row = _chat(ASK, CALL, RESULT, SAY, ASK, SAY)
    text, trained = _labels(directory, tmp_path, HEADERS, row)
    call = 'f{"city": "Bonn"}<|tool|>'
    assert trained == f"{call}|License<|user|>|License<|user|>"
    assert text.endswith("<|assistant|>License")  # the last token is only a target
    assert _labels(directory, tmp_path, HEADERS, _chat(ASK, CALL))[1] == call


def test_missing_end_token_is_warned_of(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    unended = MARKED_CHATML.replace("<|im_end|>{% endg", "{% endg")
    logger = logging.getLogger("hvdtrain")
    logger.addHandler(caplog.handler)
    try:
        for template in (plain, unended, CHATML, MARKED_CHATML):
            caplog.clear()
            _read(directory, tmp_path, template, _chat(ASK, SAY))
            said = "the model does not learn where answers end" in caplog.text
            assert said == (template in (plain, unended))
    finally:
        logger.removeHandler(caplog.handler)


def _ends(directory: Path, template: Path) -> list[str]:
    config = HuggingFaceTaskConfig(
        HuggingFaceConfig(model=str(directory), chat_template=str(template))
    )
    task = HuggingFace(config)
    from hvdtrain.tasks.huggingface_model import CAUSAL, read_directory

    _, _, ends = prompt_of(task.config, read_directory(str(directory), CAUSAL), "a", "chat")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return [str(tokenizer.id_to_token(end)) for end in ends]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (CLOSED, "<|im_end|>"), (HEADERS, "<|user|>")],
)
def test_generated_answer_ends_with_the_tokens_of_the_model(
    directory: Path, tmp_path: Path, template: str, end: str
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    assert _ends(directory, tmp_path / "t.jinja") == ["</s>", end]
    own = directory / "generation_config.json"
    before = own.read_text()
    try:
        own.write_text(json.dumps({"eos_token_id": [2, 1]}))
        assert set(_ends(directory, tmp_path / "t.jinja")) == {"</s>", "<pad>", end}
    finally:
        own.write_text(before)


# --- messages whose place is unknown ------------------------------------------

MISPLACED: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompt": (  # as in DeepSeek R1
        CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif"),
        _chat(ASK, SAY),
        r"asks for message 2 with .*<think>', but writes .*License",
    ),
    "last": (
        CLOSED,
        _chat(ASK, SAY, ASK, SAY),
        r"writes .*</s>' in message 2 if it is the last one, but .*user\\nthe work.* if not",
    ),
    "header": (  # as in Command R7B
        CHATML.partition("{% if")[0] + "<|im_start|>assistant\n",
        _chat(ASK, SAY),
        "asks for another answer in message 2",
    ),
    "first": (CHATML, _chat(SAY, ASK, SAY), "message 1 is the assistant's, so nothing asks for it"),
}


@pytest.mark.parametrize("case", MISPLACED)
def test_reason_says_why_a_message_cannot_be_located(
    directory: Path, tmp_path: Path, case: str
) -> None:
    template, row, reason = MISPLACED[case]
    with pytest.raises(UserError, match=f"a.jsonl: line 1: .*{reason}"):
        _read(directory, tmp_path, template, row)


def test_marks_locate_messages_whose_place_is_unknown(directory: Path, tmp_path: Path) -> None:
    closed = MARKED_CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    row = _chat(ASK, {**SAY, "weight": 0}, ASK, {**SAY, "content": "grant"})
    assert _labels(directory, tmp_path, closed, row)[1] == "grant<|im_end|>"
    assert _labels(directory, tmp_path, closed, _chat(SAY, ASK, SAY))[1].count("License") == 2


def test_marks_may_leave_out_messages_and_reasoning(directory: Path, tmp_path: Path) -> None:
    last = MARKED_CHATML.replace("m.role == 'assistant'", "loop.last")
    assert _labels(directory, tmp_path, last, _chat(ASK, SAY, ASK, SAY))[1] == "License<|im_end|>"
    reasoning = MARKED_CHATML.replace("{% generation %}", "{{ m.thinking }}{% generation %}")
    row = _chat(ASK, {**SAY, "reasoning_content": "so"})
    text, trained = _labels(directory, tmp_path, reasoning, row)
    assert trained == "License<|im_end|>" and "soLicense" in text


# --- dates --------------------------------------------------------------------

FORMATS = ("%d %B %Y", "%Y-%m-%d", "%b %-d, %y %A %H:%M")
TODAY = "".join(f"{{{{ strftime_now({f!r}) }}}};" for f in FORMATS)
# As in gpt-oss and Llama 3.2: called within a macro, and only if it is defined.
DATED = (
    f"{{% macro now() %}}{TODAY}{{% endmacro %}}"
    f"{{% if strftime_now is defined %}}\nA{{{{ now() }}}}{{% endif %}}{CHATML}"
)


def test_date_in_a_template_is_the_configured_day(directory: Path, tmp_path: Path) -> None:
    keys = {"date": "2031-02-03"}
    day = "A03 February 2031;2031-02-03;Feb 3, 31 Monday 00:00;"
    assert _labels(directory, tmp_path, DATED, _chat(ASK, SAY), **keys)[0].startswith(day)
    dated = _read(directory, tmp_path, DATED, _chat(ASK, SAY), **keys)
    assert any("the current date is 2031-02-03 in all chats" in note for note in dated.notes)
    first = _read(directory, tmp_path, DATED, _chat(ASK, SAY), date="2026-01-01")
    assert first.fingerprint != dated.fingerprint
    assert first.fingerprint == _read(directory, tmp_path, DATED, _chat(ASK, SAY)).fingerprint
    plain = {
        _read(directory, tmp_path, CHATML, _chat(ASK, SAY), **more).fingerprint
        for more in ({}, keys)
    }
    assert len(plain) == 1
    with pytest.raises(ValueError, match=r"huggingface\.date must be a day"):
        HuggingFaceConfig(date="today")


def test_generate_asks_with_the_current_date(directory: Path, tmp_path: Path) -> None:
    from hvdtrain.tasks.huggingface_chat import find_template
    from hvdtrain.tasks.huggingface_model import CAUSAL, read_directory

    (tmp_path / "t.jinja").write_text("{{ strftime_now('%Y') }}" + CHATML)
    found = read_directory(str(directory), CAUSAL)
    template = find_template(str(tmp_path / "t.jinja"), found.tokenizer, found)
    assert template is not None
    begin = date.today().year
    text = Tokenizer.from_file(str(found.tokenizer)).decode(template.question("a"))
    assert text[:4] in (str(begin), str(begin + 1))
