"""run.init_from: a run that starts from pretrained weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hvdtrain import cli
from hvdtrain.checkpoint.format import Checkpoint, read, write
from hvdtrain.checkpoint.layout import DamagedError
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.huggingface import from_huggingface, to_huggingface
from hvdtrain.process.initial_weights import load_initial_weights
from hvdtrain.runtime.tensor_shards import model_tensors
from tests.support.runs import TINY, metrics, run, train

SIZES = GPTConfig(layers=2, heads=2, width=16, context=8, vocab_size=11, positions="learned")
LLAMA: dict[str, object] = {
    "positions": "rotary", "norm": "rms", "mlp": "swiglu", "mlp_width": 24, "bias": False,
    "heads": 4, "kv_heads": 2,
}  # fmt: skip


def _model(seed: int, **sizes: object) -> GPT:
    torch.manual_seed(seed)
    model = GPT(replace(SIZES, **sizes))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))  # biases and norms differ then, too
    return model


def _saved(model: GPT) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model_tensors(model).items()}


def _assert_weights(model: GPT, expected: GPT) -> None:
    theirs = model_tensors(expected)
    for name, tensor in model_tensors(model).items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("kind", ["file", "directory", "checkpoint", "run"])
def test_init_from_loads_hvdtrain_weights(tmp_path: Path, kind: str) -> None:
    trained, fresh = _model(1), _model(2)
    path = tmp_path / "model.safetensors"
    if kind in ("checkpoint", "run"):
        parts = {"model": _saved(trained), "optimizer": {"x/step": torch.tensor(3.0)}}
        path = write(tmp_path / "checkpoints", Checkpoint(parts, {"step": 4}))
    else:
        save_file(_saved(trained), path)
    load_initial_weights(
        fresh, str(tmp_path if kind in ("directory", "run") else path), strict=True
    )
    _assert_weights(fresh, trained)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["gpt2", "llama"])
def test_huggingface_export_round_trips_through_init_from(
    tmp_path: Path, layout: str, tied: bool
) -> None:
    sizes = {"tied_embeddings": tied, **(LLAMA if layout == "llama" else {})}
    trained, fresh = _model(1, **sizes), _model(2, **sizes)
    facts, tensors = to_huggingface(trained.config, _saved(trained))
    (tmp_path / "config.json").write_text(json.dumps(facts))
    save_file(tensors, tmp_path / "model.safetensors")
    load_initial_weights(fresh, str(tmp_path), strict=True)
    _assert_weights(fresh, trained)
    # As the first versions were saved: without the prefix, with derived tensors.
    prefix, more = {
        "gpt2": ("transformer.", "h.0.attn.bias"),
        "llama": ("model.", "layers.0.self_attn.rotary_emb.inv_freq"),
    }[layout]
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    bare[more] = torch.ones(1, 1, 8, 8)
    assert from_huggingface(trained.config, facts, bare).keys() == _saved(trained).keys()


@pytest.mark.parametrize("layout", ["gpt2", "llama"])
def test_init_from_transformers_model_keeps_logits(tmp_path: Path, layout: str) -> None:
    import transformers  # takes seconds

    if layout == "gpt2":
        sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 11}
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
        ours = _model(2)
    else:
        config = transformers.LlamaConfig(
            vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, rope_theta=1000.0,
        )  # fmt: skip
        theirs = transformers.LlamaForCausalLM(config).eval()
        sizes = {"heads": 4, "rotary_base": 1000.0, "norm_eps": 1e-6, "tied_embeddings": False}
        ours = _model(2, **(LLAMA | sizes))
    theirs.save_pretrained(tmp_path, max_shard_size="4KB" if layout == "llama" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (layout == "llama")
    load_initial_weights(ours, str(tmp_path), strict=True)
    tokens = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_mismatched_weights_are_listed_and_skipped_if_not_strict(tmp_path: Path) -> None:
    trained, fresh = _model(1, width=32), _model(2)
    own = _saved(fresh)
    found = _saved(trained)
    found["norm.weight"] = own["norm.weight"] + 1
    del found["norm.bias"]
    found["extra"] = torch.ones(2)
    path = tmp_path / "model.safetensors"
    save_file(found, path)
    with pytest.raises(UserError) as caught:
        load_initial_weights(fresh, str(path), strict=True)
    said = str(caught.value)
    assert "1 missing (norm.bias); 1 unexpected (extra); 34 of another shape (" in said, said
    assert "embedding.weight [11, 32] instead of [11, 16]" not in said  # the first 8 by name
    assert "and 26 more" in said and "run.init_strict false" in said
    load_initial_weights(fresh, str(path), strict=False)
    now = _saved(fresh)
    changed = {name for name in own if not torch.equal(own[name], now[name])}
    assert changed == {"norm.weight"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nothing", "there is no such file or directory"),
        (
            "empty directory",
            "a run, a checkpoint, or a directory with model.safetensors, of ",
        ),
        ("empty run", "this run has no finished checkpoint"),
        ("pickle", "a file of weights ends with .safetensors"),
        ("torn", "is not a complete safetensors file"),
        ("other layout", "config.json has the layout of 'bert'"),
        ("other heads", "n_head is 4 in config.json, and model.heads is 2"),
        ("other angles", "model.norm_eps is 1e-05; rope_theta is 5.* rope_type is llama3 in"),
        ("alien", "36 missing .*nothing is left to load"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_init_from_rejects_source_without_usable_weights(
    tmp_path: Path, content: str, message: str, strict: bool
) -> None:
    path = tmp_path / "there"
    if content != "nothing":
        path.mkdir()
    if content == "empty run":
        (path / "checkpoints").mkdir()
    elif content in ("pickle", "torn"):
        path = path / ("model.bin" if content == "pickle" else "model.safetensors")
        save_file(_saved(_model(1)), path)
        path.write_bytes(path.read_bytes()[:-100])
    elif content in ("other layout", "other heads", "other angles", "alien"):
        save_file({"a": torch.ones(1)}, path / "model.safetensors")
        rope = {"rope_type": "llama3", "rope_theta": 5.0}
        facts = {
            "other layout": {"model_type": "bert"},
            "other heads": {"model_type": "gpt2", "n_head": 4},
            "other angles": {"model_type": "llama", "rope_parameters": rope},
            "alien": {},
        }[content]
        (path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=message):
        load_initial_weights(_model(1), str(path), strict)


def test_init_from_rejects_corrupted_weights(tmp_path: Path) -> None:
    directory = write(
        tmp_path / "checkpoints", Checkpoint({"model": _saved(_model(1))}, {"step": 4})
    )
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"run.init_from: .*model.safetensors was altered"):
        load_initial_weights(_model(1), str(directory), strict=True)
    with pytest.raises(DamagedError):
        read(directory)


@pytest.mark.slow
def test_all_ranks_start_from_initial_weights_and_resume_ignores_them(tmp_path: Path) -> None:
    first = train(tmp_path, "first", ["--train.duration", "20", "--optim.lr", "0.01"])
    exported = tmp_path / "exported"
    assert cli.main(["ckpt", "export", str(first), "--out", str(exported)]) == 0
    curves = []
    for name, source, launcher in (("one", first, ""), ("two", exported, "gloo:2")):
        flags = ["--train.duration", "6", "--run.init_from", str(source), "--checkpoint.every", "3"]
        directory = train(tmp_path, name, flags, launcher)
        curves.append([line["loss"] for line in metrics(directory)])
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-5, atol=0)
    assert curves[0][0] < metrics(first)[0]["loss"] - 0.5, "it began with fresh weights"
    again = ["--train.duration", "8", "--run.init_from", "/not/there"]
    directory = train(tmp_path, "one", again)
    assert [line["step"] for line in metrics(directory)] == list(range(1, 9))
    where = ["--run.root", str(tmp_path), "--run.id", "new"]
    done = run(tmp_path / "output", [*TINY, *where, "--run.init_from", "/not/there"], "gloo:2")
    assert done.returncode == 2, done
    said = (done.stdout + done.stderr).count("hvdtrain: error: run.init_from: /not/there: there")
    assert said == 1 and "Traceback" not in done.stderr, done
