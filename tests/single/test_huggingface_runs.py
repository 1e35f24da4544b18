"""End-to-end runs of the task `huggingface`: loss curves and exports."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain import cli
from hvdtrain.checkpoint.format import read
from hvdtrain.config import parse
from hvdtrain.data.order import sample_order
from hvdtrain.data.text import Tokenizer
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.process.data import build_data
from hvdtrain.tasks.huggingface_data import IGNORED
from tests.support.job import Finished, Job
from tests.support.runs import CORPUS, environment, forked_train, losses, metrics, start, weights
from tests.support.transformer_directories import (
    CHATML,
    add_template,
    answers,
    chats,
    labeled,
    make,
)

STEPS, GLOBAL, MICRO, CONTEXT, LR, SEED = 8, 12, 2, 24, 2e-3, 1234
COMMON = (
    f"--batch.global_size {GLOBAL} --batch.micro_size {MICRO} --train.duration {STEPS}"
    f" --optim.lr {LR} --schedule.name constant --schedule.warmup_steps 0"
    " --checkpoint.every 4 --eval.every 4 --telemetry.port 0"
)
PRELOAD = "tests.support.loaded_transformers"
# Prompts and texts of different lengths: padding, and different token counts per micro-batch.
TARGETS = {
    "llama": f"--huggingface.context {CONTEXT} --data.train {CORPUS}",
    "gpt2": "--huggingface.learn answers --data.train {root}/answers.jsonl --lora.rank 4",
    "bert": "--huggingface.learn labels --data.train {root}/labeled.jsonl",
    "chat": "--huggingface.pack true --data.train {root}/chats.jsonl",
}


def _flags(root: Path, layout: str) -> list[str]:
    targets = TARGETS[layout].format(root=root)
    model = f"--task huggingface --huggingface.model {root / layout}"
    return f"{model} {targets} {COMMON} --run.root {root}".split()


def _run(root: Path, flags: Sequence[str], launcher: str) -> Finished:
    command = forked_train(int(launcher.partition(":")[2] or 1), PRELOAD)
    return start(root / "output", flags, launcher, command=command).wait(180)


def _train(root: Path, layout: str, name: str, launcher: str = "", *more: str) -> Path:
    flags = [*_flags(root, layout), "--run.id", name, *more]
    done = _run(root, flags, launcher)
    assert done.returncode == 0, done
    (root / f"{name}.stdout").write_text(done.stdout)
    return root / name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of models, and for each a run of one rank, alone-LAYOUT."""
    root = tmp_path_factory.mktemp("huggingface")
    answers(root / "answers.jsonl")
    labeled(root / "labeled.jsonl")
    chats(root / "chats.jsonl")
    for layout in ("llama", "gpt2", "bert"):
        make(root / layout, layout)
    add_template(make(root / "chat", "llama", max_position_embeddings=128))
    for layout in TARGETS:
        _train(root, layout, f"alone-{layout}")
    return root


def _assert_same_curve(directory: Path, alone: Path) -> None:
    assert losses(directory) == pytest.approx(losses(alone), rel=1e-5)
    for line, expected in zip(metrics(directory), metrics(alone), strict=True):
        for key in {"accuracy", "validation_loss", "validation_accuracy"} & expected.keys():
            assert line[key] == pytest.approx(expected[key], rel=1e-5), key


