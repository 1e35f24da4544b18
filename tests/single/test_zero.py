"""A sharded optimizer: shard placement, bitwise equality with the whole optimizer, dead ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.config import parse
from hvdtrain.config_checks import Ranks, check_ranks
from hvdtrain.engine.integrity import ShardHash, TensorHash
from hvdtrain.errors import UserError
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer, set_learning_rate
from hvdtrain.optim.precision import MasterWeights
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.parallel.shards import ShardLostError, ShardMap
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.parallel.zero_state import ShardedOptimizerState, redistribute
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.mesh import Topology
from tests.support.thread_ranks import Death, DiedError, exchange, on_ranks

HOSTS = "aabb"
SIZES = [40, 5, 1, 17]


class _Rank:
    """A process that keeps a model through all of its generations."""

    def __init__(
        self, name: str = "adamw", copies: int = 2, dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = _model(dtype)
        wrap = MasterWeights if dtype == torch.bfloat16 else None
        inner = build_optimizer(OptimConfig(name=name), self.model)  # type: ignore[arg-type]
        self.optimizer = ShardedOptimizer(inner, copies, wrap=wrap)
        self.agreement = Agreement()
        self.step: int | None = None  # None: it does not have the run's state yet

    def train(self, topology: Topology, source: int, target: int, until: int) -> int:
        """Run a generation: receive the state, and step; return after which step it began."""
        if target < 0:
            self.optimizer.install(self.optimizer.assign(topology), topology.rank, 0)
        else:
            if self.step is not None:  # as Generation does
                self.agreement.catch_up(self.step, target)
            redistribute(self.optimizer, topology, target)
            parameters = [p.detach().clone() for p in self.model.parameters()]
            for own, given in zip(
                self.model.parameters(), exchange("model", parameters)[source], strict=True
            ):
                own.data.copy_(given)
        self.step = max(target, 0)
        while self.step < until:
            self._one_step()
        return max(target, 0)

    def _one_step(self) -> None:
        assert self.step is not None
        set_learning_rate(self.optimizer, _rate(self.step))
        exchange("gradients", None)
        self.agreement.wait(self.step + 1, self._take)
        self._take()
        self.optimizer.gather()

    def _take(self) -> None:
        """Take a step as TrainStep does, at once or late."""
        assert self.step is not None
        _set_gradients(self.model, self.step)
        if self.step == 4:
            self.optimizer.skip()
        else:
            self.optimizer.step()
        self.step += 1


def _model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(17))
    model.register_parameter("scalar", nn.Parameter(torch.randn(())))
    model[1].bias.requires_grad_(False)
    return model.to(dtype)


def _rate(step: int) -> float:
    return 0.1 / (step + 1)


def _set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if name == "0.bias" and step < 2:  # frozen
            p.grad = None


def _whole(steps: int, name: str, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
    """Return the state of one process with the whole optimizer."""
    model = _model(dtype)
    optimizer: Optimizer = build_optimizer(OptimConfig(name=name), model)  # type: ignore[arg-type]
    if dtype == torch.bfloat16:
        optimizer = MasterWeights(optimizer)
    for step in range(steps):
        if step != 4:
            _set_gradients(model, step)
            set_learning_rate(optimizer, _rate(step))
            optimizer.step()
    return model, optimizer


def _generation(
    ranks: list[_Rank], hosts: str, until: int, death: Death | None = None
) -> list[object]:
    steps = [-1 if rank.step is None else rank.step for rank in ranks]
    source = steps.index(max(steps))
    work: list[Callable[[], object]] = [
        partial(
            rank.train,
            Topology(number, len(ranks), 0, 1, tuple(hosts)),
            source,
            max(steps),
            until,
        )
        for number, rank in enumerate(ranks)
    ]
    return on_ranks(work, death)


def _assert_whole(
    ranks: list[_Rank], steps: int, name: str = "adamw", dtype: torch.dtype = torch.float32
) -> None:
    """Check that all are bitwise identical to the whole optimizer, and together hold all of its
    state."""
    model, optimizer = _whole(steps, name, dtype)
    expected = [p.detach() for p in model.parameters()]
    order = [p for group in optimizer.param_groups for p in group["params"]]
    for number, rank in enumerate(ranks):
        assert rank.step == rank.optimizer.version == steps
        for own, whole in zip(rank.model.parameters(), expected, strict=True):
            assert torch.equal(own, whole), number
        seen: list[Tensor] = []
        for s, entries in rank.optimizer.entries().items():
            whole_state = optimizer.state[order[s.tensor]]
            assert entries.keys() == {k for k, t in whole_state.items() if t is not None}
            for key, tensor in entries.items():
                whole = whole_state[key]
                part = whole.view(-1)[s.start : s.stop] if tensor.dim() else whole
                assert torch.equal(tensor, part), (number, s, key)
                seen.append(tensor)
        assert seen or not any(optimizer.state.values()), "this rank holds nothing"


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
@pytest.mark.parametrize(("hosts", "copies"), [("a", 2), ("ab", 1), ("aab", 2), ("aabb", 2)])
def test_optimizer_shards_are_bitwise_identical_to_the_whole(
    name: str, hosts: str, copies: int
) -> None:
    ranks = [_Rank(name, copies) for _ in hosts]
    _generation(ranks, hosts, until=7)
    _assert_whole(ranks, 7, name)


def test_master_weight_shards_are_bitwise_identical_to_the_whole() -> None:
    ranks = [_Rank(dtype=torch.bfloat16) for _ in HOSTS]
    _generation(ranks, HOSTS, until=7)
    _assert_whole(ranks, 7, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("hosts", "copies"), [("aabb", 2), ("aabbcc", 2), ("aaabbbccc", 3), ("abcd", 1), ("aab", 2)]
)
def test_each_rank_holds_only_its_share_of_the_state(hosts: str, copies: int) -> None:
    sizes = [1000 * size for size in SIZES]
    shard_map = ShardMap.even(sizes, hosts, copies)
    for rank in range(len(hosts)):
        held = sum(s.stop - s.start for s in shard_map.held_by(rank))
        assert held == pytest.approx(copies / len(hosts) * sum(sizes), rel=0.001)


@pytest.mark.parametrize("hosts", ["aabb", "aaaabbbb", "abab", "aabbcc", "aabbc", "abc"])
def test_copies_of_a_shard_are_on_different_hosts(hosts: str) -> None:
    assert ShardMap.even(SIZES, hosts, 2).sole_hosts(hosts) == []


def test_only_host_of_a_shard_is_named() -> None:
    assert ShardMap.even(SIZES, "aaab", 2).sole_hosts("aaab") == ["a"]


ONE, HOST = (3,), (2, 3)
# When ranks die, which ranks receive the result nevertheless, and the step after which the others
# continue.
DEATHS = {
    "in the exchange": ("gradients", 4, (), 3),
    "in the agreement": ("step.agree", 4, (), 3),
    "in the agreement, which one has received": ("step.agree", 4, (1,), 4),
    "in the agreement, which all have received": ("step.agree", 4, (0, 1, 2), 4),
    "in the gather": ("zero.0", 4, (), 4),
    "in the gather, which one has": ("zero.0", 4, (0,), 4),
    "in the agreement on a step that is skipped": ("step.agree", 5, (0,), 5),
    "in the agreement of the first step": ("step.agree", 1, (0,), 1),
    "in the exchange of the first step": ("gradients", 1, (), 0),
}


@pytest.mark.parametrize("dead", [ONE, HOST, (0,)], ids=["one", "host", "rank 0"])
@pytest.mark.parametrize("death", DEATHS)
def test_no_step_or_shard_is_lost_when_ranks_die(death: str, dead: tuple[int, ...]) -> None:
    at, count, received, reached = DEATHS[death]
    received = (
        tuple(r for r in received if r not in dead)
        or tuple(r for r in range(len(HOSTS)) if r not in dead)[: len(received)]
    )
    ranks = [_Rank() for _ in HOSTS]
    results = _generation(ranks, HOSTS, 7, Death(dead, at, count, received))
    assert [r for r, result in enumerate(results) if isinstance(result, DiedError)] == [*dead]
    left = [rank for number, rank in enumerate(ranks) if number not in dead]
    hosts = "".join(host for number, host in enumerate(HOSTS) if number not in dead)
    began = _generation(left, hosts, 6)
    assert began == [reached] * len(left), "a step was lost"
    _assert_whole(left, 6)
    grown = [*left, *(_Rank() for _ in dead)]
    _generation(grown, hosts + "b" * len(dead), 8)
    _assert_whole(grown, 8)


@pytest.mark.parametrize("at", ["zero.held", "zero.parameters", "zero.state", "model"])
@pytest.mark.parametrize("first", ["step.agree", "zero.0"])
def test_no_step_or_shard_is_lost_when_a_rank_dies_in_a_state_transfer(first: str, at: str) -> None:
    ranks = [_Rank(copies=3) for _ in "abcd"]
    _generation(ranks, "abcd", 7, Death((3,), first, 4, (1, 2)))
    results = _generation(ranks[:3], "abc", 7, Death((2,), at))
    assert isinstance(results[2], DiedError) and isinstance(results[0], RankLostError)
    assert _generation(ranks[:2], "ab", 6) == [4, 4], "a step was lost"
    _assert_whole(ranks[:2], 6)


@pytest.mark.parametrize(("copies", "dead"), [(1, (2,)), (2, (0, 2))])
def test_shard_without_a_holder_is_reported_as_lost(copies: int, dead: tuple[int, ...]) -> None:
    ranks = [_Rank(copies=copies) for _ in HOSTS]
    _generation(ranks, HOSTS, 7, Death(dead, "gradients", 4))
    left = [rank for number, rank in enumerate(ranks) if number not in dead]
    with pytest.raises(ShardLostError):
        _generation(left, "a" * len(left), 6)


def _differing(ranks: list[_Rank]) -> list[int]:
    hashes = [
        ShardHash(ShardedOptimizerState(rank.optimizer, rank.model), TensorHash()) for rank in ranks
    ]
    return hashes[0].differing([own.own() for own in hashes])


@pytest.mark.parametrize("entry", ["exp_avg", "step"])
def test_damaged_copy_of_a_shard_is_detected(entry: str) -> None:
    ranks = [_Rank() for _ in HOSTS]
    _generation(ranks, HOSTS, until=3)
    assert _differing(ranks) == []
    entries = ranks[2].optimizer.entries()
    s = ranks[2].optimizer.first_held()[0]
    entries[s][entry].view(-1).view(torch.int32)[0] ^= 1 << 12
    (holders,) = (own for own in ranks[0].optimizer.shard_map.holders if own[0] == 2)
    assert _differing(ranks) == sorted(holders)


def test_damaged_parameters_are_detected_after_the_next_step() -> None:
    ranks = [_Rank() for _ in HOSTS]
    _generation(ranks, HOSTS, until=3)
    number, start, _ = ranks[2].optimizer.first_held()[0]
    with torch.no_grad():
        ranks[2].optimizer.flat(number).view(torch.int32)[start] ^= 1 << 20
    work = [partial(_continue, rank) for rank in ranks]
    on_ranks(work)
    (holders,) = (own for own in ranks[0].optimizer.shard_map.holders if own[0] == 2)
    assert _differing(ranks) == sorted(holders)


def _continue(rank: _Rank) -> None:
    rank._one_step()


EXCLUDED = {
    "--optim.name muon": "requires optim.name adamw, adam, sgd or lion",
    "--optim.name adafactor": "requires optim.name adamw, adam, sgd or lion",
    "--optim.name adamw8bit": "requires optim.name adamw, adam, sgd or lion",
    "--optim.fused true": "excludes optim.fused",
    "--optim.ema_decay 0.9": "excludes optim.ema_decay",
    "--exchange.sync_every 4": "excludes exchange.sync_every",
    "--exchange.reduce adasum": "excludes exchange.reduce adasum",
    "--parallel.shard.degree 2": "use parallel.shard.degree",
}


@pytest.mark.parametrize("flags", EXCLUDED)
def test_options_incompatible_with_zero_are_refused(flags: str) -> None:
    task = ["--task", "tests.support.tasks:Regression"]
    with pytest.raises(UserError, match=re.escape(EXCLUDED[flags])):
        parse([*task, "--parallel.shard.stage", "1", *flags.split()])


def test_more_copies_than_ranks_are_refused() -> None:
    flags = ["--parallel.shard.stage", "1", "--parallel.shard.copies", "3"]
    config = parse(["--task", "tests.support.tasks:Regression", *flags]).config
    with pytest.raises(UserError, match=r"shard\.copies 3 exceeds the 2 ranks"):
        check_ranks(config, Ranks(2, elastic=False))
    for ranks, elastic in ((1, False), (2, True), (3, False)):
        check_ranks(config, Ranks(ranks, elastic))


def test_noncontiguous_parameters_are_refused() -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with pytest.raises(UserError, match="make them contiguous"):
        ShardedOptimizer(torch.optim.SGD(model.parameters()), 2)


def _bytes_held(copies: int, ranks: int) -> int:
    """Return the most AdamW state that any of some ranks keeps."""
    made = [_Rank(copies=copies) for _ in range(ranks)]
    for rank in made:
        rank.model = nn.Sequential(nn.Linear(64, 30), nn.Linear(30, 7))
        inner = torch.optim.AdamW(rank.model.parameters())
        rank.optimizer = ShardedOptimizer(inner, copies)
    _generation(made, "ab" * (ranks // 2) + "a" * (ranks % 2), until=2)
    tensors = [[t for e in rank.optimizer.entries().values() for t in e.values()] for rank in made]
    return max(sum(t.nbytes for t in own) for own in tensors)


def test_state_memory_equals_the_formula() -> None:
    whole = _bytes_held(1, 1)
    for copies, ranks in ((1, 2), (1, 4), (2, 4), (2, 5), (3, 4)):
        found = _bytes_held(copies, ranks) / whole
        assert found == pytest.approx(copies / ranks, rel=0.05), (copies, ranks)
