"""Pipeline parallelism: torch's schedules, and the assignment of blocks to stages.

A schedule is built once for each number of micro-batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

from hvdtrain.errors import UserError

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zero-bubble")
_SEVERAL_STAGES = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
# torch 2.9 always concatenates the outputs, which fails for losses: they are scalars. Its GPipe
# refuses fewer micro-batches than ranks.
_OLD = "return_outputs" not in inspect.signature(ScheduleGPipe.step).parameters
_KEPT = 8  # schedules; each has a buffer for every activation that it receives


def virtual_stages(schedule: str) -> int:
    """Number of stages per rank of a schedule."""
    return 2 if schedule in _SEVERAL_STAGES else 1


@dataclass(frozen=True)
class Pass:
    """Pass of one micro-batch through one stage.

    Args:
        stage: its number.
        micro_batch: its number among the micro-batches of the schedule.
        x: output of the previous stage; None: this is the first stage.
        draws: state of torch's generators when the previous stage left the model; None: use
            `Hooks.draws`.
        trial: torch determines the output's shape; the result is discarded.
    """

    stage: int
    micro_batch: int
    x: Tensor | None
    draws: Tensor | None
    trial: bool


@dataclass(frozen=True)
class Hooks:
    """Functions that a schedule calls on this rank.

    Args:
        compute: maps a pass to the input of the next stage; on the last stage to the loss, which is
            differentiated.
        draws: for each micro-batch, the state of torch's generators before the task's loss().
        computing: context around each forward ("forward") and backward ("backward").
    """

    compute: Callable[[Pass], Tensor]
    draws: Callable[[int], Tensor]
    computing: Callable[[str], AbstractContextManager[None]]


class _Module(nn.Module):
    """Stage module that torch's PipelineStage calls.

    Random numbers: the state of the generators is sent from stage to stage with the activations if
    a stage has drawn, so each stage draws what it would draw if one rank held all stages.
    """

    def __init__(
        self, number: int, parts: Sequence[nn.Module | nn.Parameter], last: bool, hooks: Hooks,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        # Parameters whose gradients torch computes separately, with zero bubble.
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.rest = nn.ParameterList(part for part in parts if not isinstance(part, nn.Module))
        self._number, self._last, self._hooks, self._device = number, last, hooks, device
        self._trial, self._draws = True, False

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Args: received: output of the previous stage; empty on the first."""
        index, trial = int(micro_batch), self._trial
        x, *state = received or (None,)
        if trial and x is not None:
            with torch.no_grad():
                x.zero_()  # torch passes uninitialized memory
        if x is not None and x.requires_grad:
            x = x.view_as(x)  # the buffer itself is reused, and would keep the hook
            x.register_hook(lambda gradient: gradient.contiguous())  # to be sent
        before = self._hooks.draws(index)
        set_generators(before, self._device)
        draws = state[0] if state and not trial else None
        found = self._hooks.compute(Pass(self._number, index, x, draws, trial)).contiguous()
        after = generators(self._device)
        if trial:
            self._trial = False
            drawn = bool(state) or not torch.equal(before, after)
            self._draws = drawn and not self._last
        return (found, after.to(self._device)) if self._draws else found


