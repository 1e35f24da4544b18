"""Weights to and from other programs: Hugging Face, DCP, torchtitan, Megatron-LM."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from hvdtrain import cli
from hvdtrain.checkpoint.format import read
from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.name_tables import to_gpt_names
from hvdtrain.process.initial_weights import load_initial_weights
from hvdtrain.runtime.tensor_shards import model_tensors
from tests.support.runs import REPOSITORY, train

LLAMA = GPTConfig(
    layers=2, heads=4, kv_heads=2, width=16, context=8, vocab_size=11, norm="rms", mlp="swiglu",
    mlp_width=24, bias=False, tied_embeddings=False,
)  # fmt: skip
GPT2 = GPTConfig(layers=2, heads=2, width=16, context=8, vocab_size=11, positions="learned")


def _model(config: GPTConfig, seed: int = 1) -> GPT:
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))  # biases and norms differ then, too
    return model


def _assert_loads(path: Path, expected: GPT) -> None:
    fresh = _model(expected.config, seed=2)
    load_initial_weights(fresh, str(path), strict=True)
    theirs = model_tensors(expected)
    for name, tensor in model_tensors(fresh).items():
        assert torch.equal(tensor, theirs[name]), name


# --- export -------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ["--train.duration", "2", "--checkpoint.every", "2", "--model.layers", "2"]
    return train(tmp_path_factory.mktemp("runs"), "run", flags)


def _export(run: Path, out: Path, *flags: str) -> int:
    return cli.main(["ckpt", "export", str(run), "--out", str(out), *flags])


def _trained(run: Path) -> dict[str, dict[str, Tensor]]:
    return read(run / "checkpoints/step_00000002").parts


def test_sharded_huggingface_export_loads_in_transformers(run: Path, tmp_path: Path) -> None:
    import transformers  # takes seconds

    out = tmp_path / "out"
    assert _export(run, out, "--format", "huggingface", "--max-shard-size", "40KB") == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    for name in files:
        with safe_open(out / name, "pt") as file:
            assert len(file.keys()) == 1 or (out / name).stat().st_size < 42_000
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    parts = _trained(run)
    vocabulary = parts["model"]["embedding.weight"].shape[0]
    ours = GPT(GPTConfig(layers=2, heads=2, width=32, context=32, vocab_size=vocabulary)).eval()
    ours.load_state_dict(parts["model"])
    tokens = torch.randint(vocabulary, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_sharded_export_is_read_by_init_from(run: Path, tmp_path: Path) -> None:
    assert _export(run, tmp_path / "out", "--max-shard-size", "40KB") == 0
    found = read_weights(tmp_path / "out").tensors
    expected = _trained(run)["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


_PLAIN = """
import sys, torch, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
checkpoint, directory = sys.argv[1:]
expected = load_file(f"{checkpoint}/model.safetensors")
moments = load_file(f"{checkpoint}/optimizer.safetensors")
states = {}
for path in moments:
    name, _, entry = path.rpartition("/")
    states.setdefault(name, {})[entry] = torch.empty_like(moments[path])
state = {"model": {n: torch.empty_like(t) for n, t in expected.items()},
         "optimizer": {"state": states}}
dcp.load(state, checkpoint_id=directory, no_dist=True)
assert all(torch.equal(state["model"][n], t) for n, t in expected.items())
assert all(torch.equal(states[p.rpartition("/")[0]][p.rpartition("/")[2]], t)
           for p, t in moments.items())
