"""The GPT model: published sizes, initialization, causal attention and packed documents."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from hvdtrain.config import parse, presets
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig

SMALL = GPTConfig(layers=3, heads=4, width=64, context=32, vocab_size=256)
LLAMA = replace(SMALL, kv_heads=2, norm="rms", mlp="swiglu", mlp_width=168, bias=False)
KINDS = {"rotary": SMALL, "learned": replace(SMALL, positions="learned"), "llama": LLAMA}


@pytest.fixture(params=KINDS)
def gpt(request: pytest.FixtureRequest) -> GPT:
    torch.manual_seed(0)
    return GPT(KINDS[request.param]).eval()


@pytest.mark.parametrize(
    ("preset", "rows", "parameters"),
    [
        ("gpt-small", 50257, 124_439_808),
        ("gpt-medium", 50257, 354_823_168),
        # OPT has 50272 rows, and 2 more positions than it uses.
        ("gpt-1b3", 50272, 1_315_758_080 - 2 * 2048),
        ("llama-7b", 32000, 6_738_415_616),
    ],
)
def test_preset_parameter_count_matches_published_model(
    preset: str, rows: int, parameters: int
) -> None:
    config = parse(["--config", preset]).task_config.model
    with torch.device("meta"):
        model = GPT(config)
    count = sum(p.numel() for p in model.parameters())
    # Each additional row has `width` parameters.
    assert count - (config.vocab_size - rows) * config.width == parameters


def test_preset_shapes_are_distinct_and_match_published_models() -> None:
    names = [name for name in presets() if name.startswith(("gpt", "llama"))]
    sizes = {name: parse(["--config", name]).task_config.model for name in names}
    shapes = {(size.width, size.heads, size.layers) for size in sizes.values()}
    assert len(shapes) == len(names)
    assert shapes >= {(1024, 16, 24), (2048, 32, 24), (4096, 32, 32)}
    assert sizes["llama-7b"].inner_width == 11008 and sizes["gpt-1b3"].inner_width == 8192


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 3}, "model.heads 4 is not a multiple of model.kv_heads 3"),
        ({"kv_heads": 0}, "model.kv_heads must be >= 1"),
        ({"mlp_width": -1}, "model.mlp_width must be >= 1"),
        ({"norm_eps": 0.0}, "model.norm_eps must be > 0"),
        ({"width": 12}, "even model.width / model.heads, not 3"),
    ],
)
def test_config_rejects_impossible_sizes(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **sizes)


def test_untrained_loss_matches_uniform_prediction(gpt: GPT) -> None:
    tokens = torch.randint(256, (8, 33))
    loss = gpt.loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(256), abs=0.1)


def test_attention_is_causal(gpt: GPT) -> None:
    tokens = torch.randint(256, (2, 32))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = gpt(tokens), gpt(changed)
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-6)
    assert ((after[:, 20:] - before[:, 20:]).abs().amax(-1) > 1e-5).all()


def test_logits_depend_on_token_positions(gpt: GPT) -> None:
    tokens = torch.randint(256, (1, 16))
    swapped = tokens.clone()
    swapped[0, [3, 7]] = tokens[0, [7, 3]]
    assert (gpt(tokens)[0, -1] - gpt(swapped)[0, -1]).abs().max() > 1e-6


def test_prefix_logits_match_full_sequence(gpt: GPT) -> None:
    tokens = torch.randint(256, (1, 32))
    torch.testing.assert_close(gpt(tokens[:, :10]), gpt(tokens)[:, :10])


def test_initialization_matches_published_scheme(gpt: GPT) -> None:
    residual = 0.02 / math.sqrt(2 * gpt.config.layers)
    for name, parameter in gpt.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            scaled = name.endswith(("attention.out.weight", "down.weight"))
            assert float(parameter.std()) == pytest.approx(residual if scaled else 0.02, rel=0.1)


def test_embedding_and_output_weights_are_tied(gpt: GPT) -> None:
    names = [name for name, p in gpt.named_parameters() if p.shape[0] == 256 and p.dim() == 2]
    assert [name for name in names if "up" not in name] == ["embedding.weight"]


def test_untied_head_has_its_own_weight() -> None:
    model = GPT(replace(SMALL, tied_embeddings=False))
    assert model.head is not None and model.head.weight is not model.embedding.weight
    tokens = torch.randint(256, (1, 8))
    logits = model(tokens)
    with torch.no_grad():
        model.head.weight.zero_()
    assert logits.any() and not model(tokens).any()


def test_initial_values_are_independent_of_depth_and_device() -> None:
    torch.manual_seed(3)
    made = dict(GPT(SMALL).named_parameters())
    torch.manual_seed(3)
    torch.rand(100)
    deeper = dict(GPT(replace(SMALL, layers=5)).named_parameters())
    with torch.device("meta"):
        late = GPT(SMALL)
    late.to_empty(device="cpu").initialize(3)
    for name, parameter in late.named_parameters():
        assert torch.equal(parameter, made[name]), name
        if not name.endswith(("attention.out.weight", "down.weight")):  # scaled by the depth
            assert torch.equal(parameter, deeper[name]), name
    tokens = torch.randint(256, (1, 8))
    assert late(tokens).isfinite().all()
    torch.manual_seed(4)
    assert not torch.equal(GPT(SMALL).embedding.weight, made["embedding.weight"])


def test_model_uses_given_attention_function() -> None:
    model = GPT(SMALL, attend=lambda q, k, v, dropout, documents: torch.zeros_like(q))
    tokens = torch.randint(256, (1, 8))
    alone = model(tokens[:, -1:])
    torch.testing.assert_close(model(tokens)[:, -1:], alone)  # nothing of earlier tokens


def test_grouped_query_attention_matches_repeated_kv_heads() -> None:
    torch.manual_seed(0)
    grouped = GPT(LLAMA)
    alone = GPT(replace(LLAMA, kv_heads=None))
    weights = grouped.state_dict()
    for name, tensor in weights.items():
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            heads = tensor.unflatten(0, (2, 16)).repeat_interleave(2, dim=0)
            weights[name] = heads.flatten(0, 1)
    alone.load_state_dict(weights)
    tokens = torch.randint(256, (2, 32))
    torch.testing.assert_close(grouped(tokens), alone(tokens))


def test_packed_documents_match_separate_documents(gpt: GPT) -> None:
    lengths = [[10, 1, 21], [32]]
    tokens, targets = torch.randint(256, (2, 2, 32))
    documents = torch.tensor([[0] * 10 + [1] + [2] * 21, [5] * 32])
    logits = gpt(tokens, documents)
    gpt.loss(tokens, targets, documents).backward()
    found = {name: parameter.grad.clone() for name, parameter in gpt.named_parameters()}
    gpt.zero_grad()
    for row, of_row in enumerate(lengths):
        parts = (x[row, None].split(of_row, dim=1) for x in (logits, tokens, targets))
        for expected, own, following in zip(*parts, strict=True):
            torch.testing.assert_close(gpt(own), expected, rtol=1e-5, atol=1e-5)
            (gpt.loss(own, following) * own.numel() / tokens.numel()).backward()
    for name, parameter in gpt.named_parameters():
        torch.testing.assert_close(parameter.grad, found[name], rtol=1e-4, atol=1e-6)
    assert (gpt(tokens)[0, 20] - logits[0, 20]).abs().max() > 1e-4, "nothing was masked"


@pytest.mark.parametrize("config", [SMALL, LLAMA])
def test_model_overfits_single_batch(config: GPTConfig) -> None:
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(256, (2, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2


def test_dropout_is_disabled_in_eval_mode() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, heads=2, width=32, context=8, vocab_size=16, dropout=0.5))
    tokens = torch.randint(16, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
