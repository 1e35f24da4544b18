"""Replays of other ranks' micro-batches, in every exchange and precision."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import BatchConfig, LoaderConfig
from hvdtrain.data.loader import Loading, TrainLoader
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.integrity import TensorHash
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.replay import Replay, ReplayActions, ReplayPlan, StepDiscarded
from hvdtrain.engine.step import Flags, TrainStep, Update
from hvdtrain.errors import EXIT_USER
from hvdtrain.exchange.build import build_exchange
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.optim.config import OptimConfig, PrecisionConfig
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.optim.precision import build_precision
from hvdtrain.runtime.collectives import AgreedError
from hvdtrain.runtime.mesh import Group, Topology
from hvdtrain.tasks import Datasets
from tests.support.contexts import replicated
from tests.support.stepping import take_step

STEPS, SIZE, WIDTH, SAMPLES = 4, 4, 24, 60
EXCHANGES = {
    "dense": ExchangeConfig(),
    "exact": ExchangeConfig(name="exact"),
    "topk": ExchangeConfig(compression="topk", ratio=0.3),
    "powersgd": ExchangeConfig(compression="powersgd", rank=1, start_step=1),
}


class _Task:
    """Regression with BatchNorm and dropout."""

    def datasets(self) -> Datasets:
        raise NotImplementedError

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        layers = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Dropout(0.2),
            nn.Linear(WIDTH, 1),
        )
        return nn.Sequential(*layers)

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        noise = torch.rand_like(batch)
        return {"loss": model(batch + noise).float().square().mean()}


class _Run:
    """A run without a loop.

    Args:
        wrong: backward passes of this rank, from 0, in which the gradient is wrong.
        passed_over: global batches of the order that the run has passed over before.
    """

    def __init__(
        self,
        topology: Topology,
        every: int,
        exchange: str = "dense",
        precision: str = "float32",
        passes: int = 1,
        workers: int = 0,
        wrong: Sequence[int] = (),
        passed_over: int = 0,
    ) -> None:
        self._passed_over = passed_over
        micro_batches = passes * topology.world_size
        batch = BatchConfig(global_size=SIZE * micro_batches, micro_size=SIZE)
        task, cpu = _Task(), torch.device("cpu")
        chosen = build_precision(PrecisionConfig(precision), cpu)  # type: ignore[arg-type]
        self._model = model = task.model()
        optimizer = build_optimizer(OptimConfig(), model)
        found = build_exchange(EXCHANGES[exchange], micro_batches, optimizer, model, elastic=False)
        if chosen.loss_scale is not None:
            chosen.loss_scale.unscale_gradients(found.parameters)
        passed = count()
        found.parameters[-1].register_hook(
            lambda gradient: gradient * 100 if next(passed) in wrong else None
        )
        context = replicated(topology)
        rows = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        plan = ReplayPlan(every, topology.rank, topology.hosts)
        self._loader = TrainLoader(
            rows,  # type: ignore[arg-type]  # a tensor is map-style, too
            passed_over * batch.global_size,
            batch,
            Assignment(micro_batches, Group(topology.rank, topology.world_size)),
            seed=1,
            loading=Loading(LoaderConfig(workers=workers)),
            replayed=plan.replayed,
        )
        self._progress = Progress(samples=passed_over * batch.global_size)
        self.agreed = self.differed = 0
        passes_of_rank = Accumulate(
            task, model, micro_batches, context, exchange == "exact", chosen
        )
        position = lambda: self._progress.samples  # noqa: E731
        actions = ReplayActions(count=self._count)
        self._step = TrainStep(
            passes_of_rank,
            found,
            Update(optimizer, found, 1.0, chosen.loss_scale),
            batch,
            context,
            replay=Replay(
                plan, passes_of_rank, found.trained, self._loader, position, actions, context
            ),
        )
        self.losses: list[float] = []

    def _count(self, agreed: int, differed: int) -> None:
        self.agreed += agreed
        self.differed += differed

    def steps(self) -> None:
        """Do all steps, and repeat those that are discarded."""
        progress = self._progress
        while progress.step < STEPS:
            batch, assignment = progress.step + self._passed_over, self._loader.assignment
            batches = self._loader.next_step(batch)
            flags = Flags(progress.step, batch=batch)
            try:
                result = take_step(self._step, batches, assignment, 0.01, flags)
            except StepDiscarded as discarded:
                assert not discarded.membership_changed
                self._loader.go_back(progress.samples)
                continue
            progress.step += 1
            progress.samples += result.used.samples
            self.losses.append(result.values["loss"])
        self._loader.close()

    def state(self) -> bytes:
        """Digest of the model with its buffers."""
        return TensorHash()(self._model.state_dict())


CASES = {
    "dense": {},
    "exact, two passes": {"exchange": "exact", "passes": 2},
    "topk": {"exchange": "topk"},
    "powersgd, two passes": {"exchange": "powersgd", "passes": 2},
    "bf16": {"precision": "bf16", "exchange": "exact"},
    "fp16 with a loss scale, two passes": {"precision": "fp16", "passes": 2},
    "worker process": {"workers": 1, "passes": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_replays_agree_and_change_no_bit(topology: Topology, case: str) -> None:
    with_replays, without = (_Run(topology, n, **CASES[case]) for n in (2, 0))  # type: ignore[arg-type]
    with_replays.steps()
    without.steps()
    expected = topology.world_size * STEPS // 2 if topology.world_size > 1 else 0
    assert (with_replays.agreed, with_replays.differed) == (expected, 0)
    assert with_replays.losses == without.losses
    assert with_replays.state() == without.state()


@pytest.mark.parametrize("every", [2, 3])
def test_wrong_gradients_are_found_after_batches_were_passed_over(
    topology: Topology, every: int
) -> None:
    last = topology.world_size - 1
    runs = [
        _Run(topology, every, wrong=wrong if topology.rank == last else (), passed_over=every - 1)
        for wrong in ((), [0])  # the first batch after `every - 1` is replayed
    ]
    for run in runs:
        run.steps()
    expected = len(range(0, STEPS, every)) * topology.world_size if last else 0
    assert (runs[0].agreed, runs[0].differed) == (expected, 0)
    assert runs[1].differed == (1 if last else 0)
    assert not last or runs[1].state() == runs[0].state()


# In a step with replays, the first backward pass of a rank is a replay, the second its own.
@pytest.mark.parametrize(("exchange", "at"), [("dense", 0), ("topk", 1), ("powersgd", 1)])
def test_step_is_repeated_after_a_transient_error(
    topology: Topology, exchange: str, at: int
) -> None:
    last = topology.world_size - 1
    if not last:
        return  # nothing to compare with
    undisturbed = _Run(topology, 1, exchange)
    undisturbed.steps()
    disturbed = _Run(topology, 1, exchange, wrong=[at] if topology.rank == last else [])
    disturbed.steps()
    assert disturbed.differed == 1
    assert disturbed.losses == undisturbed.losses
    assert disturbed.state() == undisturbed.state()


def test_ranks_stop_before_a_wrong_update_if_no_majority_decides(topology: Topology) -> None:
    last = topology.world_size - 1
    if last != 1:
        return  # with more ranks, a majority decides
    run = _Run(topology, 1, wrong=range(sys.maxsize) if topology.rank == last else [])
    before = run.state()
    with pytest.raises(AgreedError, match=r"rank 0 on .* and no majority decides"):
        run.steps()
    assert run.state() == before and not run.losses


def test_gradients_that_depend_on_the_rank_switch_replays_off(
    topology: Topology, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_Task, "loss", _loss_of_rank(topology.rank))
    run = _Run(topology, 1)
    run.steps()
    assert len(run.losses) == STEPS
    if topology.world_size > 1:
        assert "no more replays until the next start" in caplog.text
        assert run.differed == topology.world_size  # in the first step only


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (1e-6, "an operation of the model or its loss is not deterministic"),
        (0.3, "depends on more"),
    ],
)
def test_exact_run_ends_if_gradients_are_not_reproducible(
    topology: Topology, monkeypatch: pytest.MonkeyPatch, change: float, why: str
) -> None:
    if topology.world_size < 2:
        return  # nothing to compare with
    monkeypatch.setattr(_Task, "loss", _loss_of_rank(topology.rank * change, change))
    run = _Run(topology, 1, "exact")
    before = run.state()
    with pytest.raises(AgreedError, match=r"as exchange\.name exact requires") as raised:
        run.steps()
    assert why in str(raised.value) and raised.value.exit_code == EXIT_USER
    assert run.state() == before and not run.losses


def test_exact_run_ends_if_devices_round_differently(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    if topology.world_size < 2:
        return  # nothing to compare with
    # Each time the same difference, as on another device.
    monkeypatch.setattr(_Task, "loss", _loss_of_rank(topology.rank * 1e-6, change=0.0))
    kind = f"processor {topology.rank}"
    monkeypatch.setattr("hvdtrain.engine.replay.arithmetic", lambda device: kind)
    run = _Run(topology, 1, "exact")
    with pytest.raises(AgreedError, match=r"differently \(processor 0; processor 1\)"):
        run.steps()


def _loss_of_rank(rank: float, change: float = 0.3):  # type: ignore[no-untyped-def]
    calls = count()

    def loss(self: _Task, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        factor = 1.0 + change * next(calls) + rank
        return {"loss": model(batch * factor).float().square().mean() * factor}

    return loss
