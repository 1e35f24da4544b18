"""Chats, Alpaca's records and prompts of the task `huggingface`: labels, packing, user mistakes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch.utils.data import default_collate

from hvdtrain.data.config import DataConfig
from hvdtrain.engine.flops import count
from hvdtrain.errors import UserError
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface import HuggingFace
from hvdtrain.tasks.huggingface_config import HuggingFaceConfig, HuggingFaceTaskConfig
from hvdtrain.tasks.huggingface_data import IGNORED, Packed, best_fit, prompt_of
from tests.support.transformer_directories import (
    CHATML,
    MARKED_CHATML,
    add_template,
    chats,
    make,
    write,
)

POSITIONS = 128
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the work?"},
    {"role": "assistant", "content": "License"},
    {"role": "user", "content": "grant"},
    {"role": "assistant", "content": "you"},
]
# Text of MESSAGES in CHATML, and whether the assistant writes it.
PIECES = [
    ("<|im_start|>system\nBe brief.<|im_end|>\n", False),
    ("<|im_start|>user\nthe work?<|im_end|>\n<|im_start|>assistant\n", False),
    ("License<|im_end|>\n", True),
    ("<|im_start|>user\ngrant<|im_end|>\n<|im_start|>assistant\n", False),
    ("you<|im_end|>\n", True),
]
# CHATML with tools, and with calls as f({"key": "value"}).
TOOLS = "{% for t in tools or [] %}{{ t.name }}\n{% endfor %}" + CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson if call.function.arguments }})"
    "{% endfor %}",
)
ALPACA = {"instruction": "Name it.", "input": "", "output": "License"}
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\nName it.\n\n### Response:"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories without a template (plain, gpt2), with one (chat), and with a marked one."""
    root = tmp_path_factory.mktemp("directories")
    make(root / "plain", "llama", max_position_embeddings=256)
    longer = {"max_position_embeddings": POSITIONS}
    add_template(make(root / "chat", "llama", **longer))
    add_template(make(root / "marked", "llama", **longer), MARKED_CHATML)
    add_template(make(root / "gpt2", "gpt2", n_positions=POSITIONS))
    chats(root / "chats.jsonl")
    return root


def _task(directory: Path, data: Path, **keys: Any) -> tuple[HuggingFace, Datasets]:
    """`keys`: huggingface.KEY, and data.KEY with the prefix data__."""
    of_data = {k.removeprefix("data__"): v for k, v in keys.items() if k.startswith("data__")}
    own = {key: value for key, value in keys.items() if not key.startswith("data__")}
    files = {key: str(v) if isinstance(v, Path) else v for key, v in of_data.items()}
    config = HuggingFaceTaskConfig(
        HuggingFaceConfig(model=str(directory), **own),
        data=DataConfig(train=str(data), **files),
    )
    task = HuggingFace(config)
    return task, task.datasets()


def _sample(directory: Path, file: Path, row: Any, **keys: Any) -> tuple[Any, Any]:
    """Tokens and targets of a file's only line, without padding."""
    write(file, [row])
    _, datasets = _task(directory, file, data__validation=file, **keys)
    return datasets.train.encoded(0)  # type: ignore[attr-defined,no-any-return]


def _expected(
    directory: Path, pieces: list[tuple[str, bool]], begin: tuple[int, ...] = ()
) -> tuple[list[int], list[int]]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids, trained = [*begin], [False] * len(begin)
    for text, mark in pieces:
        own = tokenizer.encode(text, add_special_tokens=False).ids
        ids += own
        trained += [mark] * len(own)
    targets = [token if mark else IGNORED for token, mark in zip(ids, trained, strict=True)]
    return ids[:-1], targets[1:]


def _assert_equal(found: tuple[Any, Any], expected: tuple[list[int], list[int]]) -> None:
    assert [each.tolist() for each in found] == [*expected]


# --- labels ------------------------------------------------------------------


def _part(message: dict[str, str]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
CHATS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES, "prompt": "unused", "text": "unused"},
    "parts": {"messages": [_part(message) for message in MESSAGES]},
    "sharegpt": {
        "conversations": [{"from": SPEAKERS[m["role"]], "value": m["content"]} for m in MESSAGES]
    },
}


@pytest.mark.parametrize("shape", CHATS)
def test_only_assistant_turns_of_chat_are_trained_on(
    root: Path, tmp_path: Path, shape: str
) -> None:
    found = _sample(root / "chat", tmp_path / "a.jsonl", CHATS[shape])
    _assert_equal(found, _expected(root / "chat", PIECES))


