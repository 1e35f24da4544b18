"""A model whose matrices ranks split between them: the same losses and gradients as on one rank."""

from __future__ import annotations

import pytest

from tests.support.split_models import Variant, compared
from tests.support.torch_ranks import on_torch_ranks

LLAMA = {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "mlp_width": 24, "bias": False}
VARIANTS = {
    "GPT": Variant({}, packed=False),
    "learned positions, untied": Variant({"positions": "learned", "tied_embeddings": False}),
    "Llama": Variant(LLAMA),
    "Llama with dropout": Variant(LLAMA | {"dropout": 0.2}),
    "GPT with dropout": Variant({"positions": "learned", "dropout": 0.2}, packed=False),
}


def test_two_ranks_that_split_a_model_train_otherwise_than_one_or_hold_more_than_half() -> None:
    for rank in on_torch_ranks(2, compared, {"tensor": 2}, VARIANTS, timeout=240):
        for name, found in rank.items():
            assert found.loss < 1e-5 and found.gradient < 1e-5, name
            assert not found.copies, name
        assert rank["GPT"].fraction == pytest.approx(0.5, rel=0.05)
