"""torch's pipeline schedules, one for each number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
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

from hvdtrain.parallel.draws import generators, set_generators
from hvdtrain.parallel.stages import Layout

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "zero-bubble")
_SEVERAL_STAGES = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
_KEPT = 8  # schedules; each has a buffer for every activation that it receives


def virtual_stages(schedule: str) -> int:
    """Stages of a rank, of a schedule's name."""
    return 2 if schedule in _SEVERAL_STAGES else 1


@dataclass(frozen=True)
class Pass:
    """Of one micro-batch through one stage.

    Args:
        stage: its number.
        micro_batch: its number among those of the schedule.
        x: what the stage before gave; None: this is the first.
        draws: the state of torch's generators where the stage before left the model; None: it is as
            `Hooks.draws` has it.
        trial: torch asks for the shape of what comes out; it counts for nothing.
    """

    stage: int
    micro_batch: int
    x: Tensor | None
    draws: Tensor | None
    trial: bool


@dataclass(frozen=True)
class Hooks:
    """What a schedule calls on this rank.

    Args:
        compute: a pass to what the next stage gets; of the last stage to the loss, which is
            differentiated.
        draws: of each micro-batch, the state of torch's generators before the task's loss().
        computing: around each forward ("forward") and backward ("backward").
    """

    compute: Callable[[Pass], Tensor]
    draws: Callable[[int], Tensor]
    computing: Callable[[str], AbstractContextManager[None]]


class _Module(nn.Module):
    """What torch calls a stage's module.

    Random numbers: the state of the generators goes from stage to stage with the activations if a
    stage has drawn, so each draws what it would if one rank had them all.
    """

    def __init__(
        self, number: int, parts: Sequence[nn.Module | nn.Parameter], last: bool, hooks: Hooks,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        # The parameters whose gradients torch computes apart, with zero bubble.
        self.parts = nn.ModuleList(part for part in parts if isinstance(part, nn.Module))
        self.rest = nn.ParameterList(part for part in parts if not isinstance(part, nn.Module))
        self._number, self._last, self._hooks, self._device = number, last, hooks, device
        self._trial, self._draws = True, False

    def forward(self, *received: Tensor, micro_batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Args: received: what the stage before returned, nothing of the first."""
        index, trial = int(micro_batch), self._trial
        x, *state = received or (None,)
        if trial and x is not None:
            with torch.no_grad():
                x.zero_()  # torch gives memory that nobody has written
        if x is not None and x.requires_grad:
            x = x.view_as(x)  # the buffer itself is used again, and would keep the hook
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
    """torch's stage, which says when it computes, and raises what the task has raised."""

    def __init__(
        self, module: nn.Module, number: int, layout: Layout, device: torch.device,
        group: ProcessGroup, computing: Callable[[str], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        super().__init__(module, number, layout.stages, device, group=group)
        self._computing = computing

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing("forward"):
            try:
                return super().forward_one_chunk(*args, **kwargs)
            except RuntimeError as error:
                raise error.__cause__ or error from None

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing("backward"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._computing("backward"):
            return super().backward_weight_one_chunk(*args, **kwargs)


class Schedules:
    """Runs micro-batches through the stages of a pipeline; every rank calls the same.

    A schedule is made, and the shapes of activations are found by a trial pass, for each number of
    micro-batches and each shape of them; the last few are kept.

    Args:
        name: one of SCHEDULES. A number of micro-batches that it cannot do goes as in GPipe:
            fewer than ranks with 1f1b; with several stages a rank, a number that makes no rounds
            of equal size.
        layout: stages and ranks.
        group: the ranks of the pipeline.
        parts: of each stage of this rank.
        device: of the activations.
        hooks: what it calls.
    """

    def __init__(
        self, name: str, layout: Layout, group: ProcessGroup,
        parts: Mapping[int, Sequence[nn.Module | nn.Parameter]], device: torch.device, hooks: Hooks,
    ) -> None:  # fmt: skip
        self._name, self._layout, self._group = name, layout, group
        self._parts, self._device, self._hooks = parts, device, hooks
        self._made: dict[Hashable, Any] = {}

    def has(self, micro_batches: int, shapes: Hashable, train: bool) -> bool:
        """No trial pass is needed."""
        return (micro_batches, shapes, train) in self._made

    def run(self, micro_batches: int, shapes: Hashable, train: bool) -> None:
        """Forward, and in training backward, of so many micro-batches, at least one.

        Args:
            shapes: of each of them, the same.

        Raises:
            RuntimeError: another rank is gone, or did not answer within the group's timeout.
        """
        key = (micro_batches, shapes, train)
        schedule = self._made.pop(key, None) or self._make(micro_batches, train)
        while len(self._made) >= _KEPT:
            del self._made[next(iter(self._made))]
        numbers = torch.arange(micro_batches)
        schedule.step(micro_batch=numbers, target=numbers, return_outputs=False)
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
        return kind(given, micro_batches, loss_fn=loss, scale_grads=False)


def schedule_class(name: str, layout: Layout, micro_batches: int) -> Any:
    """torch's class; GPipe's order where the schedule cannot do such a number of micro-batches."""
    if name in _SEVERAL_STAGES:
        rounds = max(1, micro_batches // layout.ranks)
        possible = micro_batches > 0 and micro_batches % rounds == 0
        return _SEVERAL_STAGES[name] if possible else ScheduleLoopedBFS
    return Schedule1F1B if name == "1f1b" and micro_batches >= layout.ranks else ScheduleGPipe


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage gives the loss itself."""
    return output
