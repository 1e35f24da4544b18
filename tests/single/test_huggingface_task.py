"""The task `huggingface` without a run: loss masks, labels, and errors in models and data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from torch import nn
from torch.overrides import TorchFunctionMode

from hvdtrain.config import parse
from hvdtrain.data.text import Tokenizer
from hvdtrain.engine.config import MemoryConfig
from hvdtrain.engine.memory import arrange_activations
from hvdtrain.errors import UserError
from hvdtrain.optim.precision import to_bfloat16
from hvdtrain.process.data import build_data
from hvdtrain.runtime.device import seed_all
from hvdtrain.tasks import blocks_of
from hvdtrain.tasks.huggingface import HuggingFace
from tests.support.runs import CORPUS, REPOSITORY
from tests.support.transformer_directories import (
    POSITIONS,
    answers,
    labeled,
    make,
    write,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("directories")
    for layout in ("llama", "gpt2", "bert"):
        make(root / layout, layout)
    make(root / "judge", "llama", "LlamaForSequenceClassification")
    answers(root / "answers.jsonl")
    labeled(root / "labeled.jsonl")
    return root


def _task(directory: Path, learn: str = "text", data: Path = CORPUS, **keys: Any) -> HuggingFace:
    """Return a task whose data is already loaded."""
    flags = {
        "task": "huggingface",
        "huggingface.model": directory,
        "huggingface.learn": learn,
        "data.train": data,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    task, _ = build_data(parse([f"--{key}={value}" for key, value in flags.items()]))
    assert isinstance(task, HuggingFace)
    return task


def _data(task: HuggingFace) -> Any:
    assert task._data is not None
    return task._data.datasets.train


def _loss(task: HuggingFace, model: nn.Module, samples: list[Any]) -> tuple[float, int]:
    total, count = task.loss(model, task.collate(samples))["loss"]
    return float(total.detach()), int(count)


# --- training targets ------------------------------------------------------------


@torch.no_grad()
def test_answer_loss_excludes_prompt_and_padding(root: Path) -> None:
    task = _task(root / "llama", "answers", root / "answers.jsonl")
    model, data = task.model().eval(), _data(task)
    samples = [data[i] for i in range(5)]
    assert len({int((targets >= 0).sum()) for _, targets in samples}) > 1
    expected, tokens_of_answers = 0.0, 0
    for index in range(5):
        line = data._lines[index].content
        tokenizer = data.tokens.tokenizer
        prompt = tokenizer.ids(line["prompt"])
        answer = [*tokenizer.ids(line["answer"], special=False), 1]
        assert prompt[0] == 0, "the prompt does not begin as the tokenizer says"
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        scores = logits.log_softmax(-1)
        for at, token in enumerate(answer, start=len(prompt) - 1):
            expected -= float(scores[at, token])
        tokens_of_answers += len(answer)
    found, count = _loss(task, model, samples)
    assert count == tokens_of_answers
    assert found == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("directory", ["bert", "judge"])
def test_classification_loss_is_independent_of_padding(root: Path, directory: str) -> None:
    task = _task(root / directory, "labels", root / "labeled.jsonl")
    model, data = task.model().eval(), _data(task)
    samples = sorted((data[i] for i in range(6)), key=lambda sample: sample[1])
    assert samples[0][1] < samples[-1][1]
    one_by_one = [_loss(task, model, [sample]) for sample in samples]
    found, count = _loss(task, model, samples)
    assert count == 6 and found == pytest.approx(sum(loss for loss, _ in one_by_one), rel=1e-5)


class _HeadsOfKeys(TorchFunctionMode):
    """Record, for each call of torch's attention, the heads of the keys and `enable_gqa`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, bool]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            self.found.add((args[1].shape[1], bool(kwargs.get("enable_gqa"))))
        return func(*args, **(kwargs or {}))


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_repeated_for_kernels_that_do_not_share_them(
    root: Path, monkeypatch: pytest.MonkeyPatch, masked: bool
) -> None:
    model = _task(root / "llama").model().eval()
    tokens = torch.arange(3, 35).view(2, 16)
    seen = torch.ones(2, 16, dtype=torch.int64)
    seen[0, :3] = 0
    found = []
    for shared in (True, False):  # False: as float32 on CUDA
        monkeypatch.setattr("hvdtrain.tasks.huggingface_model.shares_heads", lambda q, s=shared: s)
        with _HeadsOfKeys() as calls:
            logits = model(input_ids=tokens, attention_mask=seen if masked else None).logits
        found.append((logits, calls.found))
    (expected, with_shared), (repeated, with_repeated) = found
    torch.testing.assert_close(repeated, expected)
    assert with_repeated == {(4, False)}
    assert with_shared == ({(4, False)} if masked else {(2, True)})