assert not [name for name in sys.modules if name.startswith("hvdtrain")]
"""


def test_dcp_export_loads_in_a_plain_process_and_back(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _export(run, out, "--format", "dcp", "--optimizer") == 0
    checkpoint = run / "checkpoints/step_00000002"
    command = [sys.executable, "-c", _PLAIN, str(checkpoint), str(out)]
    subprocess.run(command, check=True, timeout=120, cwd=tmp_path)
    vocabulary = _trained(run)["model"]["embedding.weight"].shape[0]
    expected = GPT(GPTConfig(layers=2, heads=2, width=32, context=32, vocab_size=vocabulary))
    expected.load_state_dict(_trained(run)["model"])
    _assert_loads(out, expected)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--optimizer"], "--optimizer is for --format dcp"),
        (["--format", "dcp", "--max-shard-size", "1GB"], "not for --format dcp"),
        (["--max-shard-size", "5"], "expected a size such as 5GB"),
        (["--format", "dcp", "--merge"], "--merge is for runs of the task huggingface"),
    ],
)
def test_export_options_that_do_not_fit_exit_with_2(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    try:
        code: Any = _export(run, tmp_path / "out", *flags)
    except SystemExit as end:
        code = end.code
    assert code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- torchtitan ---------------------------------------------------------------


def _to_pairs(tensor: Tensor, size: int) -> Tensor:
    """The rows of q or k for rotary positions that turn neighboring channels."""
    order = torch.stack([torch.arange(size // 2), torch.arange(size // 2) + size // 2], 1).flatten()
    return tensor.view(-1, size, tensor.shape[1])[:, order].reshape(tensor.shape)


def _torchtitan(model: GPT) -> dict[str, Tensor]:
    own, size = model_tensors(model), model.config.head_size
    found = {
        "tok_embeddings.weight": own["embedding.weight"],
        "norm.weight": own["norm.weight"],
        "output.weight": own["head.weight"],
    }
    for n in range(model.config.layers):
        there, here = f"layers.{n}", f"blocks.{n}"
        for letter in "qk":
            tensor = own[f"{here}.attention.{letter}.weight"]
            found[f"{there}.attention.w{letter}.weight"] = _to_pairs(tensor, size)
        for theirs, ours in (
            ("attention.wv", "attention.v"), ("attention.wo", "attention.out"),
            ("attention_norm", "norm1"), ("ffn_norm", "norm2"), ("feed_forward.w1", "gate"),
            ("feed_forward.w2", "down"), ("feed_forward.w3", "up"),
        ):  # fmt: skip
            found[f"{there}.{theirs}.weight"] = own[f"{here}.{ours}.weight"]
    return found


@pytest.mark.parametrize("prefix", ["", "model."])
def test_torchtitan_directory_loads_without_its_optimizer(tmp_path: Path, prefix: str) -> None:
    expected = _model(LLAMA)
    weights = {f"{prefix}{name}": t for name, t in _torchtitan(expected).items()}
    more = {
        "optimizer.state.norm.weight.exp_avg": torch.ones(16),
        "train_state": {"step": torch.tensor(3)},
        "lr_scheduler": {"last_epoch": 3},
    }
    dcp.save({**weights, **more}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    _assert_loads(tmp_path / "step-3", expected)


def test_directory_of_torchtitan_itself_gives_its_logits() -> None:
    """torchtitan 0.3.0's Llama 3, saved as its CheckpointManager saves a model."""
    directory = REPOSITORY / "tests/data/torchtitan-0.3.0"
    config = replace(LLAMA, layers=1, vocab_size=16, context=16)
    model = _model(config).eval()
    load_initial_weights(model, str(directory), strict=True)
    theirs = load_file(directory / "logits.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(model(theirs["tokens"]), theirs["logits"])


def test_names_without_a_match_are_listed_with_shapes(tmp_path: Path) -> None:
    weights = _torchtitan(_model(LLAMA))
    weights["layers.0.attention.q_norm.weight"] = torch.ones(4)
    weights["layers.0.feed_forward.w1.weight"] = torch.ones(20, 16)
    del weights["norm.weight"]
    dcp.save(weights, checkpoint_id=tmp_path / "step-3", no_dist=True)
    with pytest.raises(UserError) as refused:
        load_initial_weights(_model(LLAMA), str(tmp_path / "step-3"), strict=True)
    message = str(refused.value)
    assert "1 missing (norm.weight)" in message
    assert "1 unexpected (layers.0.attention.q_norm.weight)" in message
    assert "1 of another shape (blocks.0.gate.weight [20, 16] instead of [24, 16])" in message


# --- Megatron-LM, by hand from its published layout ---------------------------


class _ModelType(Enum):
    """In place of Megatron's own class, which is not installed here."""

    encoder_or_decoder = 1


def _megatron(model: GPT, core: bool) -> dict[str, Tensor]:
    own, config = model_tensors(model), model.config
    block = "decoder" if core else "language_model.encoder"
    outside = "" if core else "language_model."
    names = {
        False: ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        True: ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    }
    qkv, out, up, down = names[core]
    found = {f"{outside}embedding.word_embeddings.weight": own["embedding.weight"]}
    if config.positions == "learned":
        found[f"{outside}embedding.position_embeddings.weight"] = own["positions.weight"]
    if not config.tied_embeddings:
        found[f"{outside}output_layer.weight"] = own["head.weight"]
    for kind in ("weight", "bias"):
        if f"norm.{kind}" in own:
            found[f"{block}.final_layernorm.{kind}"] = own[f"norm.{kind}"]
        for n in range(config.layers):
            there, here = f"{block}.layers.{n}", f"blocks.{n}"
            if f"{here}.norm1.{kind}" in own:
                first = "self_attention.linear_qkv.layer_norm_" if core else "input_layernorm."
                second = "mlp.linear_fc1.layer_norm_" if core else "post_attention_layernorm."
                found[f"{there}.{first}{kind}"] = own[f"{here}.norm1.{kind}"]
                found[f"{there}.{second}{kind}"] = own[f"{here}.norm2.{kind}"]
            if f"{here}.up.{kind}" not in own:
                continue
            size, queries = config.head_size, config.heads // config.key_heads
            q, k, v = (own[f"{here}.attention.{letter}.{kind}"] for letter in "qkv")
            rows = []
            for group in range(config.key_heads):
                rows += [
                    q[group * queries * size : (group + 1) * queries * size],
                    k[group * size : (group + 1) * size],
                    v[group * size : (group + 1) * size],
                ]
            found[f"{there}.self_attention.{qkv}.{kind}"] = torch.cat(rows)
            found[f"{there}.self_attention.{out}.{kind}"] = own[f"{here}.attention.out.{kind}"]
            inner = [
                own[f"{here}.{name}.{kind}"]
                for name in ("gate", "up")
                if f"{here}.{name}.{kind}" in own
            ]
            found[f"{there}.mlp.{up}.{kind}"] = torch.cat(inner)
            found[f"{there}.mlp.{down}.{kind}"] = own[f"{here}.down.{kind}"]
    return found


def _save_megatron(root: Path, model: GPT, core: bool, **arguments: Any) -> Path:
    """Write the directory, nested as Megatron's legacy models are."""
    nested: dict[str, Any] = {}
    for name, tensor in _megatron(model, core).items():
        inside = nested
        outer = name.split(".")[:2] if name.startswith("language_model.") else []
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[".".join(name.split(".")[len(outer) :])] = tensor
    file = root / "iter_0000010/mp_rank_00/model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    facts = {
        "num_attention_heads": model.config.heads,
        "group_query_attention": True,
        "num_query_groups": model.config.key_heads,
        "model_type": _ModelType(1),
        **arguments,
    }
    content = {
        "args": argparse.Namespace(**facts),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": nested,
        "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
    }
    torch.save(content, file)
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    return file


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_megatron_directory_loads_with_fused_matrices_split(
    tmp_path: Path, config: GPTConfig, core: bool
) -> None:
    expected = _model(config)
    _save_megatron(tmp_path, expected, core)
    _assert_loads(tmp_path, expected)
    _assert_loads(tmp_path / "iter_0000010/mp_rank_00", expected)


