"""Data that differ between ranks or starts: found by their samples, whatever the dataset says."""

from __future__ import annotations

import io
import random
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import datasets as huggingface
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from hvdtrain.audit.report import audit
from hvdtrain.config import Config
from hvdtrain.data.batched import batches_of
from hvdtrain.data.config import LoaderConfig
from hvdtrain.data.sample_facts import SampleFacts
from hvdtrain.data.samples import facts_of, open_files, values_of
from hvdtrain.errors import UserError
from hvdtrain.process.data import build_datasets
from hvdtrain.tasks import Datasets
from tests.support import runs, warm
from tests.support.job import Finished

SCRIPT = str(runs.REPOSITORY / "tests/support/scripts/other_samples.py")
FLAGS = [
    *("--batch.global_size", "8", "--batch.micro_size", "4", "--telemetry.port", "0"),
    *("--exchange.name", "exact", "--runtime.threads", "1"),
]
SECONDS = 90


def start(
    root: Path, data: str, launcher: str, steps: int, command: list[str], more: Any = ()
) -> Finished:
    argv = [*FLAGS, "--train.duration", str(steps), "--run.root", str(root), "--run.id", "a"]
    env = {
        "HVDTRAIN_TEST_DATA": data,
        "HVDTRAIN_TEST_SHARDS": str(root / "shards.tar"),
        **dict(more),
    }
    return runs.start(root / "output", argv, launcher, env, command).wait(SECONDS)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        ("split without a seed", "sample 0"),
        ("divided stream", "sample 0 ['x']"),
        ("shuffle without a seed", "['x'] of the run"),
        ("shards", "[0] of the run"),
        ("sampler", "of the run"),
    ],
)
def test_ranks_that_read_different_samples_are_refused(
    tmp_path: Path, data: str, place: str
) -> None:
    done = start(tmp_path, data, "gloo:2", 4, [warm.python(2), SCRIPT])
    assert done.returncode == 2, done
    assert done.stderr.count("hvdtrain: error: ") == 1 and place in done.stderr, done


def test_stream_with_random_numbers_of_its_own_is_warned_of(tmp_path: Path) -> None:
    done = start(tmp_path, "random", "gloo:2", 4, [warm.python(2), SCRIPT])
    assert done.returncode == 0, done
    assert done.stderr.count("sample 0 [0] of the training data differs each time") == 1, done


def test_step_of_a_stream_ends_without_a_request_beyond_its_last_batch(tmp_path: Path) -> None:
    done = start(tmp_path, "measured", "gloo:2", 15, [warm.python(2), SCRIPT], {"BREAK": "1"})
    assert done.returncode == 0, done
    assert runs.losses(tmp_path / "a")[0] != runs.losses(tmp_path / "a")[1]


def test_labels_numbered_in_the_order_of_a_set_are_refused(tmp_path: Path) -> None:
    command = [runs.sys.executable, SCRIPT]  # forked ranks have one order of hashes
    done = start(tmp_path, "labels of a set", "gloo:2", 4, command)
    assert done.returncode == 2, done
    assert "the training data here is not the data of" in done.stderr, done


def test_resumed_run_refuses_other_data_of_the_same_length(tmp_path: Path) -> None:
    command = [warm.python(1), SCRIPT]
    for data, steps, code in (("rows", 4, 0), ("others", 4, 2), ("others", 8, 2), ("rows", 8, 0)):
        done = start(tmp_path, data, "", steps, command)
        assert done.returncode == code, done
        assert ("is not what it was at the checkpoint of step 4" in done.stderr) == (code == 2)
    assert [line["step"] for line in runs.metrics(tmp_path / "a")] == list(range(1, 9))
    assert (
        "of the samples' content, 4 at each start were compared" in audit(tmp_path / "a").to_text()
    )


def test_shuffled_stream_of_hugging_face_has_one_curve_and_resumes(tmp_path: Path) -> None:
    command = [warm.python(2), SCRIPT]
    assert start(tmp_path / "one", "seeded", "", 15, command).returncode == 0
    assert start(tmp_path / "two", "seeded", "gloo:2", 7, command).returncode == 0
    assert start(tmp_path / "two", "seeded", "", 15, command).returncode == 0
    assert runs.losses(tmp_path / "two/a") == runs.losses(tmp_path / "one/a")


def test_loader_given_as_a_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="is a DataLoader, not a dataset of samples"):
        built(DataLoader(TensorDataset(torch.ones(96)), batch_size=8))


def built(data: Any) -> Datasets:
    class Task:
        def datasets(self) -> Datasets:
            return Datasets(data)

    return build_datasets(Task(), Config())  # type: ignore[arg-type]


