"""Context parallelism compared with the same model on one rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import AttentionConfig, GPTConfig
from hvdtrain.parallel.context import apply_context, check_context, gather_positions, undivided
from tests.support.torch_ranks import on_torch_ranks

CONTEXT = 64
SMALL = GPTConfig(layers=2, heads=4, kv_heads=2, width=32, context=CONTEXT, vocab_size=50)
PATTERNS: dict[str, dict[str, Any]] = {
    "full": {},
    # On 4 ranks a segment of 32 spans two ranks, one of 64 all; 16 and 8 fit into one.
    "dilated": {
        "attention": AttentionConfig(
            "dilated", segment_lengths=[8, 32, 64], dilation_rates=[1, 2, 8]
        )
    },
    # On 4 ranks the blocks before a rank's own are on two other ranks.
    "local": {
        "attention": AttentionConfig("block_sparse", block_size=8, local_blocks=4, global_blocks=0)
    },
    "block_sparse": {
        "attention": AttentionConfig("block_sparse", block_size=4, local_blocks=3, global_blocks=5)
    },
}
CASES = list(product(PATTERNS, ("rotary", "learned"), (False, True)))


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _model(name: str, positions: str = "rotary") -> GPT:
    torch.manual_seed(0)
    return GPT(replace(SMALL, positions=positions, **PATTERNS[name]))  # type: ignore[arg-type]


def _results(model: GPT, with_documents: bool) -> dict[str, Tensor]:
    """Return loss and gradients of all ranks of the model together."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(50, (2, CONTEXT + 1), generator=generator)
    tokens, targets = batch[:, :-1], batch[:, 1:]
    documents = (tokens % 17 == 0).cumsum(1) if with_documents else None
    loss = model.loss(tokens, targets, documents)
    (loss * 100).backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    if model.split is not None:
        for tensor in found.values():
            dist.all_reduce(tensor)
    return found


def _shared() -> list[dict[str, Any]]:
    """Run each case on all ranks of this world."""
    found = []
    for name, positions, with_documents in CASES:
        model = _model(name, positions)
        apply_context(model, _world())
        results = _results(model, with_documents)
        found.append({key: tensor.numpy() for key, tensor in results.items()})
    return found if dist.get_rank() == 0 else []


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_loss_and_gradients_match_one_rank(ranks: int) -> None:
    for case, found in zip(CASES, on_torch_ranks(ranks, _shared)[0], strict=True):
        name, positions, with_documents = case
        wanted = _results(_model(name, positions), with_documents)
        for key, tensor in wanted.items():
            error = (torch.as_tensor(found[key]) - tensor).abs().max()
            # Without rotary positions the biases of keys have no gradient.
            assert error < 1e-5 * max(tensor.abs().max().item(), 1e-2), (case, key, error)


def _sent() -> list[int]:
    """Return the positions that this rank receives, by pattern, and results of a second group."""
    received: list[int] = []
    batch_isend_irecv = dist.batch_isend_irecv

    def counted(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        received.extend(x.tensor.numel() for x in p2p_op_list if x.op is dist.irecv)
        return batch_isend_irecv(p2p_op_list)

    dist.batch_isend_irecv = counted
    totals = []
    tokens = torch.randint(50, (1, CONTEXT), generator=torch.Generator().manual_seed(2))
    for name in PATTERNS:
        model = _model(name)
        apply_context(model, _world())
        received.clear()
        with torch.no_grad():
            model(tokens)
        per_position = 2 * SMALL.key_heads * SMALL.head_size * SMALL.layers
        totals.append(sum(received) // per_position)
        with undivided(model):
            alone = model(tokens)
        torch.testing.assert_close(alone, _model(name)(tokens))
        assert model.split is not None
    return totals


def test_rank_receives_only_the_keys_that_its_pattern_needs() -> None:
    """On 4 ranks with 16 tokens each."""
    by_rank = on_torch_ranks(4, _sent)
    for rank, (full, dilated, local, block_sparse) in enumerate(by_rank):
        assert full == 3 * 16
        # Every 2nd of the previous rank in a segment of two, every 8th of all previous ranks.
        assert dilated == rank % 2 * 8 + rank * 2
        assert local == min(rank * 16, 24)
        # The two preceding blocks, and the first 5, of which rank 1 holds the last itself.
        assert block_sparse == [0, 8 + 16, 8 + 20, 8 + 20][rank]


def _gradients_of_gathered() -> tuple[list[float], list[float]]:
    rank = dist.get_rank()
    x = (torch.arange(4.0).view(1, 4, 1) + 4 * rank).requires_grad_()
    needs = [[range(6, 8), range(0, 3)], [range(0, 0)], [range(3, 9)]]
    found = gather_positions(x, needs, _world())
    (found.square().sum() / 2).backward()
    assert x.grad is not None
    return found.flatten().tolist(), x.grad.flatten().tolist()


def test_gather_positions_returns_requested_rows_and_their_gradients() -> None:
    found = on_torch_ranks(3, _gradients_of_gathered)
    assert [x for x, _ in found] == [[6, 7, 0, 1, 2], [], [3, 4, 5, 6, 7, 8]]
    assert [y for _, x in found for y in x] == [0, 1, 2, 3, 4, 5, 12, 14, 8, 0, 0, 0]


@pytest.mark.parametrize(
    ("keys", "ranks", "message"),
    [
        ({"context": 60}, 4, "60 is not a multiple of 8, into which parallel.context 4 .* 64"),
        (PATTERNS["local"], 3, "64 is not a multiple of 3, into which"),
        (
            {"attention": AttentionConfig("block_sparse", block_size=32)},
            4,
            "16 tokens, which model.attention.block_size 32",
        ),
        ({**PATTERNS["dilated"], "context": 192}, 4, "segment_lengths 32 must divide"),
        (
            {
                "attention": AttentionConfig(
                    "dilated", segment_lengths=[8, 64], dilation_rates=[1, 32]
                )
            },
            4,
            "model.attention.dilation_rates 32 of segments longer",
        ),
        ({"dropout": 0.1}, 2, "excludes model.dropout 0.1"),
    ],
)
def test_context_that_ranks_cannot_shard_is_rejected(
    keys: dict[str, Any], ranks: int, message: str
) -> None:
    config = replace(SMALL, **keys)
    check_context(config, 1)
    with pytest.raises(ValueError, match=message):
        check_context(config, ranks)


def _refused() -> list[str]:
    messages = []
    for function in (
        lambda: apply_context(GPT(replace(SMALL, context=62)), _world()),
        lambda: _shortened("full"),
        lambda: _shortened("local"),
    ):
        with pytest.raises(UserError) as found:
            function()
        messages.append(str(found.value))
    return messages


def _shortened(name: str) -> None:
    model = _model(name)
    apply_context(model, _world())
    model(torch.zeros(1, 31, dtype=torch.int64))


def test_sequence_that_ranks_cannot_shard_is_an_error_on_every_rank() -> None:
    for messages in on_torch_ranks(2, _refused):
        assert "model.context 62 is not a multiple of 4" in messages[0]
        assert all("31 tokens cannot be shared by the 2 ranks" in x for x in messages[1:])