def test_marks_of_template_select_trained_tokens(root: Path, tmp_path: Path) -> None:
    pieces = []  # the marks exclude the line break after the assistant's turn
    for text, mark in PIECES:
        pieces += [(text[:-1], True), ("\n", False)] if mark else [(text, False)]
    found = _sample(root / "marked", tmp_path / "a.jsonl", {"messages": MESSAGES})
    _assert_equal(found, _expected(root / "marked", pieces))
    rest = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    found = _sample(root / "marked", tmp_path / "b.jsonl", rest)
    pieces = [(text, mark and number > 3) for number, (text, mark) in enumerate(pieces)]
    _assert_equal(found, _expected(root / "marked", pieces))


def test_turns_of_prompt_or_of_weight_0_are_not_trained_on(root: Path, tmp_path: Path) -> None:
    last = _expected(root / "chat", [(text, text == PIECES[-1][0]) for text, _ in PIECES])
    rest = {"prompt": MESSAGES[:4], "completion": MESSAGES[4:]}
    _assert_equal(_sample(root / "chat", tmp_path / "a.jsonl", rest), last)
    weighted = [{**m, "weight": int(n == 4)} for n, m in enumerate(MESSAGES)]
    _assert_equal(_sample(root / "chat", tmp_path / "b.jsonl", {"messages": weighted}), last)


def test_tools_and_tool_messages_reach_the_template(root: Path, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "4"}
    row = {"messages": [*MESSAGES[:2], call, result, *MESSAGES[4:]], "tools": [{"name": "f"}]}
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS)
    found = _sample(root / "chat", tmp_path / "a.jsonl", row, chat_template=str(template))
    pieces = [
        ("f\n", False),
        *PIECES[:2],
        ("f()<|im_end|>\n", True),
        ("<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n", False),
        PIECES[-1],
    ]
    _assert_equal(found, _expected(root / "chat", pieces))


def test_alpaca_uses_template_or_published_prompt(root: Path, tmp_path: Path) -> None:
    found = _sample(root / "plain", tmp_path / "a.jsonl", ALPACA)
    pieces = [(PROMPT, False), ("License</s>", True)]
    _assert_equal(found, _expected(root / "plain", pieces, begin=(0,)))
    found = _sample(root / "plain", tmp_path / "b.jsonl", {**ALPACA, "input": "x", "text": "y"})
    tokenizer = Tokenizer.from_file(str(root / "plain/tokenizer.json"))
    text = tokenizer.decode(found[0].tolist())
    assert "paired with an input" in text and "### Input:\nx\n\n### Response:License" in text
    found = _sample(root / "chat", tmp_path / "c.jsonl", {**ALPACA, "input": "x"})
    user = "<|im_start|>user\nName it.\nx<|im_end|>\n<|im_start|>assistant\n"
    _assert_equal(found, _expected(root / "chat", [(user, False), PIECES[2]]))


def test_text_prompts_use_only_a_configured_template(root: Path, tmp_path: Path) -> None:
    row, file = {"prompt": "the work", "completion": " grant"}, tmp_path / "a.jsonl"
    pieces = [("the work", False), (" grant</s>", True)]
    _assert_equal(_sample(root / "chat", file, row), _expected(root / "chat", pieces, (0,)))
    template = root / "chat/chat_template.jinja"
    found = _sample(root / "chat", file, row, chat_template=str(template))
    pieces = [("<|im_start|>user\nthe work<|im_end|>\n<|im_start|>assistant\n", False)]
    _assert_equal(found, _expected(root / "chat", [*pieces, (" grant<|im_end|>\n", True)]))


def test_plain_text_lines_are_recognized_and_packed(root: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "the work of the license"}] * 99)
    task, datasets = _task(root / "plain", file, context=32)
    assert task.units == ("tokens", 32) and datasets.format == "text"
    tokenizer = Tokenizer.from_file(str(root / "plain/tokenizer.json"))
    line = [*tokenizer.encode("the work of the license").ids, 1]
    assert datasets.train[0].tolist() == (line * 9)[:33]
    named = write(tmp_path / "b.jsonl", [{"body": "the work of the license"}] * 99)
    _, other = _task(root / "plain", named, context=32, data__text_key="body")
    assert torch.equal(datasets.train[0], other.train[0])


