"""Sequential orders and mixtures: the pure functions, their loader and their audit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from hvdtrain.audit.lineage import check_order
from hvdtrain.config import parse
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import PERIOD, BatchConfig, LoaderConfig, apportion
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.data.mixture import Mixture, fingerprint_of
from hvdtrain.data.order import (
    Interleaving,
    MixedOrder,
    SequentialOrder,
    build_order,
    check_specification,
    same_until,
    specification_of,
)
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.errors import UserError
from hvdtrain.process.resolve import build_buckets, build_specification, with_steps
from hvdtrain.runtime.mesh import Group
from hvdtrain.tasks import Datasets

SHARDS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)
SEEDS = st.integers(0, 2**64)
WEIGHTS = st.lists(st.floats(0.01, 1), min_size=1, max_size=5)
no_deadline = settings(deadline=None, max_examples=30)


# --- of torch -----------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_order_of_torch_is_that_of_its_distributed_sampler(ranks: int) -> None:
    size, seed = 30, 7
    order = build_order({"size": size, "permutation": "torch"}, seed, global_size=6)
    whole = order.samples(0, 3 * size)
    for epoch in range(3):
        samplers = [DistributedSampler([0] * size, ranks, rank, seed=seed) for rank in range(ranks)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        steps = zip(*samplers, strict=True)
        expected = [sample for step in steps for sample in step]
        assert whole[epoch * size : (epoch + 1) * size].tolist() == expected
    assert np.array_equal(order.samples(size - 4, size + 9), whole[size - 4 : size + 9])
    assert not order.samples(5, 5).size
    with pytest.raises(ValueError, match="permutation of the order"):
        check_specification({"size": 3, "permutation": "numpy"})


# --- sequential ---------------------------------------------------------------


@no_deadline
@given(
    shards=SHARDS, buffer=st.integers(1, 90), size=st.integers(1, 9), seed=SEEDS,
    epoch=st.integers(0, 2**30), cuts=st.lists(st.integers(0, 480), max_size=5),
)  # fmt: skip
def test_sequential_epoch_has_each_sample_once_wherever_it_is_read_from(
    shards: list[int], buffer: int, size: int, seed: int, epoch: int, cuts: list[int]
) -> None:
    order = SequentialOrder(shards, buffer, seed, size)
    begin, end = epoch * order.size, (epoch + 1) * order.size
    whole = order.samples(begin, end)
    assert sorted(whole.tolist()) == list(range(sum(shards)))
    borders = sorted({begin, end, *(begin + cut % order.size for cut in cuts)})
    fresh = SequentialOrder(shards, buffer, seed, size)
    parts = [fresh.samples(a, b) for a, b in reversed([*pairwise(borders)])]
    assert np.concatenate(parts[::-1]).tolist() == whole.tolist()


def test_each_place_of_the_batch_reads_one_run_of_a_window() -> None:
    size, steps, epoch = 8, 16, 5  # an epoch of 1001 samples begins inside a step
    order = SequentialOrder([1001], size * steps, 3, size)
    begin = epoch * 1001
    for window in range(7):
        first = window * size * steps
        positions = range(begin + first, begin + first + size * steps)
        samples = order.samples(positions.start, positions.stop).tolist()
        for place in range(size):
            own = [s for p, s in zip(positions, samples, strict=True) if p % size == place]
            run = range(first + place * steps, first + (place + 1) * steps)
            assert sorted(own) == [*run] and own != [*run]


def test_shards_are_permuted_in_each_epoch_and_read_as_a_whole() -> None:
    order = SequentialOrder([100] * 20, 50, 3, 5)
    shards = [(order.samples(e * 2000, (e + 1) * 2000) // 100)[::100].tolist() for e in range(2)]
    assert sorted(shards[0]) == sorted(shards[1]) == [*range(20)] and shards[0] != shards[1]
    for epoch in range(2):
        samples = order.samples(epoch * 2000, (epoch + 1) * 2000)
        assert np.abs(np.diff(samples[::50])).max() > 100  # windows follow the permuted shards
        assert all(len({*(samples[at : at + 100] // 100)}) == 1 for at in range(0, 2000, 100))


def test_sequential_and_mixed_orders_are_stable_across_versions() -> None:
    # A run that resumes with a new version continues in the same order.
    order = SequentialOrder([4, 3, 5], 6, 1234, 2)
    assert order.samples(0, 14).tolist() == [0, 4, 1, 3, 2, 5, 7, 11, 6, 9, 8, 10, 8, 4]
    mixed = build_order(_specification([30, 20], [(0, [600, 400])]), 1234, 4)
    assert mixed.samples(0, 12).tolist() == [14, 39, 1, 48, 11, 20, 30, 12, 37, 0, 27, 40]


@pytest.mark.parametrize("context", [4, 7, 16])
def test_token_windows_belong_to_the_file_in_which_they_begin(context: int) -> None:
    arrays = [np.arange(n, dtype=np.uint16) for n in (33, 5, 0, 40)]
    windows = TokenWindows(arrays, context)
    begins = [
        int(np.searchsorted(windows.starts, i * context, "right")) for i in range(len(windows))
    ]
    assert windows.shard_samples.tolist() == [begins.count(file + 1) for file in range(4)]


class _Numbers(Dataset[int]):
    def __init__(self, size: int, first: int = 0, shards: list[int] | None = None) -> None:
        self.size, self.first = size, first
        if shards is not None:
            self.shard_samples = shards

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.size
        return self.first + index


@pytest.mark.parametrize(("workers", "world_size"), [(0, 1), (0, 3), (2, 2)])
@pytest.mark.parametrize("mixed", [False, True])
def test_global_batch_is_independent_of_ranks_workers_and_restart(
    mixed: bool, workers: int, world_size: int
) -> None:
    web, code = _Numbers(50, shards=[20, 30]), _Numbers(35, 100, shards=[5, 10, 20])
    data: Dataset[Any] = (
        Mixture({"web": web, "code": code}, {"web": 2, "code": 1}) if mixed else web
    )
    config = LoaderConfig(workers=workers, order="sequential", shuffle_buffer=24)
    order = build_order(specification_of(data, config), 5, 12)
    for start in (0, 7):
        expected = order.samples(start * 12, (start + 2) * 12)
        seen: dict[int, list[int]] = {}
        for rank in range(world_size):
            assignment = Assignment(4, Group(rank, world_size))
            batch, loading = BatchConfig(12, 3), Loading(config)
            loader = TrainLoader(data, start * 12, batch, assignment, 5, loading)
            for step in (start, start + 1):
                for j, found in zip(assignment, loader.next_step(step), strict=True):
                    numbers, sources = found if mixed else (found, (found >= 100).long())
                    assert torch.equal(numbers >= 100, sources == 1)
                    seen[step * 4 + j] = torch.where(sources == 1, numbers - 50, numbers).tolist()
            loader.close()
        assert [n for key in sorted(seen) for n in seen[key]] == expected.tolist()


# --- mixtures -----------------------------------------------------------------


def _specification(sizes: list[int], counts: list[tuple[int, list[int]]]) -> dict[str, Any]:
    sources = {f"s{i}": {"size": size} for i, size in enumerate(sizes)}
    return {"sources": sources, "counts": [[step, each] for step, each in counts]}


@no_deadline
@given(WEIGHTS)
def test_counts_differ_from_the_exact_shares_by_less_than_one(weights: list[float]) -> None:
    counts = apportion({str(i): weight for i, weight in enumerate(weights)}, "weights")
    assert sum(counts) == PERIOD
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - PERIOD * weight / math.fsum(weights)) < 1 + 1e-9


@no_deadline
@given(weights=WEIGHTS, start=st.integers(0, 2**40))
def test_any_thousand_samples_have_the_counts_of_their_sources(
    weights: list[float], start: int
) -> None:
    counts = apportion({str(i): weight for i, weight in enumerate(weights)}, "weights")
    interleaving = Interleaving([(0, counts)])
    found = np.bincount(interleaving.sources(start, start + PERIOD), minlength=len(counts))
    assert found.tolist() == counts
    before, after = interleaving.before(start), interleaving.before(start + 77)
    used = np.bincount(interleaving.sources(start, start + 77), minlength=len(counts))
    assert (np.array(after) - before).tolist() == used.tolist()


@no_deadline
@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    changes=st.lists(st.integers(1, 60), max_size=3, unique=True),
    shards=st.booleans(), global_size=st.integers(1, 24), seed=SEEDS, data=st.data(),
)  # fmt: skip
def test_sources_keep_exact_epochs_through_changes_of_weights(
    sizes: list[int], changes: list[int], shards: bool, global_size: int, seed: int, data: Any
) -> None:
    weights = st.lists(st.floats(0, 1), min_size=len(sizes), max_size=len(sizes)).filter(
        lambda found: sum(found) > 0.1 and all(w == 0 or w > 0.01 for w in found)
    )
    phases = []
    for step in (0, *sorted(changes)):
        drawn = data.draw(weights)
        phases.append((step, apportion({str(i): w for i, w in enumerate(drawn)}, "weights")))
    specification = _specification(sizes, phases)
    if shards:
        for source in specification["sources"].values():
            source |= {"shards": [[source.pop("size"), 1], [3, 2]], "shuffle_buffer": 16}
    order = build_order(specification, seed, global_size)
    assert isinstance(order, MixedOrder)
    whole, at = order.samples(0, 80 * global_size), 0
    cut = data.draw(st.integers(0, len(whole)))
    again = build_order(specification, seed, global_size)
    assert again.samples(cut, len(whole)).tolist() == whole[cut:].tolist()
    for source in order.orders.values():
        own = whole[(whole >= at) & (whole < at + source.size)] - at
        for epoch in range(0, len(own), source.size):
            found = own[epoch : epoch + source.size].tolist()
            assert len({*found}) == len(found)
        at += source.size


@no_deadline
@given(step=st.integers(1, 30), seed=SEEDS)
def test_changed_future_weights_leave_the_past_as_it_was(step: int, seed: int) -> None:
    before = _specification([400, 300], [(0, [700, 300]), (40, [300, 700])])
    for source in before["sources"].values():
        source |= {"shards": [[source.pop("size"), 1]], "shuffle_buffer": 64}
    after = {**before, "counts": [[0, [700, 300]], [step, [100, 900]]]}
    assert same_until(step, before, after) and not same_until(step + 1, before, after)
    one, other = (build_order(found, seed, 8) for found in (before, after))
    assert one.samples(0, step * 8).tolist() == other.samples(0, step * 8).tolist()
    both = other.samples(0, 60 * 8)
    assert isinstance(other, MixedOrder)
    web = both[both < 400][:400]
    assert len({*web.tolist()}) == len(web)  # no sample of its first epoch twice


@no_deadline
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=4), data=st.data())
def test_validation_has_each_sample_once_in_proportion(sizes: list[int], data: Any) -> None:
    weights = data.draw(st.lists(st.floats(0.05, 1), min_size=len(sizes), max_size=len(sizes)))
    names = [f"s{i}" for i in range(len(sizes))]
    sources = {
        n: _Numbers(size, 1000 * i) for i, (n, size) in enumerate(zip(names, sizes, strict=True))
    }
    later = {names[0]: 0.0} if len(names) > 1 else {}  # a source that begins later
    shares = dict(zip(names, weights, strict=True))
    mixture = Mixture(sources, shares | later, {9: shares})
    found = mixture.validation(sources)
    samples = [found[i] for i in range(len(found))]  # type: ignore[arg-type]
    assert all(number // 1000 == source for number, source in samples)
    numbers = sorted(number for number, _ in samples)
    assert numbers == [1000 * i + n for i, size in enumerate(sizes) for n in range(size)]
    with pytest.raises(IndexError):
        found[len(found)]  # type: ignore[arg-type]
    if not later:
        return
    first = [source for _, source in samples[: min(sizes)] if source]
    for i, weight in [*enumerate(weights)][1:]:
        assert abs(first.count(i) - len(first) * weight / sum(weights[1:])) <= len(sizes)


def test_loss_of_a_source_is_the_mean_over_its_samples() -> None:
    data = {name: _Numbers(5) for name in ("web", "code", "rare")}
    mixture = Mixture(data, {"web": 1, "code": 1, "rare": 1})
    sums, sources = torch.tensor([2.0, 3.0, 7.0]), torch.tensor([0, 1, 0])
    found = mixture.losses(sums, sources, 4)
    assert mixture.fingerprint() == Mixture(data, {"web": 1, "code": 2, "rare": 3}).fingerprint()
    assert (
        mixture.fingerprint()
        != Mixture(data | {"web": _Numbers(6)}, dict.fromkeys(data, 1.0)).fingerprint()
    )
    assert fingerprint_of(mixture) == mixture.fingerprint() and fingerprint_of(data["web"]) is None
    assert mixture.metrics == ("loss_web", "loss_code", "loss_rare")
    assert {name: (float(a), float(b)) for name, (a, b) in found.items()} == {
        "loss_web": (9.0, 8.0), "loss_code": (3.0, 4.0), "loss_rare": (0.0, 0.0)
    }  # fmt: skip


# --- the audit ----------------------------------------------------------------


@pytest.mark.parametrize("limit", [50, 10**6])
def test_wrong_order_of_a_source_is_detected(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    specification = _specification([130, 70], [(0, [500, 500])])
    specification["sources"]["s1"] = {"shards": [[35, 2]], "shuffle_buffer": 16}
    order = build_order(specification, 3, 8)
    assert isinstance(order, MixedOrder)
    begin, end = order.before(160), order.before(1600)
    checks = [
        check_order(o, *at, limit) for o, *at in zip(order.orders.values(), begin, end, strict=True)
    ]
    assert not any(check.repeated for check in checks)
    assert all(check.all_checked == (limit > 1000) for check in checks)
    monkeypatch.setattr("hvdtrain.data.order.permute", lambda p, size, seed, epoch: p // 2)
    wrong = build_order(specification, 3, 8)
    assert isinstance(wrong, MixedOrder)
    for order_of_source, start, stop in zip(wrong.orders.values(), begin, end, strict=True):
        assert check_order(order_of_source, start, stop).repeated


MIXED = _specification([10, 20], [(0, [300, 700])])
BROKEN: list[dict[str, Any]] = [
    {}, {"size": 0}, {"size": "7"}, {"size": 1 << 63},
    {"shards": [[5, 1]], "shuffle_buffer": 0}, {"shards": [[5, 1]]},
    {"shards": 5, "shuffle_buffer": 2}, {"shards": [[5]], "shuffle_buffer": 2},
    {"shards": [[5, 1 << 40]], "shuffle_buffer": 2}, {"shards": [[0, 3]], "shuffle_buffer": 2},
    {"shards": [[-1, 3]], "shuffle_buffer": 2},
    MIXED | {"counts": []}, MIXED | {"counts": 5}, MIXED | {"counts": [[1, [300, 700]]]},
    MIXED | {"counts": [[0, [300, 600]]]}, MIXED | {"counts": [[0, [1000, 0]]]},
    MIXED | {"counts": [[0, [1300, -300]]]}, MIXED | {"counts": [[0, [300, 700], 1]]},
    MIXED | {"counts": [[0, [300, 700]], [0, [300, 700]]]},
    MIXED | {"sources": [5]}, MIXED | {"sources": {"a": {"size": 1}}},
    MIXED | {"sources": {"a": {}, "b": {"size": 1}}}, MIXED | {"sources": {"a\x1b": {}, "b": {}}},
]  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_specification_that_is_not_hvdtrains_is_rejected(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        check_specification(broken)
    assert check_specification(MIXED) == 30


# --- mistakes of users --------------------------------------------------------

MIXTURE = "--data.mixture={web: {path: a, weight: 1}, code: {path: b, weight: %s}}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([MIXTURE % 0], "data.mixture: the weight of code is 0"),
        ([MIXTURE % -1], "data.mixture: the weight of code must be a number >= 0"),
        ([MIXTURE % ".inf"], "data.mixture: the weight of code must be a number >= 0, not inf"),
        ([MIXTURE % 0.0001], "the weight 0.0001 of code is less than 1 in 1000 samples"),
        (["--data.mixture={web: {path: a}}"], "data.mixture: the weights of web are all 0"),
        (["--data.mixture={web: {weight: 1}}"], "data.mixture.web.path: set files"),
        (["--data.mixture={a b: {path: a, weight: 1}}"], "'a b' cannot name a source"),
        (["--data.mixture={scale: {path: a, weight: 1}}"], "'scale' cannot name a source"),
        (["--data.mixture={web: {paht: a, weight: 1}}"], "data.mixture: unknown key paht"),
        ([MIXTURE % 1, "--data.train=x"], "data.mixture replaces data.train"),
        (["--data.mixture_weights={3: {web: 1}}"], "changes the weights of data.mixture"),
        ([MIXTURE % 1, "--data.mixture_weights={3: {b: 1}}"], "give a weight for each source"),
        (
            [MIXTURE % 1, "--data.mixture_weights={0: {web: 1, code: 1}}"],
            "data.mixture_weights, step 0: weights change at a step >= 1",
        ),
        (["--loader.shuffle_buffer=0"], "shuffle_buffer must lie in [1, 16777216], not 0"),
        (["--loader.order=random"], "loader.order: expected one of"),
        (["--loader.order=sequential", "--batch.max_tokens=90"], "excludes loader.order"),
    ],
)
def test_mistake_in_the_configuration_is_one_message(flags: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_dataset_that_cannot_have_the_order_is_refused() -> None:
    data, both = _Numbers(5), {"web": 1.0, "code": 1.0}
    sequential = LoaderConfig(order="sequential")
    with pytest.raises(UserError, match=r"training data \(_Numbers\) has no `shard_samples`"):
        specification_of(data, sequential)
    with pytest.raises(UserError, match="are 4 samples, but its length is 5"):
        specification_of(_Numbers(5, shards=[1, 3]), sequential)
    with pytest.raises(UserError, match="the source code has no samples"):
        Mixture({"web": data, "code": _Numbers(0)}, both)
    with pytest.raises(UserError, match="there are the sources web, but weights of web, code"):
        Mixture({"web": data}, both)
    with pytest.raises(UserError, match="Mixture weights: the weight of code is 0"):
        Mixture({"web": data, "code": data}, {"web": 1, "code": 0})
    with pytest.raises(UserError, match=r"code .*is an IterableDataset"):
        Mixture({"web": data, "code": _Stream()}, both)
    mixture = Mixture({"web": data, "code": data}, both)
    with pytest.raises(
        UserError, match="has the sources web, code, but the validation data has web"
    ):
        mixture.validation({"web": data})
    for flags, message in (
        (["--train.duration", "2epochs"], "train.duration 2epochs: each source of a mixture has"),
        (["--batch.max_tokens", "90"], "batch.max_tokens 90: a mixture has an order of its own"),
    ):
        config = parse(flags).config
        with pytest.raises(UserError, match=message):
            build_buckets(config, Datasets(mixture))
            with_steps(config, Datasets(mixture))
    config = parse(["--loader.order", "sequential"]).config
    with pytest.raises(UserError, match="IterableDataset, which has its own order: use shuffled"):
        build_specification(config, Datasets(_Stream()))


class _Stream(torch.utils.data.IterableDataset[Tensor]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.zeros(3))
