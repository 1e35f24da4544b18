"""Iterable datasets with a state: read once and in order, whatever ranks, workers and restarts."""

from __future__ import annotations

import json
import random
from collections import UserDict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets as huggingface
import pytest
import torch
import torchdata.nodes
from torch import Tensor
from torch.utils.data import IterableDataset

from hvdtrain import cli
from hvdtrain.config import Config
from hvdtrain.data import stream
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, has_own_order
from hvdtrain.data.stream import Position, StreamLoader, StreamState, has_state
from hvdtrain.data.validation import validation_batches, validation_places
from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.process.data import build_datasets
from hvdtrain.runtime.mesh import Group
from hvdtrain.tasks import Datasets
from tests.support.runs import losses, metrics, run
from tests.support.streams import KnownLength, Numbers

SEED = 5
BATCH = BatchConfig(8, 2)
FLAGS = (
    "--batch.global_size 8 --batch.micro_size 2 --telemetry.port 0 --eval.every 0"
    " --checkpoint.every 3 --schedule.name constant --train.replica_check_every 2"
    " --exchange.name exact --runtime.threads 1"
)
Seen = dict[tuple[int, int], list[list[float]]]  # (step, micro-batch) -> samples


def _state(dataset: Any, workers: int) -> StreamState:
    return StreamState(None if workers else Position.first(dataset))


def _loader(
    dataset: Any,
    state: StreamState,
    first: int = 0,
    rank: int = 0,
    ranks: int = 1,
    workers: int = 0,
) -> StreamLoader:
    loading = Loading(LoaderConfig(workers))
    assignment = Assignment(4, Group(rank, ranks))
    return StreamLoader(dataset, first * 8, BATCH, assignment, SEED, state, loading)


def _steps(loader: StreamLoader, first: int, last: int) -> Seen:
    seen = {}
    for step in range(first, last):
        for j, batch in zip(loader.assignment, loader.next_step(step), strict=True):
            seen[step, j] = batch.tolist()
            torch.rand(3)  # as a forward pass with dropout
        loader.end_step()
        loader.advance()
    loader.close()
    return seen


def _alone(dataset: Numbers, steps: int = 6) -> Seen:
    return _steps(_loader(dataset, _state(dataset, 0)), 0, steps)


