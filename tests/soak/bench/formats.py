"""Loading of files of other programs, in turns with their own readers and torch's DataLoader.

All loaders read the same samples in a random order, make the same tensors or rows, and collate
micro-batches, with the same number of workers, in this process. The order of "Zarr" and "HDF5" of
hvdtrain is that of loader.order sequential, which is made for arrays of chunks; their own readers
read at random.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hvdtrain.bench.report import BenchMetric, Report
from hvdtrain.data.arrays import ArrayWindows
from hvdtrain.data.arrow import ArrowRows
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.data.token_files import TokenMeta, read_token_files
from hvdtrain.data.tokenize import Source, tokenize
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.runtime.mesh import Group
from hvdtrain.runtime.mpi import Alone
from tests.soak.bench.streams import endless_batches

CONTEXT, SAMPLES = 1024, 4096
IMAGE, IMAGES, CHUNK = (64, 64), 4096, 16
BATCH = BatchConfig(global_size=64, micro_size=16)
AIM = 1.2
# Format -> (its own reader, hvdtrain's dataset and order).
Pair = tuple[Dataset[Any], Dataset[Any], str]


def formats(steps: int, rounds: int, workers: int) -> Report:
    """Measure samples/s of each format with both readers, and tokenizing of `.jsonl.zst`."""
    with tempfile.TemporaryDirectory() as directory:
        pairs = {name: open_(Path(directory)) for name, open_ in _FORMATS.items()}
        rates: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, (own, ours, order) in pairs.items():
                for reader, batches in (
                    ("own reader", _torch(own, workers)),
                    ("hvdtrain", _hvdtrain(ours, workers, order)),
                ):
                    rate = _rate(batches, steps * BATCH.micro_batches)
                    rates.setdefault(f"{name}, {reader}", []).append(rate)
        metrics = [BenchMetric(name, "samples/s", values) for name, values in rates.items()]
        for name in pairs:
            both = zip(rates[f"{name}, hvdtrain"], rates[f"{name}, own reader"], strict=True)
            ratios = [mine / theirs for mine, theirs in both]
            metrics.append(BenchMetric(f"{name}: hvdtrain / own", "x", ratios, at_least=AIM))
        ratios = [_tokenizing(Path(directory), number) for number in range(rounds)]
    metrics.append(
        BenchMetric("tokenizing .jsonl.zst: hvdtrain / datasets.map", "x", ratios, at_least=1.0)
    )
    return Report("formats", metrics, {"workers": workers, "samples": SAMPLES})


def _rate(batches: Iterator[Any], count: int) -> float:
    """Samples per second of `count` micro-batches after the first one, which starts workers."""
    next(batches)
    began = time.perf_counter()
    for _ in islice(batches, count):
        pass
    return count * BATCH.micro_samples / (time.perf_counter() - began)


def _torch(data: Dataset[Any], workers: int) -> Iterator[Any]:
    loader = DataLoader(data, BATCH.micro_samples, shuffle=True, num_workers=workers)
    while True:
        yield from loader


def _hvdtrain(data: Dataset[Any], workers: int, order: str) -> Iterator[Any]:
    loading = Loading(LoaderConfig(workers, order, shuffle_buffer=1024))  # type: ignore[arg-type]
    assignment = Assignment(BATCH.micro_batches, Group(0, 1))
    return endless_batches(TrainLoader(data, 0, BATCH, assignment, 1, loading))


class _Mapped(Dataset[Any]):
    """Samples of another dataset, changed by a function."""

    def __init__(self, data: Any, change: Callable[[Any], Any], samples: int) -> None:
        self._data, self._change, self._samples = data, change, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        return self._change(self._data[index])


def _as_int64(tokens: np.ndarray) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def _megatron(directory: Path) -> Pair:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(directory / "tokens.bin"), dtype=np.uint16)
    random = torch.Generator().manual_seed(0)
    for _ in range(SAMPLES):
        tokens = torch.randint(0, 50_000, (CONTEXT,), generator=random)
        builder.add_document(tokens, [CONTEXT])
    builder.finalize(str(directory / "tokens.idx"))
    TokenMeta(50_000, "none").write(directory)
    arrays, _ = read_token_files("megatron", [str(directory / "tokens.bin")])
    own = _Mapped(IndexedDataset(str(directory / "tokens")), _as_int64, SAMPLES)
    return own, TokenWindows(arrays, CONTEXT, 50_000), "shuffled"


def _gpt_dataset(directory: Path) -> Pair:
    """The dataset that Megatron trains on: also masks and positions, and labels of their own."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    directory = directory / "gpt"
    directory.mkdir()
    _, ours, order = _megatron(directory)
    path = str(directory / "tokens")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=CONTEXT,
        blend=([path], None),
        split="1,0,0",
        tokenizer=SimpleNamespace(eod=0, pad=0, vocab_size=50_000, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(directory / "cache"),
    )
    documents = np.arange(SAMPLES, dtype=np.int32)
    own = GPTDataset(IndexedDataset(path), path, documents, SAMPLES - 1, Split.train, config)
    return own, ours, order


