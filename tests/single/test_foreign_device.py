"""A step on a device other than the CPU: how often the CPU waits for it, and what it computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.config import parse
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.loader import to_device
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.step import Flags, TrainStep, Update
from hvdtrain.exchange import dense
from hvdtrain.exchange.build import build_exchange
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.wire import WIRES
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.precision import Precision
from hvdtrain.process.data import build_data
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Group, Topology
from hvdtrain.tasks import Datasets, collate_of
from tests.support.contexts import replicated
from tests.support.datasets import KEYS, sales, write
from tests.support.foreign_device import META, ForeignDevice, MixedDevicesError, foreign_device

PASSES = 2
MOST_WAITS = 2  # in a step, with any number of micro-batches: the control vector, and the norm
GPT_CONFIG = GPTConfig(layers=1, heads=4, width=64, context=64, vocab_size=512)
ONE = Topology(0, 1, 0, 1, ("a",))


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CONTROLLER", "gloo")
        patch.setenv("HOROVOD_CPU_OPERATIONS", "gloo")
        # Meta tensors have no values: sums of samples are zero.
        patch.setattr(TrainStep, "_check", lambda *_: None)
        # torch has no autocast for them.
        patch.setattr(Precision, "autocast", lambda *_: nullcontext())
        initialize()
        yield


class _Language:
    """A language model; `pairs`: its loss is (sum, number of tokens), its metric a number."""

    metrics = ("accuracy",)

    def __init__(self, pairs: bool = False) -> None:
        self._pairs = pairs

    def datasets(self) -> Datasets:
        raise NotImplementedError

    def model(self) -> GPT:
        return GPT(GPT_CONFIG)

    def batch(self) -> Tensor:
        return torch.zeros(2, 65, dtype=torch.int64)

    def loss(self, model: GPT, batch: Tensor) -> dict[str, Any]:
        targets = batch[:, 1:]
        loss = model.loss(batch[:, :-1], targets)
        count = targets.numel()
        if not self._pairs:
            return {"loss": loss, "accuracy": loss.detach()}
        return {"loss": (loss * count, count), "accuracy": (1.0, torch.tensor(count))}


def _step(
    task: Any,
    model: nn.Module,
    batches: Callable[[], Any],
    exchange: ExchangeConfig | None = None,
    optim: OptimConfig | None = None,
    precision: str = "float32",
    elastic: bool = False,
) -> ForeignDevice:
    """What happens on the device in the second step; in the first, caches are filled."""
    scale = LossScale() if precision == "fp16" else None
    optimizer = build_optimizer(optim or OptimConfig(), model)
    exchange = exchange or ExchangeConfig()
    exchanges = build_exchange(exchange, PASSES, optimizer, model, elastic)
    Ema(optimizer, model, 0.99)
    if scale is not None:
        scale.unscale_gradients(exchanges.parameters)
    context = replace(replicated(ONE), device=META)
    passes = Accumulate(task, model, PASSES, context, exchange.exact, Precision(precision, scale))
    update = Update(optimizer, exchanges, 1.0, scale)
    sizes = BatchConfig(global_size=2 * PASSES, micro_size=2)
    step = TrainStep(passes, exchanges, update, sizes, context)
    assignment = Assignment(PASSES, Group(0, 1))
    with foreign_device() as device:
        for number in range(2):
            device.waits.clear()
            on_device = (to_device(batches(), META) for _ in range(PASSES))
            step.begin(on_device, assignment, Flags(number))
            step.train()
            assert all(p.grad is None or p.grad.is_meta for p in model.parameters())
            step.exchange()
            assert step.end(1e-3).update.applied
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
    return device


def _model(task: Any) -> nn.Module:
    """The task's model, on the device."""
    model: nn.Module = task.model()
    return model.to(META)


CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, loss as a sum": {"pairs": True},
    "dense, elastic": {"elastic": True},
    "float16 on the wire": {"exchange": ExchangeConfig(wire="float16")},
    "exact": {"exchange": ExchangeConfig(name="exact")},
    "topk": {"exchange": ExchangeConfig(compression="topk")},
    "powersgd": {"exchange": ExchangeConfig(compression="powersgd", start_step=0)},
    "local SGD": {"exchange": ExchangeConfig(sync_every=2)},
    "fp16": {"precision": "fp16"},
    "muon": {"optim": OptimConfig(name="muon")},
    "lion": {"optim": OptimConfig(name="lion")},
    "sgd": {"optim": OptimConfig(name="sgd")},
    "adafactor": {"optim": OptimConfig(name="adafactor")},
}


