"""The data loader: the global batch is independent of the world size."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from hvdtrain.config import Config
from hvdtrain.data.assignment import Assignment, by_speed, even
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import StepLoader, TrainLoader, has_own_order, to_device
from hvdtrain.data.order import sample_order
from hvdtrain.data.stream import StreamLoader, StreamState
from hvdtrain.data.validation import validation_batches, validation_places
from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.process.data import build_datasets
from hvdtrain.runtime.mesh import Group
from hvdtrain.tasks import Datasets

SIZE, SEED = 37, 5


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def _loader(rank: int, world_size: int, micro: int, batches: int, samples: int = 0) -> TrainLoader:
    return TrainLoader(
        _Numbers(),
        samples=samples,
        batch=BatchConfig(global_size=micro * batches, micro_size=micro),
        assignment=Assignment(batches, Group(rank, world_size)),
        seed=SEED,
    )


def _steps(loader: TrainLoader, steps: int) -> list[list[tuple[int, list[int]]]]:
    return [
        [
            (j, batch.tolist())
            for j, batch in zip(loader.assignment, loader.next_step(step), strict=True)
        ]
        for step in range(steps)
    ]


@settings(deadline=None, max_examples=40)
@given(
    world_size=st.integers(1, 9),
    micro=st.integers(1, 5),
    batches=st.integers(1, 6),
    start=st.integers(0, 4),
)
def test_ranks_cover_global_batch_exactly_once(
    world_size: int, micro: int, batches: int, start: int
) -> None:
    size = micro * batches
    loaders = [_loader(r, world_size, micro, batches, start * size) for r in range(world_size)]
    assert sum(len(loader.assignment) for loader in loaders) == batches
    by_rank = [_steps(loader, 3) for loader in loaders]
    for step in range(3):
        micro_batches = dict(pair for rank in by_rank for pair in rank[step])
        assert sorted(micro_batches) == list(range(batches))
        together = [index for j in range(batches) for index in micro_batches[j]]
        first = (start + step) * size
        assert together == sample_order(first, first + size, SIZE, SEED).tolist()


def test_micro_batch_counts_differ_by_at_most_one() -> None:
    for world_size in range(1, 12):
        shares = [len(_loader(r, world_size, 2, 7).assignment) for r in range(world_size)]
        assert max(shares) - min(shares) <= 1


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=5),
    more=st.integers(0, 7),
    fixed=st.floats(0, 3),
)
def test_assignment_by_speed_minimizes_step_time(
    seconds: list[float], more: int, fixed: float
) -> None:
    ranks, beside = len(seconds), [fixed * i for i in range(len(seconds))]
    counts = by_speed(ranks + more, seconds, beside)
    assert sum(counts) == ranks + more and min(counts) >= 1

    def lasts(counts: Sequence[int]) -> float:
        return max(b + n * s for b, n, s in zip(beside, counts, seconds, strict=True))

    others = product(range(1, more + 2), repeat=ranks)
    assert lasts(counts) <= min(lasts(c) for c in others if sum(c) == sum(counts)) * (1 + 1e-9)
    assert by_speed(ranks + more, [1.0] * ranks, [0.0] * ranks) == even(ranks + more, ranks)


def test_reassigned_micro_batches_cover_each_sample_exactly_once() -> None:
    for ranks in range(1, 6):
        for rank in range(ranks):
            assert list(Assignment(13, Group(rank, ranks))) == list(range(rank, 13, ranks))
    loaders = [_loader(rank, 3, 2, 9) for rank in range(3)]
    for step, counts in enumerate([(3, 3, 3), (6, 2, 1), (1, 1, 7)]):
        seen = {}
        for loader in loaders:
            loader.assignment.change(counts)
            seen |= dict(zip(loader.assignment, loader.next_step(step), strict=True))
        together = [index for j in range(9) for index in seen[j].tolist()]
        assert together == sample_order(step * 18, step * 18 + 18, SIZE, SEED).tolist()


def test_loader_resumes_at_given_sample() -> None:
    whole = _steps(_loader(1, 3, 2, 4), 9)
    assert _steps(_loader(1, 3, 2, 4, samples=4 * 8), 5) == whole[4:]


@settings(deadline=None, max_examples=40)
@given(world_size=st.integers(1, 9), micro=st.integers(1, 6), samples=st.integers(1, SIZE))
def test_validation_covers_each_sample_exactly_once(
    world_size: int, micro: int, samples: int
) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        for count, batch in validation_batches(
            _Numbers(), validation_places(samples, micro), Group(rank, world_size), SEED
        ):
            assert count == len(batch) <= micro
            seen += batch.tolist()
    assert sorted(seen) == list(range(samples))


class _Noisy(_Numbers):
    """A dataset that draws from all generators, like augmentation."""

    def __getitem__(self, index: int) -> Tensor:  # type: ignore[override]
        return torch.tensor([index, torch.rand(()), np.random.rand(), random.random()])


class _Stream(IterableDataset[Tensor]):
    """An iterable dataset that also draws, has a different order in each epoch, and yields more
    samples than its length."""

    epoch = -1

    def __len__(self) -> int:
        return 13  # epochs begin inside micro-batches

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(len(self) + 1).tolist():
            yield torch.tensor(
                [100 * self.epoch + index, torch.rand(()), np.random.rand(), random.random()]
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("data", [_Noisy, _Stream])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_dataset_randomness_is_independent_of_world_size_and_restart(
    world_size: int, data: type[Dataset[Any]]
) -> None:
    def steps(rank: int, world_size: int, first: int) -> dict[tuple[int, int], list[list[float]]]:
        assignment = Assignment(4, Group(rank, world_size))
        source = data()
        place = source, first * 8, BatchConfig(8, 2), assignment, SEED
        loader: StepLoader = (
            StreamLoader(*place, StreamState(None))
            if has_own_order(source)
            else TrainLoader(*place)
        )
        seen = {}
        for step in range(first, 6):
            for j, batch in zip(loader.assignment, loader.next_step(step), strict=True):
                seen[step, j] = batch.tolist()
                torch.rand(3)  # as a forward pass with dropout
            loader.end_step()
            loader.advance()
        return seen

    alone = steps(0, 1, 0)
    together = {k: v for rank in range(world_size) for k, v in steps(rank, world_size, 0).items()}
    assert together == alone
    for first in range(1, 6):
        assert steps(0, 1, first) == {key: v for key, v in alone.items() if key[0] >= first}


def test_iterable_dataset_is_read_epoch_by_epoch() -> None:
    loader = StreamLoader(
        _Stream(), 0, BatchConfig(8, 2), Assignment(4, Group(0, 1)), SEED, StreamState(None)
    )
    seen = [int(row[0]) for step in range(5) for batch in loader.next_step(step) for row in batch]
    assert [number // 100 for number in seen] == [0] * 13 + [1] * 13 + [2] * 13 + [3]
    epochs = [[n % 100 for n in seen[start : start + 13]] for start in (0, 13)]
    assert all(len(set(epoch)) == 13 for epoch in epochs) and epochs[0] != epochs[1]


def test_iterable_validation_is_independent_of_world_size() -> None:
    def batches(rank: int, world_size: int) -> list[tuple[int, list[list[float]]]]:
        share = validation_batches(
            _Stream(), validation_places(11, 2), Group(rank, world_size), SEED
        )
        return [(count, batch.tolist()) for count, batch in share]

    alone = batches(0, 1)
    assert sum(count for count, _ in alone) == 11
    for world_size in (2, 3, 7):
        parts = [batches(rank, world_size) for rank in range(world_size)]
        for number, expected in enumerate(alone):
            assert parts[number % world_size].pop(0) == expected


class _Short(_Stream):
    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Tensor]:
        return islice(super().__iter__(), 18)


@pytest.mark.parametrize("rank", range(6))
def test_all_ranks_report_iterable_dataset_that_ends_early(rank: int) -> None:
    message = "the dataset _Short ended after 18 samples, but its __len__.* says 20"
    loader = StreamLoader(
        _Short(), 0, BatchConfig(8, 2), Assignment(4, Group(rank, 6)), SEED, StreamState(None)
    )
    for step in range(2):
        list(loader.next_step(step))
        loader.end_step()
        loader.advance()
    with pytest.raises(UnsupportedTaskError, match=message):
        list(loader.next_step(2))
        loader.end_step()
    with pytest.raises(UnsupportedTaskError, match=message):
        list(validation_batches(_Short(), validation_places(20, 2), Group(rank, 6), SEED))


def test_dataset_without_length_is_rejected() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Task:
        def datasets(self) -> Datasets:
            return Datasets(TensorDataset(torch.zeros(3)), Endless())

    with pytest.raises(UserError, match="the validation data has no length: Endless needs __len_"):
        build_datasets(Task(), Config())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": [1], "test": [2]}, r"is a dict of datasets \(train, test\): give one of them"),
        ((number for number in range(9)), "is a generator, which can be read only once"),
        (zip("ab", "cd", strict=True), "is a zip, which can be read only once"),
        ({0: "a", 1: "b"}, None),  # samples by number
    ],
)
def test_dictionary_and_iterator_are_no_datasets(data: Any, message: str | None) -> None:
    task: Any = SimpleNamespace(datasets=lambda: Datasets(data))
    if message is None:
        assert build_datasets(task, Config()).train is data
        return
    with pytest.raises(UserError, match=message):
        build_datasets(task, Config())


def test_dataset_dictionaries_of_hugging_face_are_refused() -> None:
    from datasets import Dataset as Rows
    from datasets import DatasetDict, IterableDatasetDict

    rows = Rows.from_dict({"a": [1, 2, 3]})
    for found in (
        DatasetDict({"train": rows, "test": rows}),
        IterableDatasetDict({"train": rows.to_iterable_dataset()}),
    ):
        task: Any = SimpleNamespace(datasets=lambda found=found: Datasets(found))
        name = f"is a {type(found).__name__} of datasets .* such as dataset\\['train'\\]"
        with pytest.raises(UserError, match=name):
            build_datasets(task, Config())


def test_rank_without_micro_batches_loads_no_data() -> None:
    assert list(islice(_loader(3, 4, 2, 2).next_step(0), 5)) == []


def test_batch_structure_is_preserved_on_device_transfer() -> None:
    x = torch.ones(2)
    batch = {"x": x, "more": [x, (x, "name")]}
    moved = to_device(batch, torch.device("cpu"))
    assert moved["x"] is x and moved["more"][0] is x and moved["more"][1] == (x, "name")


@pytest.mark.parametrize("empty", ["training", "validation"])
def test_empty_dataset_is_rejected(empty: str) -> None:
    class Task:
        def datasets(self) -> Datasets:
            parts = {name: range(0 if name == empty else 3) for name in ("training", "validation")}
            return Datasets(parts["training"], parts["validation"])  # type: ignore[arg-type]

    with pytest.raises(UserError, match=f"language_model: the {empty} data has no samples"):
        build_datasets(Task(), Config())  # type: ignore[arg-type]