def _arrow(directory: Path) -> Pair:
    import datasets

    rows = {"text": [f"{number} " * 500 for number in range(SAMPLES)], "label": [*range(SAMPLES)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(directory / "saved"))
    own: Any = datasets.load_from_disk(str(directory / "saved"))
    return own, ArrowRows([str(directory / "saved")]), "shuffled"


def _values(values: np.ndarray) -> dict[str, Tensor]:
    return {"v": torch.from_numpy(values)}


def _images() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((IMAGES, *IMAGE), dtype=np.float32)


def _zarr(directory: Path) -> Pair:
    import zarr

    group = zarr.create_group(store=str(directory / "images.zarr"))
    array = group.create_array("v", data=_images(), chunks=(CHUNK, *IMAGE))
    ours = ArrayWindows(str(directory / "images.zarr"), ["v"], "dim_0")
    return _Mapped(array, _values, IMAGES), ours, "sequential"


def _hdf5(directory: Path) -> Pair:
    import h5py

    with h5py.File(directory / "images.h5", "w") as file:
        file.create_dataset("v", data=_images(), chunks=(CHUNK, *IMAGE))
    array = h5py.File(directory / "images.h5", "r")["v"]
    ours = ArrayWindows(str(directory / "images.h5"), ["v"], "dim_0")
    return _Mapped(array, _values, IMAGES), ours, "sequential"


_FORMATS: dict[str, Callable[[Path], Pair]] = {
    "Megatron": _megatron, "Megatron, GPTDataset": _gpt_dataset, "Arrow": _arrow,
    "Zarr": _zarr, "HDF5": _hdf5,
}  # fmt: skip


def _tokenizing(directory: Path, number: int) -> float:
    """Seconds of datasets.map / seconds of hvdtrain, each in this process, with the same model."""
    import datasets
    import zstandard
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    file, model = directory / "text.jsonl.zst", directory / "tokenizer.json"
    if not file.exists():
        texts = [path.read_text(errors="replace") for path in sorted(Path("docs").glob("*.md"))]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=8000))
        tokenizer.save(str(model))
        lines = [json.dumps({"text": part}) for text in texts for part in text.split("\n\n")]
        content = "\n".join(lines * 20).encode()
        file.write_bytes(zstandard.ZstdCompressor().compress(content))
    tokenizer = Tokenizer.from_file(str(model))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"tokens": [found.ids for found in tokenizer.encode_batch(rows["text"])]}

    began = time.perf_counter()
    cache = str(directory / f"cache-{number}")
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
    loaded.map(encode, batched=True, remove_columns=["text"])
    own = time.perf_counter() - began
    began = time.perf_counter()
    out = directory / f"out-{number}"
    tokenize(Source([str(file)], str(model), kind="jsonl"), out, Alone())
    return own / (time.perf_counter() - began)
