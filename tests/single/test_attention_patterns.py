"""Dilated and block-sparse attention against a softmax over all pairs of positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.models import attention_kernels
from hvdtrain.models.attention import (
    Attend,
    BlockSparseAttention,
    DilatedAttention,
    causal_attention,
)
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import AttentionConfig, GPTConfig
from hvdtrain.models.huggingface import to_huggingface
from tests.support.runs import losses, train

DILATED = DilatedAttention((8, 16, 32), (1, 2, 4))
BLOCK_SPARSE = BlockSparseAttention(4, 2, 2)
PATTERNS: list[Attend] = [
    DILATED,
    DilatedAttention((8, 32), (1, 8), first_head=3),
    BLOCK_SPARSE,
    BlockSparseAttention(8, 1, 0),
    BlockSparseAttention(2, 3, 4),
]
SMALL = GPTConfig(layers=2, heads=4, kv_heads=2, width=32, context=32, vocab_size=64)
KEYS: dict[str, dict[str, Any]] = {
    "dilated": {"pattern": "dilated", "segment_lengths": [8, 32], "dilation_rates": [1, 4]},
    "block_sparse": {
        "pattern": "block_sparse",
        "block_size": 4,
        "local_blocks": 2,
        "global_blocks": 1,
    },
}


def _counts(attend: Attend, time: int, heads: int) -> Tensor:
    """Return how often a query attends to a key, (heads, time, time), as in the papers, pair by
    pair."""
    counts = torch.zeros(heads, time, time)
    for head in range(heads):
        for i in range(time):
            for j in range(i + 1):
                counts[head, i, j] = _times(attend, head, i, j)
    return counts


def _times(attend: Attend, head: int, i: int, j: int) -> int:
    if isinstance(attend, BlockSparseAttention):
        block, other = i // attend.size, j // attend.size
        return int(block - other < attend.local or other < attend.first)
    assert isinstance(attend, DilatedAttention)
    return sum(
        i // length == j // length
        and i % length % rate == j % length % rate == (attend.first_head + head) % rate
        for length, rate in zip(attend.segment_lengths, attend.rates, strict=True)
    )


def _dense(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, documents: Tensor | None) -> Tensor:
    """Compute a softmax in which a key counts as often as `counts` says."""
    share = q.shape[1] // k.shape[1]
    k, v, counts = (x.repeat_interleave(share, dim=dim) for x, dim in ((k, 1), (v, 1), (counts, 0)))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).exp() * counts
    if documents is not None:
        weights = weights * (documents[:, None, :, None] == documents[:, None, None, :])
    return weights / weights.sum(-1, keepdim=True) @ v


def _qkv(time: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, time, 8, requires_grad=True) for heads in (6, 3, 3))
    return q, k, v


def _with_gradients(y: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


@pytest.mark.parametrize("documents", [False, True], ids=["", "documents"])
@pytest.mark.parametrize("time", [32, 13], ids=["whole", "cut"])
@pytest.mark.parametrize("pattern", range(len(PATTERNS)))
def test_sparse_attention_and_its_gradients_match_dense_reference(
    pattern: int, time: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "_ROWS", 3)
    attend, inputs = PATTERNS[pattern], _qkv(time)
    numbers = (torch.arange(2 * time).view(2, time) % 11 == 0).cumsum(1) if documents else None
    found = _with_gradients(attend(*inputs, 0.0, numbers), inputs)
    wanted = _with_gradients(_dense(*inputs, _counts(attend, time, 3), numbers), inputs)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_single_block_or_segment_equals_full_attention() -> None:
    inputs = _qkv(32)
    wanted = causal_attention(*inputs, 0.0, None)
    for attend in (DilatedAttention((32,), (1,)), BlockSparseAttention(4, 8, 0)):
        torch.testing.assert_close(attend(*inputs, 0.0, None), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("attend", "most"),
    [(DilatedAttention((64, 512), (1, 8)), 0.3), (BlockSparseAttention(16, 3, 1), 0.2)],
    ids=["dilated", "block_sparse"],
)
def test_pattern_takes_a_fraction_of_the_flops_of_full_attention(
    attend: Attend, most: float
) -> None:
    """On meta tensors each product counts completely, also for full attention."""
    q, k, v = (torch.empty(1, 8, 512, 16, device="meta", requires_grad=True) for _ in range(3))
    flops = []
    for function in (attend, DilatedAttention((512,), (1,))):
        with FlopCounterMode(display=False) as counter:
            function(q, k, v, 0.0, None).sum().backward()
        flops.append(counter.get_total_flops())
    assert flops[0] < most * flops[1]


@pytest.mark.parametrize("name", KEYS)
def test_bfloat16_autocast_stays_close_to_float32(name: str) -> None:
    """In bfloat16 and under autocast, where rotary positions convert q and k to float32."""
    torch.manual_seed(0)
    model = GPT(replace(SMALL, attention=AttentionConfig(**KEYS[name])))
    tokens = torch.randint(64, (2, 33))
    wanted = model.loss(tokens[:, :-1], tokens[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        found = model.loss(tokens[:, :-1], tokens[:, 1:])
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=2e-3)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(x is not None and x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("name", KEYS)
def test_logits_are_causal_and_independent_of_sequence_length(name: str) -> None:
    torch.manual_seed(0)
    model = GPT(replace(SMALL, attention=AttentionConfig(**KEYS[name])))
    tokens = torch.randint(64, (2, 32))
    whole = model(tokens)
    for time in (1, 4, 13, 31):
        torch.testing.assert_close(model(tokens[:, :time]), whole[:, :time], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"segment_lengths": [8]}, "are for model.attention.pattern dilated, not for full"),
        ({"pattern": "dilated"}, "as many model.attention.segment_lengths as .*, not 0 and 0"),
        ({"segment_lengths": [8, 16], "dilation_rates": [1]}, "as many .* not 2 and 1"),
        ({"segment_lengths": [5], "dilation_rates": [1]}, "5 does not divide model.context 32"),
        ({"segment_lengths": [8], "dilation_rates": [3]}, "3 does not divide its segment of 8"),
        ({"segment_lengths": [8], "dilation_rates": [2]}, "needs a 1: otherwise no pattern"),
        ({"pattern": "block_sparse", "block_size": 5}, "5 does not divide model.context 32"),
        ({"pattern": "block_sparse", "local_blocks": 0}, "local_blocks must be >= 1"),
        ({"pattern": "block_sparse"}, "no dropout: set model.dropout 0"),
    ],
)
def test_invalid_pattern_is_rejected(keys: dict[str, Any], message: str) -> None:
    if "dilation_rates" in keys:
        keys = {"pattern": "dilated", **keys}
    with pytest.raises(ValueError, match=message):
        replace(SMALL, attention=AttentionConfig(**keys), dropout=0.1 * ("dropout" in message))


def test_list_flags_are_parsed_and_mismatched_lengths_rejected() -> None:
    flags = ["--model.attention.pattern=dilated", "--model.attention.segment_lengths=[64,128]"]
    sizes = parse([*flags, "--model.attention.dilation_rates", "[1,2]"]).task_config.model.attention
    assert (sizes.segment_lengths, sizes.dilation_rates) == ([64, 128], [1, 2])
    with pytest.raises(UserError, match="not 2 and 0"):
        parse(flags)


def test_huggingface_export_rejects_block_sparse_attention() -> None:
    config = replace(SMALL, kv_heads=None, attention=AttentionConfig("block_sparse", block_size=4))
    with pytest.raises(UserError, match=r"model\.attention\.pattern block_sparse"):
        to_huggingface(config, GPT(config).state_dict())


@pytest.mark.parametrize("name", KEYS)
def test_run_with_sparse_attention_learns(name: str, tmp_path: Path) -> None:
    flags = ["--model.kv_heads", "1", "--train.duration", "12"]
    for key, value in KEYS[name].items():
        flags += [f"--model.attention.{key}", str(value).replace(" ", "")]
    found = losses(train(tmp_path, "sparse", flags))
    assert found[-1] < found[0] - 0.1


# --- choice of kernels on GPUs ------------------------------------------------
#
# Fake tensors, with shapes and no values, stand in for a GPU's.


@pytest.fixture(params=[(7, 5), (8, 0), (9, 0)], ids=str)
def capability(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, int]]:
    """The compute capability of a simulated GPU."""
    found: tuple[int, int] = request.param
    properties = SimpleNamespace(major=found[0], minor=found[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with FakeTensorMode():
        yield found


HALVES = torch.float16, torch.bfloat16


@pytest.mark.parametrize("size", [64, 100, 128, 256, 264])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_flash_attention_is_used_only_where_torch_has_it(
    capability: tuple[int, int], dtype: torch.dtype, size: int
) -> None:
    q = torch.empty(1, 2, 8, size, dtype=dtype, device="cuda")
    expected = capability >= (8, 0) and dtype in HALVES and size in (64, 128, 256)
    assert attention_kernels.has_flash(q) == expected
    assert not attention_kernels.has_flash(q.cpu())


class _HeadsOfKeys(TorchFunctionMode):
    """Record, for each call of torch's attention, the heads of the keys and `enable_gqa`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.found.append((args[1].shape[1], bool(kwargs.get("enable_gqa"))))
        return args[0]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_heads_are_repeated_for_kernels_that_require_equally_many(
    capability: tuple[int, int], kind: str, dtype: torch.dtype, autocast: bool
) -> None:
    q, k = (torch.empty(1, heads, 8, 64, dtype=dtype, device=kind) for heads in (4, 2))
    torch.set_autocast_enabled(kind, autocast)  # torch.autocast("cuda") needs a GPU
    try:
        with _HeadsOfKeys() as calls:
            causal_attention(q, k, k, 0.0, None)
            causal_attention(q, q, q, 0.0, None)
    finally:
        torch.set_autocast_enabled(kind, False)
    half = autocast or dtype is torch.bfloat16
    shared = kind == "cpu" or (half and capability >= (8, 0))
    assert calls.found == [(2, True) if shared else (4, False), (4, False)]
