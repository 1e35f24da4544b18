"""Decisions of replays: who checks whom, what a difference means, and what is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from hvdtrain.config import Config
from hvdtrain.config_checks import check_together
from hvdtrain.data.assignment import Assignment, even
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import TrainLoader
from hvdtrain.engine.config import IntegrityConfig
from hvdtrain.engine.integrity import SKETCH, TensorHash
from hvdtrain.engine.replay import (
    GradientFingerprint,
    GradientHash,
    ReplayPlan,
    Verdict,
    Vote,
    checkers,
    distance,
    first_of,
    judge,
)
from hvdtrain.errors import UserError
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.process.resolve import with_replays
from hvdtrain.runtime.mesh import Group
from hvdtrain.tasks import Datasets

# --- who checks whom ----------------------------------------------------------

HOST_SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def _hosts(sizes: list[int]) -> list[str]:
    return [f"node{number}" for number, size in enumerate(sizes) for _ in range(size)]


@given(HOST_SIZES, st.integers(0, 1000), st.randoms(use_true_random=False))
def test_each_rank_is_checked_by_one_rank_of_another_host(
    sizes: list[int], turn: int, random: Any
) -> None:
    hosts = _hosts(sizes)
    random.shuffle(hosts)
    found = checkers(hosts, range(len(hosts)), turn)
    if len(hosts) < 2:
        assert not found
        return
    assert {*found} == {*found.values()} == {*range(len(hosts))}
    assert all(subject != checker for subject, checker in found.items())
    within = sum(hosts[subject] == hosts[checker] for subject, checker in found.items())
    # Ranks of a host that has more than half of the ranks cannot all have a partner elsewhere.
    assert within == max(0, 2 * max(sizes) - len(hosts))


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 100))
def test_checkers_rotate_over_the_other_hosts(nodes: int, each: int, turn: int) -> None:
    hosts = _hosts([each] * nodes)
    rounds = [checkers(hosts, range(len(hosts)), turn + n) for n in range(len(hosts))]
    for subject in range(len(hosts)):
        met = {hosts[one[subject]] for one in rounds}
        assert met == {*hosts} - {hosts[subject]}


@given(HOST_SIZES, st.integers(1, 40), st.integers(0, 30), st.integers(1, 4))
def test_loader_reads_the_replayed_micro_batch_first(
    sizes: list[int], micro_batches: int, begin: int, every: int
) -> None:
    hosts = _hosts(sizes)
    counts, ranks = even(micro_batches, len(hosts)), len(hosts)
    plans = [ReplayPlan(every, rank, hosts) for rank in range(ranks)]
    for step in range(begin, begin + 3):
        replayed = [plan.replayed(step, counts) for plan in plans]
        if (step + 1) % every or min(ranks, micro_batches) < 2:
            assert replayed == [None] * ranks
            continue
        for subject, checker in plans[0].checkers(step, counts).items():
            assert replayed[checker] == first_of(subject, counts)
            assert counts[subject] and counts[checker]


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[int, float]:  # type: ignore[override]
        return index, torch.rand(()).item()


@pytest.mark.parametrize("begin", [0, 3])
def test_replayed_batch_and_its_random_numbers_are_those_of_its_rank(begin: int) -> None:
    batch, ranks = BatchConfig(global_size=10, micro_size=2), 3
    plans = [ReplayPlan(2, rank, ["a", "b", "c"]) for rank in range(ranks)]

    def loader(rank: int) -> TrainLoader:
        assignment = Assignment(batch.micro_batches, Group(rank, ranks))
        replayed = plans[rank].replayed
        return TrainLoader(_Numbers(), begin * 10, batch, assignment, 7, replayed=replayed)

    loaders = [loader(rank) for rank in range(ranks)]
    counts = loaders[0].assignment.counts
    for step in range(begin, begin + 4):
        taken = [
            [(numbers.tolist(), draws.tolist(), torch.rand(1).item()) for numbers, draws in found]
            for found in (one.next_step(step) for one in loaders)
        ]
        again = loaders[1].load(step, 2, step * 10)
        expected = (again[0].tolist(), again[1].tolist(), torch.rand(1).item())
        pairs = plans[0].checkers(step, counts)
        assert bool(pairs) == (step % 2 == 1)
        own = [batches[1:] if pairs else batches for batches in taken]
        assert [len(batches) for batches in own] == counts
        assert own[2][0] == expected
        for subject, checker in pairs.items():
            assert taken[checker][0] == own[subject][0]
    before = [numbers.tolist() for numbers, _ in loaders[0].next_step(begin + 4)]
    loaders[0].go_back(10 * (begin + 4))
    assert [numbers.tolist() for numbers, _ in loaders[0].next_step(begin + 4)] == before


# --- fingerprints -------------------------------------------------------------


HASH = TensorHash()


def _fingerprint(gradients: Mapping[str, torch.Tensor]) -> GradientFingerprint:
    hashed = GradientHash(HASH)
    for name, gradient in gradients.items():
        hashed.add(name, gradient)
    return hashed.fingerprint()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99), st.integers(0, 15))
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype, place: int, bit: int) -> None:
    torch.manual_seed(0)
    gradients = {"a": torch.randn(10, 10).to(dtype), "b": torch.randn(3)}
    before = _fingerprint(gradients)
    reordered = dict(reversed(gradients.items()))
    assert _fingerprint(reordered) == before
    flipped = gradients["a"].view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    flipped.view(-1)[place] ^= (1 << bit) - (1 << 16 if bit == 15 and dtype != torch.float32 else 0)
    assert _fingerprint(gradients).digest != before.digest


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 100_000), st.floats(1e-6, 10.0), st.integers(0, 100))
def test_sketch_estimates_the_relative_distance(size: int, noise: float, seed: int) -> None:
    torch.manual_seed(seed)
    gradient = torch.randn(size, dtype=torch.float64)
    other = gradient + noise * torch.randn(size, dtype=torch.float64)
    found = distance(_fingerprint({"a": other}).sketch, _fingerprint({"a": gradient}).sketch)
    expected = float((other - gradient).norm() / gradient.norm())
    assert expected / 5 < found < 5 * expected


def test_distance_of_gradients_that_are_not_finite() -> None:
    nan, one, two = [math.nan, 1.0], [1.0, 1.0], [1.0, 2.0]
    assert distance(nan, nan) == 0.0 and distance(nan, one) == math.inf
    assert distance(one, one) == 0.0 and distance([0.0], [0.0]) == 0.0
    assert distance(two, one) == pytest.approx(1 / math.sqrt(2))


# --- verdicts -----------------------------------------------------------------


def _of(value: float) -> GradientFingerprint:
    """Return the fingerprint of a gradient that is `value` times another."""
    return GradientFingerprint(f"{value:.17g}", [value * (-1.0) ** n for n in range(SKETCH)])


def _votes(*values: tuple[float, float], kinds: str = "") -> list[Vote]:
    kinds = kinds or "x" * len(values)
    return [
        Vote(rank, kind, (_of(first), _of(second)))
        for rank, (kind, (first, second)) in enumerate(zip(kinds, values, strict=True))
    ]


RIGHT, WRONG = (1.0, 1.0), (1.25, 1.25)


@given(
    ranks=st.integers(3, 20),
    wrong=st.integers(0, 19),
    checks=st.booleans(),
    later=st.lists(st.sampled_from([1.0, 1.25, 7.0, math.nan]), min_size=2, max_size=2),
)
def test_wrong_rank_is_named_whether_its_error_repeats_or_not(
    ranks: int, wrong: int, checks: bool, later: list[float]
) -> None:
    wrong %= ranks
    partner = (wrong + 1) % ranks
    votes = _votes(*[RIGHT] * wrong, (later[0], later[1]), *[RIGHT] * (ranks - wrong - 1))
    verdict = judge(votes, {wrong: _of(1.25), partner: _of(1.0)})
    assert (verdict.kind, verdict.ranks) == ("wrong", (wrong,))
    assert verdict.again == (later != [1.0, 1.0])
    assert {*verdict.agreed} == {*range(ranks)} - {wrong}


TWO_VOTES = {
    "the error is not repeated": (_votes(RIGHT, RIGHT), 1.25, "wrong"),
    "each repeats its own": (_votes(RIGHT, WRONG), 1.25, "undecided"),
    "one of them is unsteady": (_votes(RIGHT, (1.25, 1.5)), 1.25, "undecided"),
    "no kernel is reproducible": (_votes((1.0, 1.0001), (1.0002, 1.0003)), 1.0004, "inexact"),
    "unlike devices": (_votes(RIGHT, (1.001, 1.001), kinds="xy"), 1.001, "inexact"),
    "unlike devices, not repeated": (_votes(RIGHT, (1.001, 1.001), kinds="xy"), 1.25, "wrong"),
    "unlike devices, far apart": (_votes(RIGHT, WRONG, kinds="xy"), 1.25, "undecided"),
    "a value that changes with each call": (_votes((1.0, 2.0), (3.0, 4.0)), 5.0, "irreproducible"),
    "one rank cannot repeat it": (_votes(RIGHT), 1.25, "undecided"),
}


@pytest.mark.parametrize("case", TWO_VOTES)
def test_two_ranks_name_one_only_if_they_agree_later(case: str) -> None:
    votes, found, expected = TWO_VOTES[case]
    verdict = judge(votes, {0: votes[0].found[0], 1: _of(found)})
    assert verdict.kind == expected
    assert verdict.ranks == {"wrong": (1,), "undecided": (0, 1)}.get(expected, ())


@given(
    st.lists(st.floats(-1e-6, 1e-6), min_size=6, max_size=6, unique=True),
    st.floats(1e-2, 10.0),
    st.booleans(),
)
def test_error_beyond_the_measured_bound_is_named_on_unlike_devices(
    noise: list[float], error: float, again: bool
) -> None:
    pairs = [(1 + a, 1 + b) for a, b in zip(noise, reversed(noise), strict=True)]
    right = _votes(*pairs, kinds="xxyyzz")
    measured = judge(right, {0: right[0].found[0], 1: right[1].found[0]})
    assert measured.kind == "inexact" and 0 < measured.bound < 1e-4, "rounding was accused"
    votes = right
    if again:
        votes = _votes(*pairs[:5], (1 + error, 1 + error), kinds="xxyyzz")
    original = {1: right[1].found[0], 5: _of(1 + error)}
    verdict = judge(votes, original, measured.bound)
    assert (verdict.kind, verdict.ranks, verdict.again) == ("wrong", (5,), again)


@given(st.floats(0.5, 1.5), st.booleans())
def test_rare_rounding_errors_accuse_no_rank(value: float, own: bool) -> None:
    # A kernel that adds in the order of its threads may return other bits once, and not again.
    votes, found = _votes(RIGHT, RIGHT, RIGHT), {0: _of(1.0), 1: _of(1.0)}
    found[own] = _of(value)
    verdict = judge(votes, found, reproducible=False)
    if abs(value - 1.0) < 0.04:
        assert verdict.kind == "inexact" and verdict.bound >= abs(value - 1.0)
    if abs(value - 1.0) > 0.06:
        assert (verdict.kind, verdict.ranks) == ("wrong", (int(own),))
    repeated = judge(_votes(RIGHT, (1.001, 1.001), RIGHT), found, reproducible=False)
    assert (repeated.kind, repeated.ranks, repeated.again) == ("wrong", (1,), True)


def test_gradients_that_depend_on_the_rank_accuse_no_rank() -> None:
    votes = _votes((1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0))
    assert judge(votes, {0: _of(1.0), 1: _of(5.0)}) == Verdict("irreproducible", bound=0.4)


def test_jurors_are_one_rank_per_host_and_the_two_that_differ() -> None:
    plan = ReplayPlan(1, 0, _hosts([2, 2, 2, 1]))
    assert plan.jurors(subject=1, checker=2) == [1, 2, 4, 6]
    assert ReplayPlan(1, 0, _hosts([2, 2])).jurors(0, 2) == [0, 1, 2, 3]


# --- the configuration --------------------------------------------------------


class _Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_default_replays_only_what_can_be_replayed() -> None:
    samples, stream = Datasets(_Numbers()), Datasets(_Stream())
    default, local_sgd = Config(), Config(exchange=ExchangeConfig(sync_every=4))
    assert with_replays(default, samples).integrity.replay_every == 200
    assert with_replays(default, stream).integrity.replay_every == 0
    assert with_replays(local_sgd, samples).integrity.replay_every == 0
    assert check_together(local_sgd) is None  # type: ignore[func-returns-value]


def test_replays_of_an_iterable_dataset_are_refused_with_one_message() -> None:
    config = Config(integrity=IntegrityConfig(5))
    with pytest.raises(UserError, match=r"integrity.replay_every 5: the training data is an Iter"):
        with_replays(config, Datasets(_Stream()))
    assert with_replays(config, Datasets(_Numbers())) is config