def test_configured_keys_override_recognition(root: Path, tmp_path: Path) -> None:
    row = {"text": "unused", "dialog": MESSAGES, "q": "the work", "a": " grant"}
    file = tmp_path / "a.jsonl"
    found = _sample(root / "chat", file, row, input_key="dialog")
    _assert_equal(found, _expected(root / "chat", PIECES))
    keys = {"input_key": "q", "target_key": "a"}
    pieces = [("the work", False), (" grant</s>", True)]
    found = _sample(root / "chat", file, row, **keys)
    _assert_equal(found, _expected(root / "chat", pieces, (0,)))


@pytest.mark.parametrize(
    ("row", "note", "name"),
    [
        ({"messages": MESSAGES}, "chats (messages); trained on: the assistant's turns", "chat"),
        (ALPACA, "Alpaca's records (instruction, output), as chats; trained on: the", "chat"),
        (
            {"prompt": "a", "completion": "b"},
            "prompts and answers (prompt, completion), used unchanged; trained on: the answers",
            "answer",
        ),
    ],
)
def test_log_says_which_format_was_recognized(
    root: Path, tmp_path: Path, row: Any, note: str, name: str
) -> None:
    _, datasets = _task(root / "chat", write(tmp_path / "a.jsonl", [row] * 3))
    assert len(datasets.notes) == 1 and datasets.notes[0].startswith(f"data.train: {note}")
    assert datasets.format == name


# --- packing -----------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=80))
def test_packing_is_complete_and_no_two_bins_fit_into_one(lengths: list[int]) -> None:
    bins = best_fit(lengths, 50)
    assert sorted(item for chosen in bins for item in chosen) == [*range(len(lengths))]
    sums = sorted(sum(lengths[item] for item in chosen) for chosen in bins)
    assert all(total <= 50 for total in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > 50
    assert bins == best_fit(lengths, 50)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["chat", "gpt2"])
def test_packed_documents_have_the_logits_of_each_alone(root: Path, layout: str) -> None:
    task, datasets = _task(root / layout, root / "chats.jsonl", pack=True)
    model, data = task.model().eval(), datasets.train
    assert isinstance(data, Packed) and len(data) < 57
    indices = range(4)
    tokens, _, positions = default_collate([data[index] for index in indices])
    logits = model(input_ids=tokens, position_ids=positions).logits
    together = model(input_ids=tokens).logits
    total, count, documents = 0.0, 0, 0
    for row, index in enumerate(indices):
        begin = 0
        for line in data._samples[index]:
            alone, targets = data._answers.encoded(line)
            end = begin + len(alone)
            assert torch.equal(tokens[row, begin:end], alone)
            expected = model(input_ids=alone[None]).logits[0]
            torch.testing.assert_close(logits[row, begin:end], expected, atol=1e-5, rtol=1e-4)
            if begin:
                assert not torch.allclose(together[row, begin:end], expected, atol=1e-4)
            scores = expected.log_softmax(-1)
            for at, target in enumerate(targets.tolist()):
                if target != IGNORED:
                    total, count = total - float(scores[at, target]), count + 1
            begin, documents = end, documents + 1
    assert documents > len(indices)
    found, trained = task.loss(model, task.collate([data[index] for index in indices]))["loss"]
    assert int(trained) == count and float(found) == pytest.approx(total, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["plain", "gpt2"])
def test_document_mask_separates_documents_of_text(root: Path, tmp_path: Path, layout: str) -> None:
    file = write(tmp_path / "a.jsonl", [{"text": "license " * (n % 5 + 1)} for n in range(99)])
    keys = {"context": 48, "data__document_mask": True}
    task, datasets = _task(root / layout, file, **keys)
    model, samples = task.model().eval(), [datasets.train[index] for index in range(3)]
    total, count = 0.0, 0
    for sample in samples:
        begin = 0
        while begin < 48:
            ends = [at for at in range(begin, 48) if int(sample[at]) == 1]  # </s>
            end = ends[0] + 1 if ends else 48
            scores = model(input_ids=sample[None, begin:end]).logits[0].log_softmax(-1)
            for at in range(begin, end - bool(ends)):
                total, count = total - float(scores[at - begin, sample[at + 1]]), count + 1
            begin = end
    found, trained = task.loss(model, task.collate(samples))["loss"]
    assert int(trained) == count < 3 * 48 and float(found) == pytest.approx(total, rel=1e-5)


def test_packing_is_rejected_for_model_that_ignores_positions(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "n_head": 4, "n_layer": 2}
    directory = add_template(make(tmp_path / "bloom", "bloom", "BloomForCausalLM", **sizes))
    file = chats(tmp_path / "chats.jsonl")
    task, _ = _task(directory, file, pack=True, context=128)
    with pytest.raises(UserError, match="BloomForCausalLM cannot keep the documents of a sample"):
        task.model()