def test_megatron_settings_that_differ_are_refused(tmp_path: Path) -> None:
    expected = _model(GPT2)
    file = _save_megatron(tmp_path, expected, core=True, num_attention_heads=4, norm_epsilon=1e-6)
    with pytest.raises(UserError, match=r"num_attention_heads is 4 in Megatron's arg.*norm_eps"):
        _assert_loads(tmp_path, expected)
    (tmp_path / "iter_0000010/mp_rank_01").mkdir()
    os.link(file, tmp_path / "iter_0000010/mp_rank_01" / file.name)
    with pytest.raises(UserError, match="2 files share the model"):
        _assert_loads(tmp_path, expected)


@settings(max_examples=30, deadline=None)
@given(
    groups=st.integers(1, 4), queries=st.integers(1, 3), half=st.integers(1, 3),
    layout=st.sampled_from(["titan", "megatron"]),
)  # fmt: skip
def test_renaming_is_lossless_for_any_heads(
    groups: int, queries: int, half: int, layout: str
) -> None:
    heads = groups * queries
    config = replace(LLAMA, heads=heads, kv_heads=groups, width=heads * 2 * half, layers=1)
    model = _model(config)
    theirs = _torchtitan(model) if layout == "titan" else _megatron(model, core=True)
    found, own = to_gpt_names(config, {}, theirs), model_tensors(model)
    assert found.keys() == own.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


# --- pickles that would run something -----------------------------------------


class _Malicious:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


def test_pickles_never_execute_code(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    megatron = tmp_path / "megatron/mp_rank_00"
    megatron.mkdir(parents=True)
    model = {"embedding.word_embeddings.weight": torch.ones(2, 2)}
    torch.save({"model": model, "args": _Malicious(marker)}, megatron / "model_optim_rng.pt")
    index = tmp_path / "dcp"
    index.mkdir()
    (index / ".metadata").write_bytes(pickle.dumps(_Malicious(marker)))
    (index / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UserError, match="its index is not one of DCP"):
        read_weights(index)
    with pytest.raises(UserError):
        load_initial_weights(_model(GPT2), str(megatron), strict=True)
    assert not marker.exists()
    dcp.save(model, checkpoint_id=tmp_path / "outside", no_dist=True)
    moved = (tmp_path / "outside/.metadata").read_bytes().replace(b"__0_0.distcp", b"../../distcp")
    (tmp_path / "outside/.metadata").write_bytes(moved)
    with pytest.raises(UserError, match="it names the file"):
        read_weights(tmp_path / "outside")
