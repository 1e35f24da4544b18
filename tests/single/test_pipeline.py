"""Pipeline parallelism matches one rank in losses, gradients and parameters."""

from __future__ import annotations

import functools
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward

from hvdtrain.errors import UserError
from hvdtrain.parallel import schedules
from hvdtrain.parallel.cut import CutModel
from hvdtrain.parallel.schedules import Layout
from hvdtrain.parallel.world import lost_peers
from hvdtrain.runtime.collectives import RankLostError
from tests.support.pipelined import (
    Case,
    Codes,
    Compared,
    Normed,
    Pictures,
    Words,
    compare,
    fail_in_the_task,
    lose_a_peer,
)
from tests.support.torch_ranks import on_torch_ranks

PLAIN: dict[str, Any] = {"dropout": 0.1, "positions": "learned"}
CASES = {
    2: {
        "gpipe": Case(Words(layers=4), "gpipe"),
        "gpipe, BatchNorm and a parameter of two names": Case(Codes(), "gpipe", (4, 3)),
        "1f1b, fewer micro-batches than ranks": Case(Words(layers=3, **PLAIN), "1f1b", (4, 1, 0)),
        "1f1b, images": Case(Pictures(), "1f1b", (2,)),
        "1f1b, checkpointed": Case(Words(layers=2, **PLAIN), "1f1b", (4,), checkpointed=True),
        "interleaved1f1b": Case(Words(layers=4), "interleaved1f1b", (4, 4, 2)),
        "interleaved1f1b, rounds of unequal size": Case(
            Words(layers=5, tied_embeddings=False, **PLAIN), "interleaved1f1b", (5, 2)
        ),
        "interleaved1f1b, bf16": Case(Words(layers=4), "interleaved1f1b", (4, 4), "bf16"),
        "zero-bubble": Case(Words(layers=4, **PLAIN), "zero-bubble", (4, 4, 2)),
        "zero-bubble, a weighted loss": Case(
            Words(weighted=True, layers=4, tied_embeddings=False), "zero-bubble", (4, 3)
        ),
    },
    4: {
        "gpipe": Case(Words(layers=4, **PLAIN), "gpipe", (4, 2)),
        "1f1b": Case(Words(layers=5, tied_embeddings=False, **PLAIN), "1f1b", (6, 6, 3)),
        "interleaved1f1b": Case(Words(layers=8, **PLAIN), "interleaved1f1b", (8, 4)),
        "zero-bubble": Case(Words(layers=8), "zero-bubble", (8, 4)),
    },
}
EVERY = pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, cases in CASES.items() for name in cases]
)
_SEEN: dict[int, list[dict[str, Compared]]] = {}


@pytest.fixture
def ranks(size: int, name: str) -> list[Compared]:
    """Return each rank's result of one case; all cases of a size run in one world."""
    if size not in _SEEN:
        _SEEN[size] = []  # report one failure
        _SEEN[size] = on_torch_ranks(size, compare, CASES[size], timeout=280)
    assert _SEEN[size], "this world has failed"
    return [rank[name] for rank in _SEEN[size]]


@EVERY
def test_pipeline_results_match_single_rank(ranks: list[Compared], size: int, name: str) -> None:
    for rank in ranks:
        assert max(rank.apart.values()) < 1e-5, rank.apart


@EVERY
def test_rank_holds_only_parameters_of_its_stages(
    ranks: list[Compared], size: int, name: str
) -> None:
    whole = ranks[0].names[1]
    assert set[str]().union(*(rank.names[0] for rank in ranks)) == whole
    shared = [n for rank in ranks for n in rank.names[0]]
    tied = [n for rank in ranks for n in rank.tied]
    assert len(shared) - len(tied) // 2 == len(whole)
    assert max(rank.numbers[0] for rank in ranks) < ranks[0].numbers[1]


@EVERY
def test_tied_parameter_is_shared_by_first_and_last_rank_only(
    ranks: list[Compared], size: int, name: str
) -> None:
    assert ranks[0].tied == ranks[-1].tied
    task = CASES[size][name].task
    is_tied = task.config.tied_embeddings if isinstance(task, Words) else isinstance(task, Codes)
    assert bool(ranks[0].tied) == is_tied
    assert not any(rank.tied for rank in ranks[1:-1])


def test_two_stages_split_parameters_evenly() -> None:
    task = Words(layers=4, tied_embeddings=False)
    for rank in (0, 1):
        model = task.model()
        whole = sum(p.numel() for p in model.parameters())
        CutModel(task, model, Layout(2), rank)
        own = sum(p.numel() for p in model.parameters())
        assert own == pytest.approx(whole / 2, rel=0.05), rank


def test_pipeline_bubble_is_measured() -> None:
    found = _SEEN.get(2) or on_torch_ranks(2, compare, {"gpipe": CASES[2]["gpipe"]})
    whole, waited, formula, steps = found[1]["gpipe"].bubble
    assert 0 < waited < whole and steps == 1 and formula == 1 / 5


def test_dead_pipeline_peer_raises_error_without_hang(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 ended without a result"):
        on_torch_ranks(2, lose_a_peer, tmp_path / "seen")
    calls, seconds = map(float, (tmp_path / "seen").read_text().split())
    assert calls > 9 and seconds < 30


class _Lost(torch.autograd.Function):
    """A backward pass in which an all-gather of the shards fails, as it does in FSDP."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed")


def test_lost_rank_in_a_backward_pass_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(stage: PipelineStage) -> None:
        x = torch.ones(1, requires_grad=True)
        stage_backward((_Lost.apply(x),), (torch.ones(1),), (x,))

    monkeypatch.setattr(PipelineStage, "backward_one_chunk", backward)
    monkeypatch.setattr(PipelineStage, "backward_weight_one_chunk", backward)
    stage = schedules._Stage.__new__(schedules._Stage)
    stage._computing = lambda phase: nullcontext()
    for name in ("backward_one_chunk", "backward_weight_one_chunk"):
        with pytest.raises(RankLostError), lost_peers():
            getattr(stage, name)()


@pytest.mark.parametrize(
    ("mistake", "rank", "sentence"),
    [
        ("no call", 0, "loss() did not call its model"),
        ("two calls", 1, "loss() may call it once"),
        ("shapes", 0, "have different shapes, such as"),
        ("shapes", 1, "have different shapes, such as"),
    ],
)
def test_task_that_pipeline_cannot_run_is_rejected(mistake: str, rank: int, sentence: str) -> None:
    assert sentence in _of_mistake(mistake)[rank]


@functools.cache
def _of_mistake(mistake: str) -> list[str]:
    return on_torch_ranks(2, fail_in_the_task, mistake)


class _Uncut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


class _Shared(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0][0].weight = self.layers[3][0].weight  # type: ignore[index]


class _Forgotten(Normed):
    first_stage = last_stage = ("nothing",)


@pytest.mark.parametrize(
    ("model", "stages", "sentence"),
    [
        (_Uncut, 2, "it has no embed, apply_block, output, first_stage, last_stage"),
        (Normed, 5, "5 stages needs as many blocks, and the model has 4"),
        (_Shared, 2, "several blocks share the model's parameter layers.0.0.weight"),
        (_Forgotten, 2, "no stage has the model's parameter table.weight"),
    ],
)
def test_model_that_cannot_be_split_into_stages_is_rejected(
    model: type[nn.Module], stages: int, sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        CutModel(object(), model(), Layout(stages), 0)