@pytest.mark.parametrize("layout", ["chat", "gpt2"])
def test_flops_of_packed_and_padded_samples_are_counted(root: Path, layout: str) -> None:
    found = []
    for packed in (True, False):
        task, datasets = _task(root / layout, root / "chats.jsonl", pack=packed)
        found.append(count(task, task.model(), datasets.train, 2))
    assert found[0] is not None and found[0] == found[1] > 1e6


def test_lengths_of_packed_samples_match_their_tokens(root: Path) -> None:
    _, datasets = _task(root / "chat", root / "chats.jsonl", pack=True)
    data: Any = datasets.train
    used = []
    for index in range(len(data)):
        _, targets, positions = data[index]
        assert len(positions) == POSITIONS
        used.append(int((targets != IGNORED).nonzero().max()) + 1)
    assert data.lengths().tolist() == used
    assert any("lines packed into" in note for note in datasets.notes)


# --- user mistakes -----------------------------------------------------------

BRIEF = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LINES: dict[str, tuple[Any, str]] = {
    "broken JSON": ('{"messages": [', r"a.jsonl: line 1 is not a JSON object \(Expecting"),
    "a list": ([1], r"a.jsonl: line 1 is not a JSON object \(it is a list"),
    "unknown": ({"question": "a", "reply": "b"}, "line 1 has an unknown format, with the keys que"),
    "no answer": ({"messages": BRIEF[:1]}, "line 1: no message of the assistant to train on"),
    "no messages": ({"messages": []}, "line 1: 'messages' is not a list of messages"),
    "role": ({"messages": [{"role": "bot", "content": "a"}]}, r'messages\[0\] has the role "bot";'),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        r"the content of messages\[0\] is not text",
    ),
    "too long": ({"messages": [*BRIEF, *MESSAGES * 9]}, r"\d+ tokens exceed huggingface.context"),
    "number": ({"prompt": "a", "completion": 3}, "'completion' is not a list of messages, but 3"),
    "input": ({**ALPACA, "input": 3}, "'input' is not text, but 3"),
    "tools": ({"messages": BRIEF, "tools": "f"}, "'tools' is not a list"),
}


@pytest.mark.parametrize("case", LINES)
def test_invalid_first_line_is_reported_before_the_run(
    root: Path, tmp_path: Path, case: str
) -> None:
    row, message = LINES[case]
    file = write(tmp_path / "a.jsonl", [row, {"messages": BRIEF}, {"messages": BRIEF}])
    with pytest.raises(UserError, match=message) as raised:
        _task(root / "chat", file)
    assert "\n" not in str(raised.value)


def test_line_of_another_format_is_reported_with_its_number(root: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"messages": BRIEF}] * 3 + [ALPACA])
    _, datasets = _task(root / "chat", file, data__validation=file)
    with pytest.raises(UserError, match=r"a.jsonl: line 4: no key 'messages', only instruction"):
        datasets.train[3]


def test_line_without_trained_tokens_after_truncation_is_reported(
    root: Path, tmp_path: Path
) -> None:
    long = [{"role": "user", "content": "license " * 199}, BRIEF[1]]
    file = write(tmp_path / "a.jsonl", [{"messages": long}] * 3)
    with pytest.raises(UserError, match=r"line 1: no token to train on .* the first 128"):
        _task(root / "chat", file, truncate=True)