@pytest.mark.parametrize("kind", [Numbers, KnownLength])
def test_samples_are_read_once_and_in_order(kind: type[Numbers]) -> None:
    seen = _alone(kind())
    numbers = [int(row[0]) for key in sorted(seen) for row in seen[key]]
    epochs = [numbers[start : start + 13] for start in range(0, 48, 13)]
    assert [sorted(e) for e in epochs[:3]] == [[*range(f, f + 13)] for f in (0, 100, 200)]
    assert len({tuple(n % 100 for n in epoch) for epoch in epochs[:3]}) == 3
    assert {n // 100 for n in epochs[3]} == {3}


@pytest.mark.parametrize("workers", [0, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_samples_do_not_depend_on_ranks_or_workers(ranks: int, workers: int) -> None:
    together: Seen = {}
    states = []
    for rank in range(ranks):
        dataset = Numbers()
        state = _state(dataset, workers)
        together |= _steps(_loader(dataset, state, 0, rank, ranks, workers), 0, 6)
        states.append({name: t.tolist() for name, t in state.tensors().items()})
    assert together == _alone(Numbers())
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("workers", [(0, 0), (0, 2), (2, 0)])
@pytest.mark.parametrize("kind", [Numbers, KnownLength])
def test_resumed_stream_continues_without_reading_again(
    kind: type[Numbers], workers: tuple[int, int], tmp_path: Path
) -> None:
    whole = _alone(kind())
    for first in range(1, 6) if workers == (0, 0) else (2, 4):
        dataset, log = kind(), tmp_path / f"{first}"
        state = _state(dataset, workers[0])
        _steps(_loader(dataset, state, workers=workers[0]), 0, first)
        dataset = kind(log=log)
        resumed = _state(dataset, workers[1])
        resumed.load([state.tensors()])
        seen = _steps(_loader(dataset, resumed, first, workers=workers[1]), first, 6)
        assert seen == {key: rows for key, rows in whole.items() if key[0] >= first}
        if not workers[1]:
            assert len(log.read_text().splitlines()) == 8 * (6 - first)


def test_position_changes_only_when_a_step_counts() -> None:
    for workers in (0, 1):
        dataset = Numbers()
        state = _state(dataset, workers)
        loader = _loader(dataset, state, workers=workers)
        first = [batch.tolist() for batch in loader.next_step(0)]
        loader.end_step()  # the step fails, and another loader repeats it
        again = _loader(dataset, state, workers=workers)
        assert [batch.tolist() for batch in again.next_step(0)] == first
        again.advance()
        assert state.position is not None and state.position[:3] == (8, 0, 8)
        state.load(())
        begun = _loader(dataset, state, workers=workers)
        assert [batch.tolist() for batch in begun.next_step(0)] == first
        for each in (loader, again, begun):
            each.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_reassigned_micro_batches_of_a_stream_are_read_once(workers: int) -> None:
    whole, seen = _alone(Numbers(), 4), dict[tuple[int, int], Any]()
    for rank in range(2):
        dataset = Numbers()
        loader = _loader(dataset, _state(dataset, workers), 0, rank, 2, workers)
        for step, counts in enumerate([(2, 2), (3, 1), (4, 0), (1, 3)]):
            loader.assignment.change(counts)
            for j, batch in zip(loader.assignment, loader.next_step(step), strict=True):
                seen[step, j] = batch.tolist()
            loader.end_step()
            loader.advance()
        loader.close()
    assert seen == whole


def test_position_of_another_rank_replaces_the_own_in_place() -> None:
    states = [_state(Numbers(), 0) for _ in range(2)]
    for step, state in zip((2, 3), states, strict=True):
        _steps(_loader(Numbers(), state), 0, step)
    theirs, own = (state.tensors() for state in states)
    assert own.keys() == theirs.keys()
    states[1].load([theirs])  # as a broadcast does, which then writes to the tensors
    for name, tensor in states[1].tensors().items():
        tensor.copy_(theirs[name])
    assert states[1].position is not None and states[1].position[:3] == (16, 1, 3)


def test_old_checkpoint_without_position_reads_the_epoch_again(tmp_path: Path) -> None:
    dataset = KnownLength(log=tmp_path / "log")
    seen = _steps(_loader(dataset, _state(dataset, 0), 4), 4, 6)
    assert seen == {key: rows for key, rows in _alone(KnownLength()).items() if key[0] >= 4}
    assert len((tmp_path / "log").read_text().splitlines()) == 48 - 26
    with pytest.raises(UserError, match="Numbers has no length, and its position after 32 samples"):
        _steps(_loader(Numbers(), _state(Numbers(), 0), 4), 4, 6)


class _Once(Numbers):
    """Its second iteration is empty."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from islice(super().__iter__(), self.size - self.at)


class _Longer(KnownLength):
    def __len__(self) -> int:
        return self.size - 1


class _Shorter(KnownLength):
    def __len__(self) -> int:
        return self.size + 1


class _Unsaved(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"file": open}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Once, "_Once has no samples in epoch 1: after the end of a pass, iter.. must begin"),
        (_Longer, "_Longer has more than 12 samples, but its __len__.. says 12"),
        (_Shorter, "_Shorter ended after 13 samples, but its __len__.. says 14"),
        (_Unsaved, r"the state_dict\(\) of the dataset _Unsaved has a builtin_function_or_method"),
    ],
)
def test_mistakes_of_a_stream_are_one_line(kind: type[Numbers], message: str, workers: int) -> None:
    dataset = kind()
    with pytest.raises((UnsupportedTaskError, UserError), match=message):
        _steps(_loader(dataset, _state(dataset, workers), workers=workers), 0, 4)


class _Again(IterableDataset[Tensor]):
    """Its own iterator, which each iter() begins again, as in most tutorials."""

    def __iter__(self) -> _Again:
        self.at = -1
        return self

    def __next__(self) -> Tensor:
        self.at += 1
        if self.at == 13:
            raise StopIteration
        return torch.tensor([float(self.at)])


class _Measured(_Again):
    def __len__(self) -> int:
        return 13


def test_dataset_that_is_its_own_iterator_is_read_to_its_end() -> None:
    numbers = [float(number) for _ in range(4) for number in range(13)][:48]
    for dataset in (_Again(), _Measured()):
        loader = _loader(dataset, _state(dataset, 0))
        seen = [row[0] for rows in _steps(loader, 0, 6).values() for row in rows]
        assert seen == numbers
    places = validation_places(13, 4)
    read = [b for _, b in validation_batches(_Measured(), places, Group(0, 1), SEED)]
    assert torch.cat(read).flatten().tolist() == numbers[:13]


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_without_state_and_length_resumes_by_reading_again(workers: int) -> None:
    for kind in (_Again, _Permuted):
        whole = _steps(_loader(kind(), _state(kind(), 0)), 0, 6)
        for first in (1, 3, 4):
            state = _state(kind(), workers)
            begun = _steps(_loader(kind(), state, workers=workers), 0, first)
            resumed = _state(kind(), workers)
            resumed.load([state.tensors()])
            rest = _steps(_loader(kind(), resumed, first, workers=workers), first, 6)
            assert begun | rest == whole


def test_samples_that_cannot_be_looked_into_do_not_skip_the_comparison() -> None:
    class Hidden(UserDict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise OSError("not on this host")

    class Lazy(_Again):
        def __next__(self) -> Any:
            super().__next__()
            return Hidden(x=0)

    loading = Loading(collate=lambda samples: torch.zeros(len(samples)))
    assignment = Assignment(4, Group(0, 1))
    loader = StreamLoader(Lazy(), 0, BATCH, assignment, SEED, _state(Lazy(), 0), loading)
    assert len([*loader.next_step(0)]) == 4
    facts = loader.end_step()  # None: this rank would not join the others' comparison
    assert facts is not None and len(facts.fixed) == 8


class _Permuted(_Again):
    """Its order depends on random numbers that a pass draws with its first sample."""

    def __iter__(self) -> Any:
        for number in torch.randperm(13).tolist():
            yield torch.tensor([float(number), torch.rand(())])


class _Shuffled(_Again):
    def __iter__(self) -> Any:
        return (torch.tensor([n]) for n in random.SystemRandom().sample(range(13), 13))


@pytest.mark.parametrize("workers", [0, 1])
def test_pass_that_begins_otherwise_is_not_continued(workers: int) -> None:
    state = _state(_Shuffled(), workers)
    _steps(_loader(_Shuffled(), state, workers=workers), 0, 4)
    with pytest.raises(UserError, match="begins pass 2 with other samples than before"):
        _steps(_loader(_Shuffled(), state, 4, workers=workers), 4, 5)


def test_reader_says_that_it_passes_over_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_PASSING_SECONDS", -1.0)
    state = _state(_Again(), 1)
    whole = _steps(_loader(_Again(), state, workers=1), 0, 5)
    loader = _loader(_Again(), state, 5, workers=1)
    assert len(_steps(loader, 5, 6)) == 4 and len(whole) == 20


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_of_hugging_face_resume_exactly(workers: int) -> None:
    def build(kind: str) -> Any:
        rows = huggingface.Dataset.from_dict({"x": [float(number) for number in range(24)]})
        stream = rows.to_iterable_dataset(num_shards=3)
        if "shuffled" in kind:
            stream = stream.shuffle(seed=3, buffer_size=6)
        if "mapped" in kind:
            stream = stream.map(lambda row: {"x": row["x"] + 0.5}).take(20)
        if "wrapped" in kind:
            return torchdata.nodes.Loader(torchdata.nodes.IterableWrapper(stream))
        if "mixed" in kind:
            stream = huggingface.interleave_datasets([stream, build("plain")])
        return stream

    kinds = ["plain", "mapped", "mixed", "shuffled", "shuffled mapped", "shuffled mixed"]
    for kind in [*kinds, "shuffled wrapped"]:
        assert has_state(build(kind)) == ("shuffled" not in kind)

        def steps(state: StreamState, first: int, last: int, kind: str = kind) -> list[float]:
            loader = _loader(build(kind), state, first, workers=workers)
            found = []
            for step in range(first, last):
                found += [x for batch in loader.next_step(step) for x in batch["x"].tolist()]
                loader.end_step()
                loader.advance()
            loader.close()
            return found

        whole = steps(_state(build(kind), workers), 0, 6)
        state = _state(build(kind), workers)
        begun = steps(state, 0, 2)
        resumed = _state(build(kind), workers)
        resumed.load([state.tensors()])
        assert begun + steps(resumed, 2, 6) == whole
        size = 20 if "mapped" in kind else 24
        assert "mixed" in kind or len({*whole[:size]}) == size


def test_iterable_datasets_with_access_by_number_are_read_by_number() -> None:
    class Both(IterableDataset[int]):  # as those of mosaicml-streaming and litdata
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> int:
            return number

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self, samples: int, from_beginning: bool) -> dict[str, int]:
            return {"samples": samples}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    assert not has_own_order(Both()) and has_own_order(Numbers()) and has_own_order(KnownLength())


def test_validation_streams_without_length_are_refused() -> None:
    class Task:
        def __init__(self, train: Any, validation: Any = None) -> None:
            self._datasets = Datasets(train, validation)

        def datasets(self) -> Datasets:
            return self._datasets

    with pytest.raises(UserError, match="the validation data has no length: Numbers needs"):
        build_datasets(Task(Numbers(), Numbers()), Config())  # type: ignore[arg-type]
    found = build_datasets(Task(Numbers()), Config(loader=LoaderConfig(2)))  # type: ignore[arg-type]
    assert isinstance(found.train, Numbers)


def test_each_evaluation_reads_the_same_samples_of_a_stream() -> None:
    dataset = KnownLength()
    for places in (validation_places(11, 2), validation_places(4, 2)) * 2:
        found = [b for _, b in validation_batches(dataset, places, Group(0, 1), SEED)]
        assert torch.cat(found)[:4, 0].tolist() == torch.cat(found[:2])[:, 0].tolist()
        assert dataset.at == 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["Loader", "StatefulDataLoader"])
def test_torchdata_pipelines_continue_where_they_stopped(name: str, workers: int) -> None:
    from torchdata.nodes import IterableWrapper, Loader, Mapper
    from torchdata.stateful_dataloader import StatefulDataLoader

    def build() -> Any:
        if name == "StatefulDataLoader":
            return StatefulDataLoader(KnownLength(), batch_size=None)
        node = Mapper(IterableWrapper(range(13)), lambda number: torch.tensor([number]))
        return Loader(node, restart_on_stop_iteration=False)

    def steps(dataset: Any, state: StreamState, first: int, last: int) -> list[int]:
        seen = _steps(_loader(dataset, state, first, workers=workers), first, last)
        return [int(row[0]) for key in sorted(seen) for row in seen[key]]

    assert has_state(build())
    dataset = build()
    whole = steps(dataset, _state(dataset, workers), 0, 6)
    assert sorted(whole[:13]) == [*range(13)] and sorted(n % 13 for n in whole[13:26]) == [
        *range(13)
    ]
    for first in (1, 3):
        dataset = build()
        state = _state(dataset, workers)
        begun = steps(dataset, state, 0, first)
        dataset = build()
        resumed = _state(dataset, workers)
        resumed.load([state.tensors()])
        assert begun + steps(dataset, resumed, first, 6) == whole


# --- runs ---------------------------------------------------------------------


def _run(root: Path, task: str, launcher: str, *flags: str, **env: str) -> str:
    where = ["--run.root", str(root), "--run.id", "case", "--task", f"tests.support.streams:{task}"]
    done = run(root / "output", [*FLAGS.split(), *where, *flags], launcher, env=env)
    assert done.returncode == 0, done
    return str(done.stderr)


@pytest.mark.parametrize("task", ["Saved", "Endless"])
def test_run_on_a_stream_has_one_curve_and_resumes(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(tmp_path / "one", task, "", "--train.duration", "9")
    root, log = tmp_path / "two", tmp_path / "log"
    said = _run(root, task, "gloo:2", "--train.duration", "4", "--loader.workers", "2")
    assert "loader.workers 2: one process reads ahead" in said
    _run(root, task, "gloo:3", "--train.duration", "9", HVDTRAIN_TEST_LOG=str(log))
    assert losses(root / "case") == losses(tmp_path / "one/case")
    by_process: dict[str, list[str]] = {}
    for line in log.read_text().splitlines():
        by_process.setdefault(line.split()[0], []).append(line.split(" ", 1)[1])
    assert [len(read) for read in by_process.values()] == [8 * 5] * 3
    assert len({tuple(read) for read in by_process.values()}) == 1
    assert metrics(root / "case")[-1]["epoch"] == pytest.approx(72 / 37 if task == "Saved" else 1)
    assert cli.main(["audit", str(root / "case")]) == 0
    said = capsys.readouterr().out
    length = (
        "1.95 epochs of 37" if task == "Saved" else "72 samples of data whose length is unknown"
    )
    assert length in said and "1 start continued at a saved position" in said
    assert cli.main(["ckpt", "list", str(root / "case")]) == 0
    assert cli.main(["report", str(root / "case")]) == 0


def test_checkpoint_without_state_of_the_data_still_resumes(tmp_path: Path) -> None:
    _run(tmp_path / "whole", "Saved", "", "--train.duration", "9")
    _run(tmp_path, "Forgotten", "", "--train.duration", "6")
    _run(tmp_path, "Saved", "", "--train.duration", "9")
    assert losses(tmp_path / "case") == losses(tmp_path / "whole/case")
    assert cli.main(["audit", str(tmp_path / "case")]) == 0


def test_audit_finds_a_position_that_does_not_match_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in ("3", "6"):
        _run(tmp_path, "Saved", "", "--train.duration", steps)
    events = tmp_path / "case/events.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    starts = [line for line in lines if line["event"] == "start"]
    assert [start["data_position"] for start in starts] == [[0, 0], [0, 24]]
    starts[1]["data_position"] = [0, 16]
    events.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert cli.main(["audit", str(tmp_path / "case")]) == 1
    assert "begins at sample 24, but its data at 16" in capsys.readouterr().out
