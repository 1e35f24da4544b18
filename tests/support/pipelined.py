"""One rank of a pipeline, compared with the same run on one rank."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, call

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.data.assignment import Assignment
from hvdtrain.data.buckets import BatchUsage
from hvdtrain.engine.accumulate import Accumulate, Passes, StepTotals, Totals
from hvdtrain.engine.callbacks.evaluate import evaluating
from hvdtrain.engine.config import MemoryConfig
from hvdtrain.engine.memory import arrange_activations
from hvdtrain.engine.pipeline import Pipeline
from hvdtrain.engine.step import ControlVector, Flags, Sizes
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.vision import VisionTransformer
from hvdtrain.optim.loss_scale import LossScale
from hvdtrain.optim.precision import Precision
from hvdtrain.parallel.cut import CutModel
from hvdtrain.parallel.schedules import Layout, virtual_stages
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.device import seed_all
from hvdtrain.runtime.mesh import Group, Topology
from tests.support.contexts import replicated

CPU, SAMPLES, CONTEXT, VOCABULARY = torch.device("cpu"), 2, 8, 19


class Words:
    """A GPT on tokens in which 0 ends a document; the loss is a mean, or a sum and its weight."""

    metrics = ("accuracy",)

    def __init__(self, weighted: bool = False, **sizes: Any) -> None:
        self.weighted = weighted
        self.config = GPTConfig(
            heads=2, width=16, context=CONTEXT, vocab_size=VOCABULARY, **sizes
        )  # fmt: skip

    def model(self) -> nn.Module:
        return GPT(self.config)

    def batch(self, samples: int) -> Tensor:
        return torch.randint(VOCABULARY, (samples, CONTEXT + 1))

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Any]:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        logits = model(tokens, documents=(tokens == 0).cumsum(dim=1))
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        right = (logits.argmax(dim=-1) == targets).float().mean()
        if self.weighted:
            return {"loss": (losses.sum(), targets.numel()), "accuracy": right}
        return {"loss": losses.mean(), "accuracy": right}


class Normed(nn.Module):
    """Blocks with BatchNorm, and a parameter with two names at both ends."""

    first_stage = ("table",)
    last_stage = ("scores",)

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(4)
        )
        self.scores = nn.Linear(16, VOCABULARY, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes)
        for layer in self.layers:
            x = self.apply_block(layer, x, codes)
        return self.output(x, codes)

    def embed(self, codes: Tensor) -> Tensor:
        found: Tensor = self.table(codes)
        return found

    def apply_block(self, block: nn.Module, x: Tensor, codes: Tensor) -> Tensor:
        found: Tensor = block(x)
        return x + found

    def output(self, x: Tensor, codes: Tensor) -> Tensor:
        found: Tensor = self.scores(x)
        return found


class Codes:
    """Next-code prediction; its loss draws random numbers before it calls the model."""

    def model(self) -> nn.Module:
        return Normed()

    def batch(self, samples: int) -> dict[str, Tensor]:
        return {"codes": torch.randint(VOCABULARY, (8 * samples,))}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        codes = batch["codes"]
        if model.training:
            codes = torch.where(torch.rand(len(codes)) < 0.2, 0, codes)
        return {"loss": nn.functional.cross_entropy(model(codes), (codes + 1) % VOCABULARY)}


class Pictures:
    """The vision transformer on random images."""

    def model(self) -> nn.Module:
        return VisionTransformer(8, 4, 1, 3)

    def batch(self, samples: int) -> list[Tensor]:
        return [torch.randn(samples, 1, 8, 8), torch.randint(3, (samples,))]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}


@dataclass(frozen=True)
class Case:
    """Configuration of one run.

    Args:
        counts: number of micro-batches of each step.
        checkpointed: backward recomputes the blocks' activations.
        validation: samples of each batch of the evaluation.
    """

    task: Any
    schedule: str = "gpipe"
    counts: Sequence[int] = (4, 4, 0, 3)
    precision: str = "float32"
    checkpointed: bool = False
    validation: Sequence[int] = (2, 2, 2, 1)


class Seen(NamedTuple):
    """Results of a run.

    Args:
        losses: sums and weights of the values of each step, (steps, 2, values).
        evaluated: sums and weights of an evaluation at the end, (2, values).
        gradients, tensors: gradients of the last step; parameters and buffers after it.
    """

    losses: Tensor
    evaluated: Tensor
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]
    passes: Any


def _context() -> RankContext:
    return replicated(Topology(0, 1, 0, 1, ("host",)))


def _batches(case: Case, step: int) -> Iterator[Any]:
    for number in range(case.counts[step]):
        seed_all(5, step, number)
        batch = case.task.batch(SAMPLES)
        seed_all(5, step, number)
        yield batch


def _validation(case: Case) -> Iterator[tuple[int, Any]]:
    for number, samples in enumerate(case.validation):
        seed_all(6, number)
        yield samples, case.task.batch(samples)


def run(case: Case, passes: Passes) -> Seen:
    """Train with AdamW as TrainStep does, without an exchange."""
    optimizer = torch.optim.AdamW(passes.model.parameters(), lr=0.001)
    losses, gradients = [], {}
    for step, count in enumerate(case.counts):
        passes.buffers.keep()
        optimizer.zero_grad()
        control = ControlVector(
            Flags(step), BatchUsage(count), Sizes(2, 0, passes.statistics.numel),
            _context(),
        )  # fmt: skip
        values = Totals(control.totals.values.parts[:, :, : len(passes.forward.names)])
        sums = StepTotals(values, control.totals.statistics)
        sent = Mock()
        passes.train(_batches(case, step), Assignment(count, Group(0, 1)), sums, sent)
        assert bool(sent.mock_calls) == (count > 0)
        assert not count or sent.mock_calls[-1] == call(True)
        passes.finish()
        passes.statistics.apply(sums.statistics.value())
        losses.append(values.value()[:2])
        if count:
            gradients = {
                n: p.grad.clone() for n, p in passes.model.named_parameters() if p.grad is not None
            }
            optimizer.step()
    columns = len(passes.forward.evaluation_names)
    totals = Totals(torch.zeros(1, 3, columns, dtype=torch.float64))
    with evaluating(passes.model):
        passes.evaluate(_validation(case), totals)
    tensors = {n: t.detach().clone() for n, t in passes.model.state_dict().items()}
    return Seen(torch.stack(losses), totals.value()[:2], gradients, tensors, passes)


def _precision(case: Case) -> Precision:
    return Precision(case.precision, LossScale() if case.precision == "fp16" else None)


def _model(case: Case, precision: Precision) -> nn.Module:
    seed_all(1)
    model: nn.Module = case.task.model()
    if precision.loss_scale is not None:
        precision.loss_scale.unscale_gradients(model.parameters())
    if case.checkpointed:
        arrange_activations(MemoryConfig(checkpoint_activations="blocks"), case.task, model, CPU)
    return model


def alone(case: Case) -> Seen:
    """Run on one rank."""
    precision = Precision(case.precision, LossScale() if case.precision == "fp16" else None)
    model = _model(case, precision)
    return run(case, Accumulate(case.task, model, 4, _context(), precision=precision))


def piped(case: Case) -> Seen:
    """Run on this rank of a pipeline of all ranks of the default group."""
    precision = Precision(case.precision, LossScale() if case.precision == "fp16" else None)
    layout = Layout(dist.get_world_size(), virtual_stages(case.schedule))
    cut = CutModel(case.task, _model(case, precision), layout, dist.get_rank())
    group = dist.group.WORLD
    assert group is not None
    context = _context()
    return run(
        case, Pipeline(case.task, cut, case.schedule, group, 4, context, precision=precision)
    )


class Compared(NamedTuple):
    """Comparison of a rank of a pipeline with one rank.

    Args:
        names: names of the parameters and buffers of this rank, and of the whole model.
        tied: parameters that another rank also holds, with the bytes of their values.
        numbers: number of parameters of this rank, and of the whole model.
        bubble: seconds in schedules, seconds of waiting, the formula's fraction, and the number of
            steps.
        apart: the largest difference of losses, evaluation, gradients and tensors.
    """

    names: tuple[set[str], set[str]]
    tied: dict[str, bytes]
    numbers: tuple[int, int]
    apart: dict[str, float]
    bubble: tuple[float, float, float, int]


def _apart(one: Tensor, other: Tensor, floor: float = 1.0) -> float:
    """Return the difference relative to the largest number, or to `floor` if that is larger."""
    one, other = one.double(), other.double()
    return float((one - other).abs().max() / other.abs().max().clamp(min=floor))


def compare(cases: dict[str, Case]) -> dict[str, Compared]:
    """Compare each case, on this rank."""
    found = {}
    for name, case in cases.items():
        whole, part = alone(copy.deepcopy(case)), piped(copy.deepcopy(case))
        losses, evaluated = part.losses, part.evaluated
        dist.all_reduce(losses)  # as the control vector's sum: all ranks but the last add nothing
        dist.all_reduce(evaluated)
        passes, timer = part.passes, part.passes._context.timer
        bubble, waited = timer.bubble, timer.waited["pipeline"]
        found[name] = Compared(
            (_names(passes.model), _names(whole.passes.model)),
            {n: part.tensors[n].numpy().tobytes() for n in passes.tied},
            (_numel(passes.model), _numel(whole.passes.model)),
            {
                "losses": _apart(losses, whole.losses),
                "evaluation": _apart(evaluated, whole.evaluated),
                "gradients": max(
                    _apart(part.gradients[n], whole.gradients[n], 1e-3) for n in part.gradients
                ),
                "tensors": max(_apart(part.tensors[n], whole.tensors[n]) for n in part.tensors),
            },
            (bubble.schedule_seconds, waited, bubble.formula, bubble.steps),
        )
    return found


def _names(model: nn.Module) -> set[str]:
    """Return one name of each saved parameter and buffer, also if it has two names."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name for name, _ in named} & set(model.state_dict())