def test_chats_without_template_are_rejected_in_one_line(root: Path) -> None:
    with pytest.raises(UserError, match=r"plain has no chat template .* huggingface.chat_template"):
        _task(root / "plain", root / "chats.jsonl")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"t.jinja cannot render the chat: .*Expected an expression"),
        ("{{ raise_exception('only users') }}", "line 1: .*t.jinja cannot render .*: only users"),
        (
            CHATML.replace("<|im_end|>", "{{ ' last' if loop.last }}<|im_end|>"),
            "line 1: .*t.jinja asks for message 3 with .* last.*, but writes .*{% generation %}",
        ),
    ],
)
def test_unusable_template_is_reported_with_advice(
    root: Path, tmp_path: Path, template: str, message: str
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    file = write(tmp_path / "a.jsonl", [{"messages": MESSAGES}] * 3)
    with pytest.raises(UserError, match=message):
        _task(root / "chat", file, chat_template=str(tmp_path / "t.jinja"))


def _mixed(root: Path) -> dict[str, Any]:
    write(root / "a.jsonl", [{"text": "a"}])
    (root / "b.txt").write_text("the work")
    return {"data__train": root}


def _json(root: Path) -> dict[str, Any]:
    (root / "a.json").write_text(json.dumps([ALPACA] * 99))
    return {"data__train": root / "a.json"}


def _empty(root: Path) -> dict[str, Any]:
    (root / "a.jsonl").write_text("")
    return {"data__train": root / "a.jsonl"}


def _blank(root: Path) -> dict[str, Any]:
    (root / "a.jsonl").write_text("\n\n")
    return {"data__train": root / "a.jsonl"}


def _text(root: Path) -> dict[str, Any]:
    file = write(root / "a.jsonl", [{"text": "the work"}] * 99)
    return {"data__train": file, "pack": True}


def _validation(root: Path) -> dict[str, Any]:
    (root / "b.txt").write_text("the work")
    return {"data__train": chats(root / "a.jsonl"), "data__validation": root / "b.txt"}


def _masked(root: Path) -> dict[str, Any]:
    return {"data__train": chats(root / "a.jsonl"), "data__document_mask": True}


def _no_file(root: Path) -> dict[str, Any]:
    return {"data__train": chats(root / "a.jsonl"), "chat_template": str(root / "none")}


def _no_key(root: Path) -> dict[str, Any]:
    return {"data__train": chats(root / "a.jsonl"), "input_key": "dialog"}


MISTAKES: list[tuple[Callable[[Path], dict[str, Any]], str]] = [
    (_mixed, "a.jsonl is a file of JSON lines, and .*b.txt is not: name files of one kind"),
    (_json, "a.json is a JSON file, and as text its raw content would be trained on"),
    (_empty, "data.train: every file that matches .*a.jsonl' is empty"),
    (_blank, "data.train: .*a.jsonl has only empty lines"),
    (_text, "huggingface.pack and .* are for answers and chats, and data.train is text"),
    (_validation, "must both be JSON lines, or neither"),
    (_masked, "data.document_mask is for text; for answers and chats, huggingface.pack"),
    (_no_key, "huggingface.input_key: .*a.jsonl: line 1 has no key 'dialog', only messages"),
    (_no_file, "huggingface.chat_template: .*none: No such file"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_unusable_data_is_rejected_with_one_message(
    root: Path, tmp_path: Path, mistake: Callable[[Path], dict[str, Any]], message: str
) -> None:
    keys = mistake(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        _task(root / "chat", keys.pop("data__train"), **keys)
    assert "\n" not in str(raised.value)


def test_template_in_tokenizer_config_is_used(root: Path, tmp_path: Path) -> None:
    directory = add_template(make(tmp_path / "llama", "llama", max_position_embeddings=POSITIONS))
    (directory / "chat_template.jinja").unlink()
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(4)  # as in some files
    tokenizer.enable_padding(length=200)
    tokenizer.save(str(file))
    template = "{{ bos_token }}{{ eos_token[:0] }}" + CHATML
    for found in (template, [{"name": "default", "template": template}]):
        facts = {"eos_token": "</s>", "chat_template": found, "bos_token": {"content": "<s>"}}
        (directory / "tokenizer_config.json").write_text(json.dumps(facts))
        sample = _sample(directory, tmp_path / "a.jsonl", {"messages": MESSAGES})
        _assert_equal(sample, _expected(directory, PIECES, begin=(0,)))
    facts = {"chat_template": CHATML, "bos_token": "<unknown>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(facts))
    sample = _sample(directory, tmp_path / "a.jsonl", {"messages": MESSAGES})
    _assert_equal(sample, _expected(directory, PIECES))


def test_prompt_of_generate_has_the_format_of_the_data(root: Path) -> None:
    task, _ = _task(root / "chat", root / "chats.jsonl")
    assert task._directory is not None
    user = "<|im_start|>user\nName it.<|im_end|>\n<|im_start|>assistant\n"
    prompts = {"chat": ((), user), "alpaca": ((0,), PROMPT), "answer": ((0,), "Name it.")}
    for name, (begin, text) in prompts.items():
        _, tokens, ends = prompt_of(task.config, task._directory, "Name it.", name)
        expected, _ = _expected(root / "chat", [(text, False), ("x", False)], begin)
        assert tokens == expected and ends == [1, 311][: 1 + (name == "chat")]


def test_tokens_agree_with_transformers_tokenizer(root: Path, tmp_path: Path) -> None:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "marked")
    expected = tokenizer.apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, targets = _sample(root / "marked", tmp_path / "a.jsonl", {"messages": MESSAGES})
    assert tokens.tolist() == expected["input_ids"][:-1]
    assert (targets != IGNORED).long().tolist() == expected["assistant_masks"][1:]