def rows(*stages: Any) -> Any:
    return webdataset.DataPipeline(lambda: iter(torch.ones(24, 1)), *stages)


def hugging_face() -> Any:
    return huggingface.Dataset.from_dict({"x": [*range(24)]}).to_iterable_dataset()


@pytest.mark.parametrize(
    ("data", "maker"),
    [
        (lambda: rows(webdataset.batched(8)), ".batched()"),
        (lambda: rows(webdataset.batched(8), webdataset.shuffle(2)), ".batched()"),
        (lambda: webdataset.WebDataset("none.tar", shardshuffle=False).batched(8), ".batched()"),
        (lambda: webdataset.WebLoader(rows(webdataset.batched(8)), batch_size=None), ".batched()"),
        (lambda: webdataset.WebLoader(rows(), batch_size=8).shuffle(2), "WebLoader"),
    ],
)
def test_batches_of_webdataset_are_refused(data: Any, maker: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"count as one sample: leave {maker} out")):
        built(data().with_length(3, silent=True))


@pytest.mark.parametrize(
    "data",
    [
        lambda: rows(webdataset.batched(2, collation_fn=None)),  # pairs, say
        lambda: rows(webdataset.batched(2), webdataset.map(lambda pair: pair.sum(0))),
        lambda: nodes.Loader(nodes.Prefetcher(nodes.Batcher(nodes.IterableWrapper([1]), 2), 2)),
        lambda: hugging_face().batch(4).shuffle(seed=1),
        lambda: hugging_face().with_format("torch").batch(4),
        lambda: IterableWrapper([1, 2, 3]).batch(2),
    ],
)
def test_samples_that_may_be_batches_have_a_note(data: Any) -> None:
    [note] = built(data()).notes
    assert "has a stage that makes batches" in note


@pytest.mark.parametrize(
    "data",
    [
        lambda: rows(webdataset.batched(8), webdataset.unbatched()),
        lambda: webdataset.WebLoader(rows(), batch_size=None),
        lambda: nodes.Loader(nodes.IterableWrapper([1])),
        lambda: hugging_face().map(lambda rows: rows, batched=True),
        lambda: hugging_face().batch(by_column="x"),  # an episode is a sample
        lambda: hugging_face().batch(4).map(lambda rows: {"x": rows["x"][0]}, batched=True),
        lambda: IterableWrapper([1, 2, 3]).batch(2).unbatch(),
    ],
)
def test_pipelines_of_single_samples_have_no_note(data: Any) -> None:
    assert not built(data()).notes


def test_attributes_of_own_datasets_are_not_looked_at() -> None:
    class Strange(Augmented):
        f = function = property(lambda self: 1 / 0)

        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    data = Strange()
    data.__dict__.update(f=torch.ones(2), pipeline=[webdataset.batched(8)], batched=torch.ones(2))
    assert not batches_of(data)


def test_stateful_loader_of_batches_is_refused() -> None:
    batches = BatchSampler(range(24), 8, drop_last=False)
    with pytest.raises(UserError, match="is a StatefulDataLoader, not a dataset of samples"):
        built(StatefulDataLoader(TensorDataset(torch.ones(24)), batch_sampler=batches))


# --- facts ---------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Rows with random numbers of each generator that is seeded."""

    def __init__(self, offset: float = 0.0) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> Any:
        drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return {"x": torch.full((80,), number + self.offset), "drawn": drawn, "label": number % 3}


class Own(Augmented):
    """In addition a random number without a seed."""

    def __getitem__(self, number: int) -> Any:
        return super().__getitem__(number), random.SystemRandom().random()


class Opened(Augmented):
    """Opens its file at the first access."""

    file: Any = None

    def __getitem__(self, number: int) -> Any:
        self.file = self.file or Path(__file__).open()  # noqa: SIM115
        return super().__getitem__(number)


def facts(dataset: Dataset[Any], seed: int = 1, workers: int = 0) -> SampleFacts:
    return SampleFacts.from_json(facts_of(dataset, seed, LoaderConfig(workers)).to_json())


def test_facts_of_equal_data_are_equal_and_of_other_data_not() -> None:
    before = torch.rand(1), torch.get_rng_state()
    one = facts(Augmented())
    assert torch.equal(before[1], torch.get_rng_state())
    assert one.fixed.keys() == {"0", "49", "25", "12"}
    assert one.differs_from(facts(Augmented())) == ""
    assert one.differs_from(facts(Augmented(1e-7))) == "", "rounding"
    assert one.differs_from(facts(Augmented(0.1))) == "sample 0 ['x']"
    assert one.differs_from(facts(Augmented(), seed=2)) == "sample 0 ['drawn']"
    assert one.differs_from(facts(Augmented(), seed=2), fixed_only=True) == ""


