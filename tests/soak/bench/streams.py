"""Loading of tokens from many tar shards, compared with torchdata and with webdataset.

All loaders do the same work: they read the members of the shards, turn the bytes of each sample
into a tensor of tokens, and collate micro-batches. They take turns, in this process, with the same
number of workers. All read the shards one after the other; "TarShards" also shuffles, by reading
samples by their numbers with loader.order sequential.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, StepLoader, TrainLoader
from hvdtrain.data.records import TarShards
from hvdtrain.data.stream import Position, StreamLoader, StreamState
from hvdtrain.runtime.mesh import Group

TOKENS = 1024  # of a sample
OF_SHARD = 64  # samples
BATCH = BatchConfig(global_size=64, micro_size=16)
LATE_STEP = 100_000


def streams(shards: int, steps: int, rounds: int, workers: int) -> Report:
    """Measure tokens/s of each loader, and the start at a late step against the start at step 0."""
    with tempfile.TemporaryDirectory() as directory:
        paths = _write(Path(directory), shards)
        TarShards([directory])  # creates the indexes
        loaders: dict[str, Callable[[], Iterator[Tensor]]] = {
            "hvdtrain, stream": lambda: endless_batches(_stream(paths, workers)),
            "hvdtrain, TarShards": lambda: endless_batches(_records(directory, workers)),
            "torchdata": lambda: _torchdata(paths, workers),
            "webdataset": lambda: _webdataset(paths, workers),
        }
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        starts: dict[int, list[float]] = {0: [], LATE_STEP: []}
        for _ in range(rounds):
            for name, build in loaders.items():
                rates[name].append(_rate(build(), steps * BATCH.micro_batches))
            for step, seconds in starts.items():
                seconds.append(_start(paths, step, workers))
    metrics = [BenchMetric(name, "tokens/s", values) for name, values in rates.items()]
    for own, other in (
        ("hvdtrain, stream", "torchdata"),
        ("hvdtrain, TarShards", "torchdata"),
        ("hvdtrain, TarShards", "webdataset"),
    ):
        ratios = [a / b for a, b in zip(rates[own], rates[other], strict=True)]
        aimed = 1.0 if own != "hvdtrain, stream" or workers < 2 else None
        metrics.append(BenchMetric(f"{own} / {other}", "x", ratios, at_least=aimed))
    later = [late - first for first, late in zip(*starts.values(), strict=True)]
    metrics.append(
        BenchMetric(f"start at step {LATE_STEP:,} - start at step 0", "s", later, at_most=2.0)
    )
    facts = {"shards": shards, "samples_of_a_shard": OF_SHARD, "tokens_of_a_sample": TOKENS}
    return Report("streams", metrics, {**facts, "workers": workers})


def _write(directory: Path, shards: int) -> list[str]:
    paths = []
    for shard in range(shards):
        path = directory / f"{shard:05}.tar"
        with tarfile.open(path, "w") as members:
            for sample in range(OF_SHARD):
                tokens = np.full(TOKENS, shard, dtype="<u2")
                info = tarfile.TarInfo(f"{sample:05}.bin")
                info.size = tokens.nbytes
                members.addfile(info, io.BytesIO(tokens.tobytes()))
        paths.append(str(path))
    return paths


def _rate(batches: Iterator[Tensor], count: int) -> float:
    """Tokens per second of `count` micro-batches after the first one, which starts workers."""
    next(batches)
    began, tokens = time.perf_counter(), 0
    for batch in islice(batches, count):
        tokens += batch.numel()
    return tokens / (time.perf_counter() - began)


def _start(paths: list[str], step: int, workers: int) -> float:
    """Seconds until a run that begins at a step has its first micro-batch."""
    began = time.perf_counter()
    loader = _stream(paths, workers, step)
    next(loader.next_step(step))
    seconds = time.perf_counter() - began
    loader.close()
    return seconds


def _decode(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, "<u2").astype(np.int64))


class Tokens(IterableDataset[Tensor]):
    """The samples of tar shards, one shard after the other; workers share the shards."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self._shard = self._sample = 0  # of the next sample

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        number, together = (worker.id, worker.num_workers) if worker else (0, 1)
        paths = self._paths[number::together]
        while self._shard < len(paths):
            with tarfile.open(paths[self._shard]) as members:
                for member in islice(members, self._sample, None):
                    content = members.extractfile(member)
                    assert content is not None
                    self._sample += 1
                    yield _decode(content.read())
            self._shard, self._sample = self._shard + 1, 0
        self._shard = 0

    def state_dict(self) -> dict[str, int]:
        return {"shard": self._shard, "sample": self._sample}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._shard, self._sample = state["shard"], state["sample"]


class _Records(Dataset[Tensor]):
    def __init__(self, directory: str) -> None:
        self._shards = TarShards([directory])
        self.shard_samples = self._shards.shard_samples

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: int) -> Tensor:
        return _decode(self._shards[index]["bin"])


def _stream(paths: list[str], workers: int, step: int = 0) -> StreamLoader:
    samples, dataset = step * BATCH.global_size, Tokens(paths)
    epoch, read = divmod(samples, len(paths) * OF_SHARD)
    shard, sample = divmod(read, OF_SHARD)
    state = StreamState(Position(samples, epoch, read, {"shard": shard, "sample": sample}, {}))
    assignment = Assignment(BATCH.micro_batches, Group(0, 1))
    return StreamLoader(dataset, samples, BATCH, assignment, 1, state, _loading(workers))


def _records(directory: str, workers: int) -> TrainLoader:
    assignment = Assignment(BATCH.micro_batches, Group(0, 1))
    return TrainLoader(_Records(directory), 0, BATCH, assignment, 1, _loading(workers))


def _loading(workers: int) -> Loading:
    # The order of samples with numbers; an iterable dataset has its own.
    return Loading(LoaderConfig(workers, order="sequential"))


def endless_batches(loader: StepLoader) -> Iterator[Any]:
    """Yield the micro-batches of a loader of hvdtrain, as a run takes them."""
    step = 0
    try:
        while True:
            yield from loader.next_step(step)
            loader.end_step()
            loader.advance()
            step += 1
    finally:
        loader.close()


def _torchdata(paths: list[str], workers: int) -> Iterator[Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Tokens(paths), batch_size=BATCH.micro_size, num_workers=workers)
    while True:
        yield from loader


def _webdataset(paths: list[str], workers: int) -> Iterator[Tensor]:
    import webdataset

    samples: Any = webdataset.WebDataset(paths, shardshuffle=False)
    samples = samples.to_tuple("bin").map_tuple(_decode).map(lambda sample: sample[0])
    loader = DataLoader(samples, batch_size=BATCH.micro_size, num_workers=workers)
    while True:
        yield from loader
