"""A loop whose data may differ between ranks or starts, by HVDTRAIN_TEST_DATA: a key of DATA."""

import os
import sys
from pathlib import Path

import datasets as huggingface
import numpy as np
import torch
import webdataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler

import hvdtrain
from hvdtrain import comm

WORDS = [f"word{number}" for number in range(96)]
ROWS = torch.arange(96.0)[:, None]


def labels():
    numbers = {word: float(number) for number, word in enumerate(set(WORDS))}
    return [torch.tensor([numbers[word]]) for word in WORDS]


def stream():
    rows = huggingface.Dataset.from_dict({"x": ROWS.tolist()})
    return rows.to_iterable_dataset(num_shards=4).with_format("torch")


def shards():
    root = Path(os.environ["HVDTRAIN_TEST_SHARDS"])
    if not root.exists():
        with webdataset.TarWriter(str(root)) as writer:
            for number in range(96):
                writer.write({"__key__": str(number), "x.pth": ROWS[number]})
    return (
        webdataset.WebDataset(str(root), shardshuffle=False).shuffle(30).decode().to_tuple("x.pth")
    )


def divided():
    sampler = DistributedSampler(TensorDataset(ROWS), comm.size(), comm.rank())
    return webdataset.DataPipeline(lambda: (ROWS[i] for i in sampler))


DATA = {
    "rows": lambda: TensorDataset(ROWS),
    "others": lambda: TensorDataset(2 * ROWS),
    "labels of a set": labels,
    "split without a seed": lambda: random_split(TensorDataset(ROWS), [64, 32])[0],
    "divided stream": lambda: split_dataset_by_node(stream(), comm.rank(), comm.size()),
    "shuffle without a seed": lambda: stream().shuffle(buffer_size=30),
    "shards": lambda: shards().with_length(96),
    "sampler": divided,
    "measured": lambda: webdataset.DataPipeline(lambda: iter(ROWS)).with_length(96),
    "random": lambda: webdataset.DataPipeline(
        lambda: ((row + 0.1 * np.random.default_rng().random(), int(row)) for row in ROWS)
    ),
    "seeded": lambda: stream().shuffle(seed=3, buffer_size=30),
}
data = DATA[os.environ["HVDTRAIN_TEST_DATA"]]()
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
with hvdtrain.training(model, optimizer, data, argv=sys.argv[1:]) as training:
    for step in training:
        with step:
            for batch in [next(iter(step))] if "BREAK" in os.environ else step:
                x = batch["x"] if isinstance(batch, dict) else batch
                x = x[0] if isinstance(x, (list, tuple)) else x
                step.backward(model(x.float()).square().mean())