def test_random_numbers_without_a_seed_are_named_and_not_compared() -> None:
    one, other = facts(Own()), facts(Own())
    assert one.unseeded == ["[1]"] and one.differs_from(other) == ""


@pytest.mark.parametrize("workers", [0, 2])
def test_files_that_workers_open_are_not_opened_before(workers: int) -> None:
    dataset = Opened()
    assert facts(dataset, workers=workers).differs_from(facts(Opened())) == ""
    assert (dataset.file is None) == bool(workers)


def test_values_of_samples_differ_with_content_dtype_and_order() -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    samples = [
        0, 1, True, None, "a", "b", b"a", 0.5, 2e-5, 1e-5, [1, 2], [2, 1], {"a": 1}, image,
        image.rotate(90), torch.arange(100), torch.arange(100).flip(0), torch.arange(100).float(),
        torch.zeros(100), torch.zeros(10, 10), float("nan"), np.float32(0.25),
        torch.tensor([1 + 1j]), torch.eye(20).to_sparse(),
    ]  # fmt: skip
    found = [SampleFacts({"0": values_of(sample)}) for sample in samples]
    assert all(facts.fixed["0"] for facts in found)
    for one, own in enumerate(found):
        for other, theirs in enumerate(found):
            place = own.differs_from(theirs)
            shared = own.fixed["0"].keys() & theirs.fixed["0"].keys()
            assert not shared or bool(place) == (one != other), (samples[one], samples[other])


def test_small_differences_are_found_and_roundings_are_not() -> None:
    def equal(one: Any, other: Any) -> bool:
        first, second = (SampleFacts({"0": values_of(sample)}) for sample in (one, other))
        return not first.differs_from(second)

    tokens = np.random.default_rng(0).integers(0, 50000, 512)
    changed = tokens.copy()
    changed[300] += 1
    assert not equal({"input_ids": tokens.tolist()}, {"input_ids": changed.tolist()})
    assert not equal(tokens, changed)
    noise = [np.random.default_rng(seed).standard_normal((3, 64, 64)) for seed in range(40)]
    assert not any(equal(noise[0], other) for other in noise[1:])
    pixels = (np.random.default_rng(1).random((3, 64, 64)) * 200 + 20).astype(np.uint8)
    assert equal(pixels, pixels + (np.arange(64) % 7 == 0)), "another decoder"
    assert equal(noise[0], noise[0].astype(np.float32))
    assert equal("/scratch/1/a.png", "/scratch/2/a.png") and not equal("/a.png", "/b.png")
    assert values_of(np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (0,)))


class Closed(dict[str, Any]):
    """As an archive of NumPy that is closed."""

    def items(self) -> Any:
        raise AttributeError("it is closed")


def test_generators_of_a_dataset_keep_their_states() -> None:
    class Drawing(Augmented):
        def __init__(self) -> None:
            super().__init__()
            self.others = [random.SystemRandom(), Closed()]
            self.generators = [
                torch.Generator(), np.random.default_rng(0), np.random.RandomState(0),
                random.Random(0),
            ]  # fmt: skip

        def __getitem__(self, number: int) -> Any:
            a, b, c, d = self.generators
            return [torch.rand(1, generator=a).item(), b.random(), c.random(), d.random()]  # type: ignore

    read = Drawing()
    assert facts(read).unseeded == ["", "~1", "~2"]
    assert read[0] == Drawing()[0]


def test_open_files_of_a_dataset_are_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "rows.zip", "w") as archive:
        archive.writestr("0", b"0")
    rows = Augmented()
    assert open_files(rows) == []
    rows.memory, rows.itself = io.BytesIO(), rows  # type: ignore[attr-defined]
    rows.module, rows.streams = random, [sys.__stdin__, sys.__stderr__]  # type: ignore[attr-defined]
    assert open_files(rows) == []
    with zipfile.ZipFile(tmp_path / "rows.zip") as archive:
        rows.archive = archive  # type: ignore[attr-defined]
        assert open_files(rows) == ["dataset.archive.fp"]
        assert open_files(ConcatDataset([rows])) == ["dataset.datasets[0].archive.fp"]
    assert open_files(rows) == []


def test_sample_that_cannot_be_read_is_left_out() -> None:
    class Broken(Augmented):
        def __getitem__(self, number: int) -> Any:
            if number == 49:
                raise OSError("no such file")
            return super().__getitem__(number)

    assert "49" not in facts(Broken()).fixed and "0" in facts(Broken()).fixed
