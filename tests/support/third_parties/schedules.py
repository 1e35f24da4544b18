"""Schedules and averages of weights of third parties, which a script registers as its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from tests.support.third_parties.part import DURATION, Part, package, small_model


def scheduled(
    build: Callable[[Optimizer], Any], step: Callable[[Any, int], object] | None = None
) -> Part:
    """The part is a schedule.

    Args:
        build: makes it for an optimizer.
        step: the step of the schedule, called with it and the number of steps so far.
    """
    model = small_model()
    optimizer = AdamW(model.parameters(), lr=0.02)
    schedule = build(optimizer)
    call = step or (lambda schedule, steps: schedule.step())
    return Part(
        *(model, optimizer, {"schedule": schedule}), after=lambda index: call(schedule, index + 1)
    )


def averaged(
    build: Callable[[Any], Any],
    update: Callable[[Any, Any], object],
    weights: Callable[[Any], Any],
) -> Part:
    """The part is an average of weights.

    Args:
        build: makes it for a model.
        update: called after each step with it and the model.
        weights: its tensors.
    """
    model = small_model()
    average = build(model)
    part = Part(model, SGD(model.parameters(), lr=0.05, momentum=0.9), {"average": average})
    part.after = lambda step: update(average, model)
    part.results = lambda: [*weights(average)]
    return part


def _on_plateau() -> Part:
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    timm = package("timm.scheduler")

    def build(optimizer: Optimizer) -> Any:
        return timm.PlateauLRScheduler(optimizer, decay_rate=0.5, patience_t=1, mode="min")

    part = scheduled(build)

    def after(step: int) -> None:
        with torch.no_grad():
            part.state["schedule"].step(step, float(part.loss(x, x.sum(1, keepdim=True))))

    part.after = after
    return part


def _swa() -> Part:
    part = averaged(
        lambda model: torch.optim.swa_utils.AveragedModel(model, use_buffers=True),
        lambda average, model: average.update_parameters(model),
        lambda average: average.parameters(),
    )
    schedule = torch.optim.swa_utils.SWALR(part.optimizer, swa_lr=0.01, anneal_epochs=8)
    part.state["schedule"], update = schedule, part.after
    part.after = lambda step: (update(step), schedule.step())
    return part


def _warmup() -> Part:
    part = scheduled(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DURATION)
    )
    part.state["warmup"] = warmup = package("pytorch_warmup").LinearWarmup(part.optimizer, 9)

    def after(step: int) -> None:
        with warmup.dampening():
            part.state["schedule"].step()

    part.after = after
    return part


def _of_timm(name: str, **options: Any) -> Part:
    return scheduled(
        lambda optimizer: getattr(package("timm.scheduler"), name)(optimizer, **options),
        lambda schedule, steps: schedule.step_update(steps),
    )


def _sequence(optimizer: Optimizer) -> Any:
    kinds = torch.optim.lr_scheduler
    parts = [
        kinds.LinearLR(optimizer, 0.1, total_iters=6),
        kinds.CosineAnnealingWarmRestarts(optimizer, 5),
    ]
    return kinds.SequentialLR(optimizer, parts, milestones=[6])


def _of_transformers(name: str, *numbers: int) -> Part:
    return scheduled(lambda optimizer: getattr(package("transformers"), name)(optimizer, *numbers))


_BY_UPDATE = {"t_in_epochs": False, "warmup_t": 5, "noise_range_t": (8, 20)}
# Row -> (distribution, what builds the part).
SCHEDULES: dict[str, tuple[str, Callable[[], Part]]] = {
    "SequentialLR": ("torch", lambda: scheduled(_sequence)),
    "AveragedModel, SWALR": ("torch", _swa),
    "CosineLRScheduler with noise": (
        "timm",
        lambda: _of_timm("CosineLRScheduler", t_initial=DURATION, **_BY_UPDATE),
    ),
    "PlateauLRScheduler": ("timm", _on_plateau),
    "ModelEmaV3": (
        "timm",
        lambda: averaged(
            lambda model: package("timm.utils").ModelEmaV3(model, decay=0.9, use_warmup=True),
            lambda average, model: average.update(model),
            lambda average: average.module.parameters(),
        ),
    ),
    "get_cosine_schedule_with_warmup": (
        "transformers",
        lambda: _of_transformers("get_cosine_schedule_with_warmup", 6, DURATION),
    ),
    "get_wsd_schedule": (
        "pytorch_optimizer",
        lambda: scheduled(
            lambda optimizer: package("pytorch_optimizer").get_wsd_schedule(optimizer, 6, 6, 12)
        ),
    ),
    "REXScheduler": (
        "pytorch_optimizer",
        lambda: scheduled(
            lambda optimizer: package("pytorch_optimizer").REXScheduler(optimizer, DURATION, 0.02)
        ),
    ),
    "LinearWarmup with CosineAnnealingLR": ("pytorch-warmup", _warmup),
    "ExponentialMovingAverage": (
        "torch-ema",
        lambda: averaged(
            lambda model: package("torch_ema").ExponentialMovingAverage(model.parameters(), 0.9),
            lambda average, model: average.update(),
            lambda average: average.shadow_params,
        ),
    ),
    "EMA": (
        "ema-pytorch",
        lambda: averaged(
            lambda model: package("ema_pytorch").EMA(
                model, beta=0.9, update_every=2, update_after_step=4
            ),
            lambda average, model: average.update(),
            lambda average: average.ema_model.parameters(),
        ),
    ),
}