def _plain(root: Path, layout: str, steps: Iterable[list[tuple[dict[str, Any], float]]]) -> Any:
    """Return the losses of a transformers loop, with gradients clipped as by default.

    Args:
        steps: inputs of the model for each micro-batch of a step, and the weight of its loss.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(root / layout, dtype=torch.float32)
    model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optim = parse(["--config", str(root / f"alone-{layout}/config.yaml")]).config.optim
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=optim.betas)
    found = []
    for micro_batches in steps:
        optimizer.zero_grad()
        total = 0.0
        for inputs, weight in micro_batches:
            loss = model(**inputs).loss * weight
            loss.backward()
            total += loss.item()
        found.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        optimizer.step()
    return found


def test_losses_match_plain_transformers_loop(root: Path) -> None:
    settings = parse(["--config", str(root / "alone-llama/config.yaml")])
    _, datasets = build_data(settings)
    windows = datasets.train
    assert isinstance(windows, TokenWindows)

    def batches(step: int) -> Iterator[tuple[dict[str, Any], float]]:
        indices = sample_order(step * GLOBAL, (step + 1) * GLOBAL, len(windows), SEED)
        for micro_batch in indices.reshape(-1, MICRO):
            # transformers shifts labels itself, so the last token is only a label.
            tokens = torch.stack([windows[i] for i in micro_batch])
            yield {"input_ids": tokens, "labels": tokens}, MICRO / GLOBAL

    found = losses(root / "alone-llama")
    steps = (list(batches(step)) for step in range(STEPS))
    assert found == pytest.approx(_plain(root, "llama", steps), rel=1e-5)
    assert found[-1] < 0.98 * found[0], "it learns nothing"


def test_packed_chats_match_plain_loop_over_single_chats(root: Path) -> None:
    import transformers

    _, datasets = build_data(parse(["--config", str(root / "alone-chat/config.yaml")]))
    packed: Any = datasets.train
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "chat")
    turn = "{{ m.content }}<|im_end|>{{ '\\n' }}"
    marks = f"{{% generation %}}{turn}{{% endgeneration %}}"
    marked = CHATML.replace(
        "{{ m.content }}<|im_end|>\n",
        f"{{% if m.role == 'assistant' %}}{marks}{{% else %}}{turn}{{% endif %}}",
    )

    def inputs(index: int) -> dict[str, Any]:
        """Inputs for one chat, with labels that transformers makes from a template with marks."""
        line = packed._answers._lines[index].content
        found = tokenizer.apply_chat_template(
            line["messages"],
            chat_template=marked,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        tokens, mask = (torch.tensor([found[key]]) for key in ("input_ids", "assistant_masks"))
        assert tokens.tolist() == [tokenizer.apply_chat_template(line["messages"])["input_ids"]]
        return {"input_ids": tokens, "labels": tokens.where(mask.bool(), IGNORED)}

    def batches(step: int) -> list[tuple[dict[str, Any], float]]:
        indices = sample_order(step * GLOBAL, (step + 1) * GLOBAL, len(packed), SEED)
        found = [inputs(line) for index in indices for line in packed._samples[index]]
        counts = [int((one["labels"] != IGNORED).sum()) for one in found]
        return [(one, count / sum(counts)) for one, count in zip(found, counts, strict=True)]

    found = losses(root / "alone-chat")
    steps = (batches(step) for step in range(STEPS))
    assert found == pytest.approx(_plain(root, "chat", steps), rel=1e-5)
    assert found[-1] < 0.98 * found[0], "it learns nothing"


@pytest.mark.parametrize(
    ("layout", "launcher"), [("llama", "gloo:2"), ("bert", "gloo:3"), ("chat", "gloo:2")]
)
def test_loss_curve_is_independent_of_world_size(root: Path, layout: str, launcher: str) -> None:
    directory = _train(root, layout, f"ranks-{layout}", launcher)
    _assert_same_curve(directory, root / f"alone-{layout}")


def test_lora_loss_curve_is_unchanged_after_rank_is_killed(root: Path) -> None:
    (root / "hosts").write_text("localhost:3\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 3 --min-np 1 --max-np 3 --network-interfaces lo"
        f" --host-discovery-script 'cat {root}/hosts'"
    )
    task = [
        "--task",
        "tests.support.transformer_directories:KilledHuggingFace",
        "--run.id",
        "killed",
    ]
    env = environment({"HVDTRAIN_TEST_KILL": "2:7"})  # of 2 micro-batches in each step
    command = [*launcher, *forked_train(3, PRELOAD), *_flags(root, "gpt2"), *task]
    done = Job([], command, env, root / "killed-job").wait(180)
    assert done.returncode == 0, done
    _assert_same_curve(root / "killed", root / "alone-gpt2")
    events = [json.loads(line) for line in (root / "killed/events.jsonl").read_text().splitlines()]
    causes = [event["cause"] for event in events if event["event"] == "start"]
    assert "failure" in causes, done


def test_resumed_run_is_bitwise_identical(root: Path) -> None:
    alone = root / "alone-gpt2"
    checkpoint = alone / "checkpoints/step_00000004"
    again = _train(root, "gpt2", "again", "", "--run.resume", str(checkpoint))
    assert losses(again) == losses(alone)[4:]
    assert weights(again, STEPS) == weights(alone, STEPS)


def _export(root: Path, name: str, *more: str) -> Path:
    out = root / "-".join(["exported", name, *(word.strip("-") for word in more)])
    arguments = ["ckpt", "export", str(root / name), "--out", str(out), "--format", "huggingface"]
    assert cli.main([*arguments, *more]) == 0
    return out


def _trained(root: Path, name: str) -> Any:
    """Return the model of the run's last checkpoint, in eval mode."""
    settings = parse(["--config", str(root / name / "config.yaml")])
    task, _ = build_data(settings)
    model = task.model()
    saved = read(root / name / f"checkpoints/step_{STEPS:08}").parts["model"]
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert saved.keys() <= tensors.keys()
    for key, tensor in saved.items():
        tensors[key].data.copy_(tensor)
    return model.eval()


TOKENS = torch.arange(3, 43).reshape(2, 20)


@torch.no_grad()
def test_export_preserves_model_and_tokenizer(root: Path) -> None:
    import transformers

    out = _export(root, "alone-llama")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.use_cache and model.generation_config.eos_token_id == 1
    expected = _trained(root, "alone-llama")(input_ids=TOKENS).logits
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("the work").input_ids[0] == 0 and tokenizer.eos_token == "</s>"


