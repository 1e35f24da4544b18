"""A loop over a dataset of a library of streams: HVDTRAIN_TEST_LIBRARY, in HVDTRAIN_TEST_DATA.

With the argument `write` it writes the dataset, by the library's own writer. If the library is
`list`, the dataset is a list of the same samples.
"""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

LIBRARY, DIRECTORY = os.environ["HVDTRAIN_TEST_LIBRARY"], os.environ["HVDTRAIN_TEST_DATA"]
SAMPLES = 44


def stand_in(name, **content):
    module = ModuleType(name)
    module.__spec__, module.__path__ = ModuleSpec(name, None), []
    module.__dict__.update(content)
    sys.modules[name] = module


def sample(number):
    x = np.random.default_rng(number).normal(size=4).astype(np.float32)
    return {"number": number, "x": x}


def write_mosaicml():
    columns = {"number": "int", "x": "ndarray:float32:4"}
    with streaming.MDSWriter(out=DIRECTORY, columns=columns, size_limit=500) as writer:
        for number in range(SAMPLES):
            writer.write(sample(number))


def write_litdata():
    writer = BinaryWriter(DIRECTORY, chunk_size=10)  # by which litdata.optimize writes
    for number in range(SAMPLES):
        writer[number] = sample(number)
    writer.done()
    writer.merge()


if LIBRARY == "mosaicml-streaming":
    # It imports these names for its datasets of images. The builds of torchvision on PyPI load
    # only with the torch that they were built for.
    stand_in("torchvision")
    stand_in("torchvision.datasets", VisionDataset=object)
    stand_in("torchvision.transforms")
    stand_in("torchvision.transforms.functional", to_tensor=None)
    import streaming

    write = write_mosaicml
elif LIBRARY == "litdata":
    import litdata
    from litdata.streaming.writer import BinaryWriter

    write = write_litdata

if sys.argv[1:] == ["write"]:
    write()
    assert len([*Path(DIRECTORY).iterdir()]) > 4, "the index and several shards"
    sys.exit()

import hvdtrain  # noqa: E402

if LIBRARY == "mosaicml-streaming":
    data = streaming.StreamingDataset(local=DIRECTORY, batch_size=4, shuffle=True)
elif LIBRARY == "litdata":
    data = litdata.StreamingDataset(DIRECTORY, shuffle=True)
else:
    data = [sample(number) for number in range(SAMPLES)]
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with hvdtrain.training(model, optimizer, data) as training:
    for step in training:
        with step:
            for batch in step:
                errors = model(batch["x"]).squeeze(1) - batch["number"]
                step.backward(errors.square().mean())