@pytest.mark.parametrize("case", CASES)
def test_step_waits_for_its_device_at_most_twice(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Horovod has no collectives for meta tensors.
    monkeypatch.setattr(dense, "begin_sum", lambda values, name: 0)
    monkeypatch.setattr(dense, "completed", lambda handle: None)
    options = {**CASES[case]}
    task = _Language(options.pop("pairs", False))
    device = _step(task, _model(task), task.batch, **options)
    # torch's Adafactor reads two norms of each parameter, see docs/training.md.
    ours = Counter({line: n for line, n in device.waits.items() if "_adafactor.py" not in line})
    assert ours.total() <= MOST_WAITS, ours
    assert set(device.waits) == set(ours) or case == "adafactor"
    # float64: the control vector, and the few columns that powersgd makes orthonormal.
    assert device.widest < 64 * 64 or case == "powersgd"


TABULAR = ["--tabular.objective", "pretraining"]
TASKS: dict[str, list[str]] = {
    "image": ["--task", "image", "--image.mixup", "0.2"],
    "tabular": [*KEYS, *TABULAR],
}


@pytest.mark.parametrize("name", TASKS)
def test_step_of_a_task_waits_for_its_device_at_most_twice(tmp_path: Path, name: str) -> None:
    data = ["--data.train", str(write(sales(100), tmp_path / "t.csv"))] if name == "tabular" else []
    task, datasets = build_data(parse([*TASKS[name], *data]))
    samples = [datasets.train[index] for index in range(2)]
    device = _step(task, _model(task), lambda: collate_of(task)(samples))
    assert device.waits.total() <= MOST_WAITS, device.waits


@pytest.mark.parametrize("learn", ["answers", "labels"])
def test_loss_of_transformers_model_does_not_wait_for_its_device(
    learn: Literal["answers", "labels"],
) -> None:
    transformers = pytest.importorskip("transformers")
    from hvdtrain.tasks.huggingface import HuggingFace
    from hvdtrain.tasks.huggingface_config import HuggingFaceConfig, HuggingFaceTaskConfig

    task = HuggingFace(HuggingFaceTaskConfig(HuggingFaceConfig(learn=learn)))
    sizes = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, pad_token_id=0
    )
    kind = "GPT2ForSequenceClassification" if learn == "labels" else "GPT2LMHeadModel"
    model = getattr(transformers, kind)(sizes).to(META)
    tokens = torch.arange(8)
    sample = (tokens, 5, 1) if learn == "labels" else (tokens, tokens.where(tokens < 5, -100))
    batch = to_device(task.collate([sample, sample]), META)
    assert batch[-1] == 5
    with foreign_device() as device:
        task.loss(model, batch)["loss"][0].backward()
    assert not [line for line in device.waits if line.startswith("hvdtrain/")], device.waits


@pytest.mark.parametrize("wire", WIRES)
def test_wire_formats_do_not_wait_for_the_device(wire: str) -> None:
    with foreign_device() as device:
        wired = WIRES[wire]()
        sent, context = wired.compress(torch.ones(4, 3, device=META))
        assert wired.decompress(sent, context).shape == (4, 3)  # type: ignore[arg-type]
    assert not device.waits


def test_foreign_device_counts_waits_and_refuses_mixed_devices() -> None:
    x = torch.ones(3, device=META)
    waits: list[Callable[[], object]] = [
        x[0].item, x.tolist, x.cpu, x.nonzero, lambda: bool(x[0]), lambda: float(x[0]),
        lambda: x[x > 0], lambda: torch.tensor([1.0], device=META),
        lambda: torch.zeros(3).to(META), lambda: x.copy_(torch.zeros(3)),
        lambda: torch.zeros(3).copy_(x),
    ]  # fmt: skip
    with foreign_device() as device:
        torch.full((), 2.0, device=META).add(torch.zeros(3).to(META, non_blocking=True)).add(x)
        assert not device.waits
        for number, wait in enumerate(waits, start=1):
            with suppress(NotImplementedError):  # the number of chosen elements is not known
                wait()
            assert device.waits.total() == number, number
        with pytest.raises(MixedDevicesError, match="tests/single/test_foreign_device"):
            torch.stack((x[0], torch.zeros(())))
        with pytest.raises(MixedDevicesError):
            x + torch.ones(3)


def test_elastic_dense_exchange_keeps_gradients_on_the_device() -> None:
    model = nn.Linear(3, 2, device=META)
    exchange = DenseExchange(torch.optim.SGD(model.parameters()), model, elastic=True)
    assert exchange._memory is not None