@torch.no_grad()
def test_exported_classifier_keeps_label_names(root: Path) -> None:
    import transformers

    out = _export(root, "alone-bert")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.id2label == {0: "no", 1: "yes"}
    expected = _trained(root, "alone-bert")(input_ids=TOKENS).logits
    torch.testing.assert_close(model(input_ids=TOKENS).logits, expected)
    assert "'Work" in (root / "alone-bert.stdout").read_text()
    assert metrics(root / "alone-bert")[-1]["validation_accuracy"] >= 0


@torch.no_grad()
def test_lora_trains_and_exports_only_adapters(root: Path) -> None:
    import peft
    import transformers
    from safetensors.torch import load_file

    ours = _trained(root, "alone-gpt2")
    expected = ours(input_ids=TOKENS).logits
    base = transformers.AutoModelForCausalLM.from_pretrained(root / "gpt2", dtype=torch.float32)
    before = base(input_ids=TOKENS).logits
    assert (before - expected).abs().max() > 1e-3, "the adapters have not changed"
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    frozen = dict(ours.get_base_model().named_parameters())
    for name, tensor in base.named_parameters():
        assert any(torch.equal(tensor, frozen[n]) for n in (name, _inner(name)) if n in frozen)
    out = _export(root, "alone-gpt2")
    adapters = load_file(out / "adapter_model.safetensors")
    assert adapters and all("lora_" in name for name in adapters)
    adapted = peft.PeftModel.from_pretrained(base, out).eval()
    torch.testing.assert_close(adapted(input_ids=TOKENS).logits, expected)
    facts = json.loads((out / "adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == str(root / "gpt2")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        _export(root, "alone-gpt2", "--merge")
    )
    torch.testing.assert_close(
        merged.eval()(input_ids=TOKENS).logits, expected, atol=1e-5, rtol=1e-4
    )


def _inner(name: str) -> str:
    """Return the inner layer of a layer with an adapter."""
    module, _, last = name.rpartition(".")
    return f"{module}.base_layer.{last}"


def test_invalid_data_line_is_reported_once_across_ranks(root: Path) -> None:
    lines = (root / "answers.jsonl").read_text().splitlines()
    bad = root / "bad.jsonl"
    bad.write_text("\n".join([*lines[:4], '{"prompt": "x"}', *lines[5:]]))
    flags = [*_flags(root, "gpt2"), "--run.id", "bad", "--data.train", str(bad)]
    done = _run(root, flags, "mpirun:2")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert done.stderr.count(f"{bad}: line 5: no key 'answer', only prompt;") == 1, done


def test_chats_without_template_end_before_a_run_directory(root: Path) -> None:
    flags = [*_flags(root, "chat"), "--huggingface.model", str(root / "llama"), "--run.id", "none"]
    done = _run(root, flags, "mpirun:2")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert done.stderr.count("has no chat template (chat_template.jinja, or") == 1, done
    assert not (root / "none").exists()


# --- generate ----------------------------------------------------------------


def _generated(capsys: pytest.CaptureFixture[str], directory: Path, *flags: str) -> str:
    capsys.readouterr()
    command = ["generate", str(directory), "--prompt", "the work", "--length", "12", *flags]
    assert cli.main(command) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_generate_answers_with_chat_template(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import transformers

    out = _export(root, "alone-chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    user = [{"role": "user", "content": "the work"}]
    prompt = tokenizer.apply_chat_template(user, add_generation_prompt=True, return_tensors="pt")
    ends = [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    written = model.generate(**prompt, max_new_tokens=12, do_sample=False, eos_token_id=ends)
    answer = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(answer) > 2
    assert _generated(capsys, root / "alone-chat", "--temperature", "0") == answer
    hot = ("--temperature", "3", "--seed")
    drawn = [_generated(capsys, root / "alone-chat", *hot, seed) for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generate_continues_prompt_with_adapters(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _trained(root, "alone-gpt2")
    tokenizer = Tokenizer(str(root / "gpt2/tokenizer.json"))
    tokens = torch.tensor([tokenizer.ids("the work")])
    written = model.generate(input_ids=tokens, max_new_tokens=12, do_sample=False)
    expected = tokenizer.decode(written[0].tolist())
    assert _generated(capsys, root / "alone-gpt2", "--temperature", "0") == expected
    assert expected.startswith("the work") and len(expected) > 10


def test_generate_is_rejected_for_classifier(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(root / "alone-bert"), "--prompt", "a"]) == 2
    assert "trains a classifier, which writes no text" in capsys.readouterr().err


def test_merge_is_rejected_for_run_without_adapters(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ckpt", "export", str(root / "alone-llama"), "--out", str(root / "no"), "--merge"]
    for name in ("hvdtrain", "huggingface"):
        assert cli.main([*command, "--format", name]) == 2
        assert "--merge is for runs of the task huggingface with LoRA" in capsys.readouterr().err
    assert not (root / "no").exists()
