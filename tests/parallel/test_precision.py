"""16-bit steps on several ranks, with an overflow on one of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.config import Config
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.integrity import TensorHash
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.engine.step import Flags, StepResult, TrainStep, Update
from hvdtrain.exchange.build import build_exchange
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.optim.config import PrecisionConfig
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.precision import MasterWeights, build_precision, to_bfloat16
from hvdtrain.runtime.collectives import gather_bytes
from hvdtrain.runtime.config import RuntimeConfig
from hvdtrain.runtime.mesh import Group, Topology
from hvdtrain.tasks import Datasets
from tests.support.contexts import replicated
from tests.support.stepping import take_step

WIDTH, SIZE, CPU = 8, 4, torch.device("cpu")
FIRST = 2.0**16


class _Task:
    """A task whose gradients are multiplied by the first element of a batch."""

    def datasets(self) -> Datasets:
        raise NotImplementedError

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        rows, factor = batch[1:], batch[0, 0]
        return {"loss": model(rows).float().square().mean() * factor}


def _batch(step: int, number: int, factor: float) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    rows = torch.randn(SIZE + 1, WIDTH, generator=generator)
    rows[0, 0] = factor
    return rows


class _Rank:
    """This rank, with the objects of a run."""

    def __init__(self, topology: Topology, precision: str, exchange: ExchangeConfig) -> None:
        self._topology = topology
        micro_batches = 2 * topology.world_size
        batch = BatchConfig(global_size=SIZE * micro_batches, micro_size=SIZE)
        config = Config(batch=batch, exchange=exchange, runtime=RuntimeConfig(threads=1))
        task, self.precision = _Task(), build_precision(PrecisionConfig(precision), CPU)  # type: ignore[arg-type]
        model = task.model()
        if precision == "bf16-params":
            to_bfloat16(model)
        optimizer = build_optimizer(config.optim, model)
        if precision == "bf16-params":
            optimizer = MasterWeights(optimizer)
        self.exchange = build_exchange(exchange, micro_batches, optimizer, model, elastic=False)
        scale = self.precision.loss_scale
        further = [*self.exchange.state_parts()]
        if scale is not None:
            scale.unscale_gradients(self.exchange.parameters)
            further.append(scale)
        self.state = RunState(model, optimizer, Progress(), {}, further)
        context = replicated(topology)
        exact = exchange.exact
        self._step = TrainStep(
            Accumulate(task, model, micro_batches, context, exact, self.precision),
            self.exchange,
            Update(optimizer, self.exchange, 1.0, scale),
            batch,
            context,
        )
        self._assignment = Assignment(micro_batches, Group(topology.rank, topology.world_size))

    def step(self, step: int, overflows: bool = False) -> StepResult:
        """Run a step; in an overflow the last rank's first gradients are 1e4 times as large."""
        last = self._topology.rank == self._topology.world_size - 1
        factors = {next(iter(self._assignment)): 1e4 if overflows and last else 0.1}
        batches = [_batch(step, j, factors.get(j, 0.1)) for j in self._assignment]
        result = take_step(self._step, iter(batches), self._assignment, 0.01, Flags(step))
        self._step.complete(step + 1, pauses=False)
        return result

    def digests(self) -> set[bytes]:
        """Return the digests of all ranks' states; one digest if they are replicas."""
        return set(gather_bytes(TensorHash()(self.state.compared()), "digests"))

    def copy(self) -> dict[str, dict[str, Tensor]]:
        return {p.name: _cloned(p.tensors()) for p in self.state.parts}


def _cloned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _equal(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        one[part].keys() == other[part].keys()
        and all(torch.equal(tensor, other[part][name]) for name, tensor in one[part].items())
        for part in one
    )


def _resumed(rank: _Rank, topology: Topology, precision: str, exchange: ExchangeConfig) -> _Rank:
    """Return another rank object with its state, loaded by rank 0 and received by the others."""
    other, saved = _Rank(topology, precision, exchange), rank.copy()
    for part in other.state.parts:
        if topology.rank == 0 or part.scope == "local":
            part.load([saved[part.name]])
    other.state.broadcast(root=0)
    return other


EXCHANGES = {
    "dense": ExchangeConfig(),
    "float16 wire": ExchangeConfig(wire="float16"),
    "exact": ExchangeConfig(name="exact"),
    "topk": ExchangeConfig(compression="topk", ratio=0.3),
    "powersgd": ExchangeConfig(compression="powersgd", rank=1, start_step=1),
    "local": ExchangeConfig(sync_every=1),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_overflow_on_one_rank_skips_the_step_on_all_ranks(topology: Topology, name: str) -> None:
    exchange = EXCHANGES[name]
    rank = _Rank(topology, "fp16", exchange)
    assert rank.step(0).update.applied
    before = rank.copy()
    scales = []
    for step in range(1, 4):
        result = rank.step(step, overflows=True)
        assert not result.update.applied and result.update.overflow
        scales.append(result.update.loss_scale)
        assert len(rank.digests()) == 1
    assert scales == [FIRST, FIRST, FIRST / 2]
    after = rank.copy()
    assert after["loss_scale"]["scale"] == FIRST / 4
    changing = ("loss_scale", "wire")
    kept = [{p: t for p, t in state.items() if p not in changing} for state in (before, after)]
    assert _equal(*kept)

    resumed = _resumed(rank, topology, "fp16", exchange)
    for step in range(4, 7):
        one, other = rank.step(step), resumed.step(step)
        assert one.update.applied and one.update.loss_scale == other.update.loss_scale == FIRST / 4
        assert one.update.grad_norm == other.update.grad_norm < 100
    assert _equal(rank.copy(), resumed.copy()) and len(rank.digests()) == 1
    assert not _equal(kept[0], {p: t for p, t in rank.copy().items() if p not in changing})


@pytest.mark.parametrize("name", [name for name in EXCHANGES if name != "local"])
def test_ranks_with_bfloat16_parameters_stay_identical_and_resume(
    topology: Topology, name: str
) -> None:
    exchange = EXCHANGES[name]
    rank = _Rank(topology, "bf16-params", exchange)
    alone = _Rank(topology, "float32", exchange)
    for step in range(3):
        result, expected = rank.step(step), alone.step(step)
        assert result.update.applied and result.values["loss"] == pytest.approx(
            expected.values["loss"], rel=0.03
        )
        if exchange.compression == "none":
            assert result.update.grad_norm == pytest.approx(expected.update.grad_norm, rel=0.03)
    assert len(rank.digests()) == 1
    resumed = _resumed(rank, topology, "bf16-params", exchange)
    for step in range(3, 6):
        rank.step(step)
        resumed.step(step)
    assert _equal(rank.copy(), resumed.copy()) and len(rank.digests()) == 1
