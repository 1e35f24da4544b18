"""Micro-batches by length: each sample once per epoch, within the budget, on any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.audit.lineage import check_buckets
from hvdtrain.config import parse
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.buckets import SampleBuckets, lengths_of
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.data.validation import ValidationData
from hvdtrain.errors import UserError
from hvdtrain.process.resolve import with_steps
from hvdtrain.runtime.mesh import Group
from hvdtrain.tasks import Datasets
from tests.support.ragged import TRAIN, VALIDATION, Ragged, Sentences

SEED, PER_STEP = 3, 4
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=80)


def _buckets(lengths: list[int], max_tokens: int = 60) -> SampleBuckets:
    return SampleBuckets(np.array(lengths), max_tokens, SEED)


@settings(deadline=None)
@given(lengths=LENGTHS, max_tokens=st.integers(60, 200), epoch=st.integers(0, 5))
def test_epoch_uses_every_sample_once_within_the_token_budget(
    lengths: list[int], max_tokens: int, epoch: int
) -> None:
    buckets = _buckets(lengths, max_tokens)
    begin = epoch * len(buckets)
    micro_batches = [buckets.micro_batch(begin + i) for i in range(len(buckets))]
    assert sorted(i for samples in micro_batches for i in samples) == list(range(len(lengths)))
    for position, samples in enumerate(micro_batches, start=begin):
        longest = max(lengths[i] for i in samples)
        assert longest * len(samples) <= max_tokens
        used = buckets.used([position])
        assert used == (len(samples), sum(lengths[i] for i in samples), longest * len(samples))
        assert buckets.samples_of(position, 1) == len(samples)


@pytest.mark.slow
@settings(deadline=None)
@given(lengths=LENGTHS, start=st.integers(0, 40), stop=st.integers(0, 200))
def test_audit_counts_the_samples_that_were_used(lengths: list[int], start: int, stop: int) -> None:
    buckets = _buckets(lengths)
    order, stop = buckets.order, max(start, stop)
    assert order.samples_before(stop) == buckets.used(range(stop)).samples
    check = check_buckets(start, stop, order)
    assert (check.start, check.stop) == (order.samples_before(start), order.samples_before(stop))
    assert check.all_checked and not check.repeated and check.size == len(lengths)
    assert check_buckets(start, stop, order, limit=30).checked <= check.checked


def test_repeated_samples_of_a_bucket_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    order = _buckets([3] * 50 + [20] * 9).order
    monkeypatch.setattr(order, "_seed", order._seed)
    monkeypatch.setattr("hvdtrain.data.buckets.permute", lambda p, size, seed, epoch: p // 2)
    assert check_buckets(0, 3 * len(order), order).repeated == [0, 1, 2]


def test_buckets_limit_padding_and_are_reshuffled_every_epoch() -> None:
    lengths = np.random.default_rng(0).integers(10, 500, size=5000)
    buckets = SampleBuckets(lengths, 4000, SEED)
    used = buckets.used(range(len(buckets)))
    assert used.samples == 5000 and 1 - used.tokens / used.slots < 0.06
    assert used.slots / len(buckets) > 0.9 * 4000  # the budget is used well
    first, second = (
        {frozenset(buckets.micro_batch(epoch * len(buckets) + i)) for i in range(len(buckets))}
        for epoch in (0, 1)
    )
    assert len(first & second) < 20


def _loaded(rank: int, ranks: int, workers: int, start: int = 0) -> dict[tuple[int, int], Tensor]:
    """Return (step, number) -> samples that a rank loads in three steps from `start` on; reassigned
    once."""
    data = Sentences(TRAIN)
    loader = TrainLoader(
        data,
        0,
        BatchConfig(max_tokens=90, per_step=PER_STEP),
        Assignment(PER_STEP, Group(rank, ranks)),
        SEED,
        Loading(LoaderConfig(workers), collate=Ragged().collate),
        SampleBuckets(data.lengths, 90, SEED),
    )
    found = {}
    for step in range(start, start + 3):
        if step == 1 and ranks == 2:
            loader.assignment.change([1, 3])
        batches = list(loader.next_step(step))
        found |= {(step, j): batch for j, batch in zip(loader.assignment, batches, strict=True)}
    loader.close()
    return found


def test_micro_batches_are_independent_of_ranks_workers_and_start_step() -> None:
    whole = _loaded(0, 1, workers=0)
    assert len(whole) == 3 * PER_STEP
    for ranks, workers in ((2, 0), (3, 2), (6, 0)):
        shared: dict[tuple[int, int], Tensor] = {}
        for rank in range(ranks):
            shared |= _loaded(rank, ranks, workers)
        assert shared.keys() == whole.keys()
        assert all(torch.equal(shared[place], whole[place]) for place in whole)
    later = _loaded(0, 1, workers=0, start=2)
    assert all(torch.equal(later[2, j], whole[2, j]) for j in range(PER_STEP))


@pytest.mark.parametrize("workers", [0, 2])
def test_bucketed_validation_uses_every_sample_once(workers: int) -> None:
    data = Sentences(VALIDATION)
    loading = Loading(LoaderConfig(workers), collate=Ragged().collate)
    validation = ValidationData(data, SEED, loading, SampleBuckets(data.lengths, 90, SEED))
    places = validation.places(100, BatchConfig(max_tokens=90, per_step=2))
    batches = [pair for rank in range(3) for pair in validation.batches(places, Group(rank, 3))]
    assert sum(count for count, _ in batches) == VALIDATION
    assert all(len(batch) == count and batch.numel() <= 90 for count, batch in batches)
    assert len(validation.places(2, BatchConfig(max_tokens=90, per_step=2))) == 4


class _Lengths(Dataset[Any]):
    def __init__(self, lengths: object) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            _Lengths([5, 61, 7]),
            r"max_tokens 60: sample 1 of the training data has 61 tokens",
        ),
        (
            _Lengths([5, 6]),
            r"must be 3 integers >= 0, one for each sample, not int64 of shape",
        ),
        (_Lengths([5, -6, 1]), r"must be 3 integers >= 0"),
        (_Lengths([0.5, 1.0, 2.0]), r"must be 3 integers >= 0, .*float64"),
        ([0] * 3, r"the training data \(list\) has no `lengths`"),
    ],
)
def test_invalid_lengths_are_rejected(dataset: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        lengths_of(dataset, 60, "training")
    assert lengths_of(_Lengths(lambda: [1, 2, 3]), 60, "training").tolist() == [1, 2, 3]


def test_steps_of_bucketed_epochs_are_rounded_up() -> None:
    buckets = _buckets([10] * 61)  # 6 per micro-batch: 11 micro-batches
    flags = ["--batch.max_tokens", "60", "--batch.per_step", "4", "--train.duration", "2epochs"]
    config = with_steps(parse(flags).config, Datasets([0] * 61), buckets)  # type: ignore[arg-type]
    assert config.train.steps == 6