def _numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def lose_a_peer(seen: Path) -> None:
    """Rank 1 ends in the third step; rank 0 writes its error and the seconds until it came."""
    case = Case(Words(layers=4), "1f1b", (4, 4, 4))
    plain, calls = case.task.loss, []

    def loss(model: nn.Module, batch: Tensor) -> dict[str, Any]:
        calls.append(time.monotonic())
        if dist.get_rank() == 1 and len(calls) == 12:  # one of them was a trial pass
            os._exit(1)
        found: dict[str, Any] = plain(model, batch)
        return found

    case.task.loss = loss
    try:
        piped(case)
    except RuntimeError:
        seen.write_text(f"{len(calls)} {time.monotonic() - calls[-1]}")


def fail_in_the_task(name: str) -> str:
    """Return each rank's error if the task does something that a pipeline does not support."""
    case = Case(Words(layers=4), "1f1b", (4,))
    plain = case.task.loss

    def loss(model: nn.Module, batch: Tensor) -> dict[str, Any]:
        if name == "no call":
            return {"loss": torch.zeros(()), "accuracy": torch.zeros(())}
        found: dict[str, Any] = plain(model, batch)
        if name == "two calls":
            plain(model, batch)
        return found

    case.task.loss = loss
    if name == "shapes":
        sizes = iter([2, 3, 2, 2])
        batch = case.task.batch
        case.task.batch = lambda _: batch(next(sizes))
    try:
        piped(case)
    except UserError as error:
        dist.destroy_process_group()  # as at the end of the process: the other rank waits for it
        return str(error)
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"
