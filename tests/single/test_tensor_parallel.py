"""Tensor parallelism: the same losses and gradients as on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.split_models import Variant, sizes, tensor_parallel
from tests.support.torch_ranks import on_torch_ranks

LLAMA = {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "mlp_width": 24, "bias": False}
VARIANTS = {
    "GPT": Variant({}, packed=False),
    "learned positions, untied": Variant({"positions": "learned", "tied_embeddings": False}),
    "Llama": Variant(LLAMA),
    "Llama with dropout": Variant(LLAMA | {"dropout": 0.2}),
    "GPT with dropout": Variant({"positions": "learned", "dropout": 0.2}, packed=False),
}


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[dict[str, Any], ...]]:
    return on_torch_ranks(2, tensor_parallel, VARIANTS, timeout=240)


def test_two_tensor_parallel_ranks_match_one_rank_and_hold_half_each(
    two_ranks: Any,
) -> None:
    for rank, _, _ in two_ranks:
        for name, found in rank.items():
            assert found.loss < 1e-5 and found.gradient < 1e-5, name
            assert not found.copies, name
        assert rank["GPT"].fraction == pytest.approx(0.5, rel=0.05)


def test_custom_plan_keeps_ties_and_frozen_weights_and_reports_errors(
    two_ranks: Any,
) -> None:
    for _, custom, _ in two_ranks:
        assert custom["tied"] and custom["frozen"] and all(custom["errors"])
        assert custom["gradients"] < 1e-6


def test_tensor_parallel_model_generates_the_same_text_and_runs_bf16(two_ranks: Any) -> None:
    for _, _, found in two_ranks:
        whole, split = found["texts"]
        assert whole == split and len(split) == 6
        assert found["losses"][1] == pytest.approx(found["losses"][0], rel=0.01)


@pytest.mark.parametrize(
    ("changes", "degree", "message"),
    [
        ({}, 4, None),
        ({"vocab_size": 37, "kv_heads": 2}, 2, None),
        ({}, 3, "parallel.tensor 3 does not divide model.heads 4 and model.kv_heads 4 and "),
        ({"kv_heads": 2}, 4, "model.kv_heads 2; the nearest that does is 2"),
        ({"mlp_width": 30}, 4, "model.mlp_width 30; the nearest that does is 2"),
        ({"mlp_width": 33}, 2, "model.mlp_width 33; the nearest that does is 1"),
    ],
)
def test_only_degrees_that_divide_the_model_are_accepted(
    changes: dict[str, Any], degree: int, message: str | None
) -> None:
    config = sizes(**changes)
    if message is None:
        config.check_tensor(degree)
        return
    with pytest.raises(ValueError, match=message):
        config.check_tensor(degree)