def test_dropout_is_active_in_training_only(root: Path) -> None:
    for rank in (0, 4):
        task = _task(root / "gpt2", lora__rank=rank)
        model, samples = task.model(), [_data(task)[0]]
        assert all(module.training for module in model.modules())
        assert _loss(task, model, samples) != _loss(task, model, samples)
        model.eval()
        assert _loss(task, model, samples) == _loss(task, model, samples)


def test_weights_are_loaded_and_stay_tied_or_are_random_if_missing(
    root: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    saved = load_file(root / "gpt2/model.safetensors")
    seed_all(1)
    loaded = _task(root / "gpt2").model()
    shutil.copytree(
        root / "gpt2", tmp_path / "gpt2", ignore=shutil.ignore_patterns("*.safetensors")
    )
    fresh = _task(tmp_path / "gpt2").model()
    name = "transformer.wte.weight"
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == saved.keys() and "lm_head.weight" not in parameters
    assert all(torch.equal(parameters[key], tensor) for key, tensor in saved.items())
    assert not torch.equal(dict(fresh.named_parameters())[name], saved[name])


@pytest.mark.parametrize("keep", ["blocks", "selective"])
def test_activation_checkpointing_keeps_gradients_identical(root: Path, keep: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        task = _task(root / "gpt2", lora__rank=2)
        seed_all(1)
        model = task.model()
        blocks, calls = blocks_of(task, model), [0]
        assert len(blocks) == 2

        def count(*_: object, calls: list[int] = calls) -> None:
            calls[0] += 1

        norm = next(m for m in blocks[0].modules() if isinstance(m, nn.LayerNorm))
        norm.register_forward_pre_hook(count)
        if checkpointed:
            config = MemoryConfig(checkpoint_activations=keep)
            arrange_activations(config, task, model, torch.device("cpu"))
        seed_all(2)
        task.loss(model, task.collate([_data(task)[0]]))["loss"][0].backward()
        assert calls == [2 if checkpointed else 1], "the block is computed again in backward"
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for own, other in zip(*gradients, strict=True):
        assert own is not None and torch.equal(own, other)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_bfloat16_loss_is_close_to_float32(root: Path, kind: str) -> None:
    learn, data = ("text", CORPUS) if kind == "llama" else ("labels", root / "labeled.jsonl")
    task = _task(root / kind, learn, data)
    model, samples = task.model(), [_data(task)[i] for i in range(4)]
    expected, _ = _loss(task, model, samples)
    for parameters in (False, True):
        if parameters:
            to_bfloat16(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert _loss(task, model, samples)[0] == pytest.approx(expected, rel=0.01)


def test_sampling_is_repeatable_and_preserves_rng_state(root: Path) -> None:
    for directory, learn in (("llama", "text"), ("gpt2", "answers"), ("bert", "labels")):
        data = {"answers": root / "answers.jsonl", "labels": root / "labeled.jsonl"}
        task = _task(root / directory, learn, data.get(learn, CORPUS))
        model = task.model().eval()
        state = torch.get_rng_state()
        shown = task.sample(model)
        assert len(shown) > 10 and shown == task.sample(model)
        assert torch.equal(state, torch.get_rng_state())


# --- labels --------------------------------------------------------------------


def test_label_ids_follow_model_or_configured_order(root: Path, tmp_path: Path) -> None:
    rows = [{"text": f"word {n}", "label": ["b", "a", "c"][n % 3]} for n in range(12)]
    data = write(tmp_path / "rows.jsonl", rows)
    task = _task(root / "bert", "labels", data)
    assert _data(task).labels == ("a", "b", "c") and task.model().config.num_labels == 3
    named = _task(root / "bert", "labels", data, huggingface__labels=["c", "b", "a", "d"])
    assert _data(named).labels == ("c", "b", "a", "d") and named.model().config.num_labels == 4
    names = {0: "c", 1: "a", 2: "b"}
    kind = "BertForSequenceClassification"
    directory = make(tmp_path / "trained", "bert", kind, id2label=names)
    assert _data(_task(directory, "labels", data)).labels == ("c", "a", "b")
    numbers = write(tmp_path / "n.jsonl", [{"text": "x", "label": n % 3} for n in range(9)])
    numbered = _data(_task(directory, "labels", numbers))
    assert {numbered[i][2] for i in range(len(numbered))} <= {0, 1, 2}
    wrong = write(tmp_path / "w.jsonl", [{"text": "x", "label": 7}] * 4)
    with pytest.raises(
        UserError, match=r"w.jsonl: line \d: label 7 is not one of the model's labels: c, a, b"
    ):
        _data(_task(directory, "labels", wrong))[0]


# --- errors in a line ---------------------------------------------------

LINES = {
    "no JSON": ("{", r"is not a JSON object \(Expecting"),
    "no object": ("[1]", r"is not a JSON object \(it is a list"),
    "no key": ({"prompt": "a", "reply": "b"}, "no key 'answer', only prompt, reply; set hugg"),
    "no text": ({"prompt": "a", "answer": 3}, "'answer' is not text, but 3"),
    "too long": ({"prompt": "a", "answer": "b" * 99}, r"\d+ tokens exceed huggingface.con"),
}


@pytest.mark.parametrize("case", LINES)
def test_invalid_data_line_is_reported_with_line_number(
    root: Path, tmp_path: Path, case: str
) -> None:
    row, message = LINES[case]
    good = {"prompt": "a", "answer": "b"}
    data = write(tmp_path / "data.jsonl", [good, "", row, "", row])
    wrong = _data(_task(root / "gpt2", "answers", data, data__validation=data))
    for index in (1, 2):
        with pytest.raises(UserError, match=rf"data.jsonl: line {2 * index + 1}:? {message}"):
            wrong[index]


@pytest.mark.parametrize(("directory", "learn"), [("gpt2", "answers"), ("bert", "labels")])
def test_lengths_match_samples(root: Path, directory: str, learn: str) -> None:
    lines = root / {"answers": "answers.jsonl", "labels": "labeled.jsonl"}[learn]
    data = _data(_task(root / directory, learn, lines))
    samples = [data[index] for index in range(len(data))]
    if learn == "answers":  # the last target is at the position of the last token
        used = [int((targets >= 0).nonzero().max()) + 1 for _, targets in samples]
    else:
        used = [length for _, length, _ in samples]
    assert data.lengths().tolist() == used and len(set(used)) > 1


def test_truncation_keeps_answer_tokens_and_final_separator(root: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b" * 99}, {"prompt": "a" * 99, "answer": "b"}]
    data, truncate = write(tmp_path / "data.jsonl", rows * 2), {"huggingface__truncate": "true"}
    cut = _data(_task(root / "gpt2", "answers", data, data__validation=data, **truncate))
    tokens, targets = cut[0]
    assert len(tokens) == POSITIONS and targets[-1] >= 0
    with pytest.raises(UserError, match=r"data.jsonl: line 2: no token to train on remains"):
        cut[1]
    texts = write(tmp_path / "t.jsonl", [{"text": "work " * 99, "label": n} for n in (0, 1)] * 2)
    tokens, length, _ = _data(_task(root / "bert", "labels", texts, **truncate))[0]
    assert length == POSITIONS and tokens[-1] == 1, "the last token is not [SEP]"


def test_training_and_validation_lines_are_disjoint(root: Path) -> None:
    task = _task(root / "gpt2", "answers", root / "answers.jsonl", data__validation_fraction=0.1)
    assert task._data is not None
    parts = task._data.datasets
    places = [{part._lines[i].where for i in range(len(part))} for part in parts[:2]]  # type: ignore[union-attr,arg-type]
    assert [len(part) for part in places] == [54, 6] and not places[0] & places[1]


# --- errors in a directory ---------------------------------------------------


def _changed(directory: Path, **facts: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def _pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def _sharded(directory: Path) -> None:
    names = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(names))


def _half(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])


def _without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def _with(name: str, content: str) -> Callable[[Path], None]:
    return lambda directory: _write(directory / name, content)


def _write(path: Path, content: str) -> None:
    path.write_text(content)


def _where(**facts: Any) -> Callable[[Path], None]:
    return lambda directory: _changed(directory, **facts)


OWN_CODE = {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}
DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (_without("config.json"), "has no config.json$"),
    "no JSON": (_with("config.json", "{"), "config.json: Expecting property"),
    "unknown": (_where(model_type="bogus"), "config.json: .*bogus"),
    "an image's": (_where(model_type="vit"), "is a 'vit' model, and .* no causal language model"),
    "own code": (_where(**OWN_CODE), r"requires its own code \(auto_map in"),
    "quantized": (_where(quantization_config={}), "are quantized, and cannot"),
    "no tokenizer": (_without("tokenizer.json"), "has no tokenizer.json: name one"),
    "pickled": (_pickled, "has no model.safetensors; pytorch_model.bin is a pickle, which can run"),
    "a shard": (_sharded, "has no model-2.safetensors$"),
    "half": (_half, "huggingface.model: .*llama: "),
    "adapters": (_with("adapter_config.json", "{}"), "has adapters in addition to"),
    "vocabulary": (_where(vocab_size=300), "has 310 tokens, but the model in .* knows 300"),
    "layers": (_where(num_hidden_layers=3), r"do not match its config.json: missing"),
    "width": (_where(intermediate_size=32), r"of another shape: model.layers.0"),
}


@pytest.mark.parametrize("case", DIRECTORIES)
def test_unusable_model_directory_is_rejected(tmp_path: Path, case: str) -> None:
    directory = make(tmp_path / "llama", "llama")
    damage, message = DIRECTORIES[case]
    damage(directory)
    with pytest.raises(UserError, match=f"{message}"):
        _task(directory).model()


def test_bidirectional_model_is_rejected_for_language_modeling(root: Path) -> None:
    with pytest.raises(UserError, match="BertLMHeadModel attends to the tokens that"):
        _task(root / "bert").model()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"huggingface__model": "nowhere"}, "no directory nowhere .* nothing is downloaded"),
        ({"huggingface__context": POSITIONS + 1}, f"has {POSITIONS} positions"),
        (
            {"huggingface__learn": "answers", "data__source": "tokens"},
            "needs data.train, files of JSON",
        ),
        ({"lora__rank": 2, "lora__targets": ["nothing"]}, "^lora.targets: .*nothing"),
    ],
)
def test_invalid_configuration_key_is_rejected(
    root: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _task(root / "llama", **keys).model()


def test_token_dtype_fits_vocabulary_with_gaps(tmp_path: Path) -> None:
    tokenizer = Library(WordLevel({"a": 0, "b": 300}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer(str(tmp_path / "tokenizer.json")).encode(b"b")
    assert found.tolist() == [300] and found.dtype == "uint16"


def test_roberta_context_excludes_reserved_positions(tmp_path: Path) -> None:
    directory = make(tmp_path / "bert", "bert")
    _changed(directory, model_type="roberta", pad_token_id=1)
    with pytest.raises(UserError, match=f"has {POSITIONS - 2} positions"):
        _task(directory, "labels", labeled(tmp_path / "l.jsonl"), huggingface__context=POSITIONS)


@pytest.mark.slow
def test_huggingface_hub_is_always_offline() -> None:
    program = (
        "from hvdtrain.tasks.huggingface_model import library\n"
        "library()\n"
        "from huggingface_hub import constants\n"
        "assert constants.is_offline_mode()\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=env, check=True, timeout=60)