class _Stage(PipelineStage):
    """torch's stage, which also reports when it computes, and raises the task's own errors."""

    def __init__(
        self, module: nn.Module, number: int, layout: Layout, device: torch.device,
        group: ProcessGroup, computing: Callable[[str], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        super().__init__(module, number, layout.stages, device, group=group)
        self._computing = computing

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # Private, up to torch 2.14: messages that open NCCL's connections. Gloo's are open, and
        # torch 2.9 sends 8 bytes to a receiver of 4, which ends the process.
        return super()._get_init_p2p_neighbors_ops() if self.device.type == "cuda" else []

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._chunk("forward"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._chunk("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._chunk("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    @contextmanager
    def _chunk(self, phase: str) -> Iterator[None]:
        with self._computing(phase):
            try:
                yield
            except RuntimeError as error:  # torch's; the cause may be that a rank is lost
                raise error.__cause__ or error from None


class Schedules:
    """Run micro-batches through the stages of a pipeline; every rank makes the same calls.

    For each number and each shape of micro-batches, a schedule is created, and a trial pass
    determines the shapes of activations; the last few schedules are kept.

    Args:
        name: one of SCHEDULES. GPipe's order is used for a number of micro-batches that the
            schedule does not support: fewer than ranks with 1f1b; with several stages per rank, a
            number that cannot be divided into rounds of equal size.
        layout: stages and ranks.
        group: the ranks of the pipeline.
        parts: of each stage of this rank.
        device: of the activations.
        hooks: functions that the schedule calls.
    """

    def __init__(
        self, name: str, layout: Layout, group: ProcessGroup,
        parts: Mapping[int, Sequence[nn.Module | nn.Parameter]], device: torch.device, hooks: Hooks,
    ) -> None:  # fmt: skip
        self._name, self._layout, self._group = name, layout, group
        self._parts, self._device, self._hooks = parts, device, hooks
        self._made: dict[Hashable, Any] = {}

    def has(self, micro_batches: int, shapes: Hashable, train: bool) -> bool:
        """Whether the schedule exists, so that no trial pass is needed."""
        return (micro_batches, shapes, train) in self._made

    def run(self, micro_batches: int, shapes: Hashable, train: bool) -> None:
        """Run forward, and in training backward, for `micro_batches` (at least one).

        Args:
            shapes: of each micro-batch, all equal.

        Raises:
            RuntimeError: another rank is gone, or did not respond within the group's timeout.
        """
        key = (micro_batches, shapes, train)
        schedule = self._made.pop(key, None) or self._make(micro_batches, train)
        while len(self._made) >= _KEPT:
            del self._made[next(iter(self._made))]
        numbers = torch.arange(micro_batches)
        omitted = {} if _OLD else {"return_outputs": False}
        schedule.step(micro_batch=numbers, target=numbers, **omitted)
        self._made[key] = schedule

    def _make(self, micro_batches: int, train: bool) -> Any:
        stages = []
        for number, parts in self._parts.items():
            last = number == self._layout.stages - 1
            module = _Module(number, parts, last, self._hooks, self._device)
            stages.append(
                _Stage(
                    module, number, self._layout, self._device, self._group, self._hooks.computing
                )
            )
        loss = _loss if train else None
        kind = schedule_class(self._name, self._layout, micro_batches if train else 0)
        one_stage = kind in (ScheduleGPipe, Schedule1F1B)
        given = stages[0] if one_stage else stages
        schedule = kind(given, micro_batches, loss_fn=loss, scale_grads=False)
        if _OLD:
            schedule._merge_outputs = lambda outputs: None
        return schedule


def schedule_class(name: str, layout: Layout, micro_batches: int) -> Any:
    """Return torch's class; GPipe's order if the schedule does not support `micro_batches`."""
    if name in _SEVERAL_STAGES:
        rounds = max(1, micro_batches // layout.ranks)
        possible = micro_batches > 0 and micro_batches % rounds == 0
        return _SEVERAL_STAGES[name] if possible else ScheduleLoopedBFS
    if name == "1f1b" and micro_batches >= layout.ranks:
        return Schedule1F1B
    # With one stage per rank both have the same order of passes.
    return ScheduleLoopedBFS if _OLD and micro_batches < layout.ranks else ScheduleGPipe


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the output: the last stage returns the loss itself."""
    return output


@dataclass(frozen=True)
class Layout:
    """Stages and the ranks that hold them.

    Stage s is on rank s % ranks, so with several stages per rank the data passes around the ranks
    (Narayanan et al., arXiv:2104.04473, section 2.2).

    Args:
        ranks: of the pipeline.
        virtual: stages of each rank.
    """

    ranks: int
    virtual: int = 1

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return self.ranks * self.virtual

    def of_rank(self, rank: int) -> range:
        """The stages of a rank, ascending."""
        return range(rank, self.stages, self.ranks)

    def bubble(self, micro_batches: int) -> float:
        """Fraction of a step that a rank waits with GPipe and 1F1B if all stages are equally fast.

        Narayanan et al., arXiv:2104.04473, sections 2.1 and 2.2.
        """
        waits = self.ranks - 1
        return waits / (self.virtual * micro_batches + waits)


@dataclass(frozen=True)
class Costs:
    """Cost of each part of a model, in any unit.

    Args:
        first: modules before the blocks.
        blocks: each block.
        last: modules after the blocks.
    """

    first: float
    blocks: Sequence[float]
    last: float


def divide(costs: Costs, stages: int) -> list[range]:
    """The blocks of each stage: at least one, contiguous, minimizing the most expensive stage.

    Among such divisions, one with the least sum of squared costs, so that the other stages are
    balanced too.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    blocks = len(costs.blocks)
    if blocks < stages:
        raise UserError(
            f"a pipeline of {stages} stages needs as many blocks, and the model has {blocks}: "
            f"lower parallel.pipeline or the stages of a rank, or choose more blocks"
        )
    bound = _best(costs, stages, float("inf"), dearest=True)[0]
    ends = _best(costs, stages, bound, dearest=False)[1]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _best(costs: Costs, stages: int, bound: float, dearest: bool) -> tuple[float, tuple[int, ...]]:
    """(value, end of each stage) of the best division with no stage above `bound`.

    Args:
        dearest: minimize the cost of the most expensive stage; else the sum of squares.
    """
    sums = [0.0]
    for cost in costs.blocks:
        sums.append(sums[-1] + cost)
    blocks = len(costs.blocks)
    # Best division of the first `end` blocks into the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        ends = [blocks] if stage == stages - 1 else range(stage + 1, blocks - stages + stage + 2)
        found = {}
        for end in ends:
            options = []
            for begin, (so_far, places) in best.items():
                cost = sums[end] - sums[begin]
                cost += costs.first * (stage == 0) + costs.last * (stage == stages - 1)
                # Sums differ in their last bits from the sums that determined the bound.
                if begin < end and cost <= bound * (1 + 1e-9):
                    value = max(so_far, cost) if dearest else so_far + cost * cost
                    options.append((value, (*places, end)))
            if options:
                found[end] = min(options)
        best = found
    return best[blocks]


def generators(device: torch.device) -> Tensor:
    """Return the state of torch's generators, the CPU's and the device's: bytes, on the CPU."""
    state = torch.get_rng_state()
    if device.type != "cuda":
        return state
    return torch.cat((state, torch.cuda.get_rng_state(device)))


def set_generators(state: Tensor, device: torch.device) -> None:
    """Restore the state that `generators` returned: the same numbers are drawn again."""
    state = state.cpu()
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[size:], device)
