"""Optimizers of third parties, as their documentation uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.third_parties.part import DURATION, Part, optimizing, package, small_model


def named(module: str, name: str, /, **options: Any) -> Callable[[], Part]:
    """Return what builds a part with the optimizer `name` of a module."""
    return lambda: optimizing(lambda p: getattr(package(module), name)(p, **options))


def around(module: str, name: str, /, **options: Any) -> Callable[[], Part]:
    """Return what builds a part with an optimizer that wraps AdamW."""

    def wrapped(p: list[nn.Parameter]) -> Optimizer:
        inner = torch.optim.AdamW(p, lr=0.02)
        return getattr(package(module), name)(inner, **options)  # type: ignore[no-any-return]

    return lambda: optimizing(wrapped)


def of_matrices(optimizer: Callable[[list[Any]], Optimizer], **options: Any) -> Callable[[], Part]:
    """Return what builds a part whose optimizer treats matrices, as a group, differently."""

    def build(p: list[nn.Parameter]) -> Optimizer:
        matrices, vectors = [q for q in p if q.dim() == 2], [q for q in p if q.dim() != 2]
        return optimizer([{"params": vectors}, {"params": matrices, **options}])

    return lambda: optimizing(build)


def switched(build: Callable[[], Part]) -> Part:
    """A schedule-free optimizer: in train mode in the step, in eval mode after it."""
    part = build()
    optimizer: Any = part.optimizer
    x = torch.linspace(-1, 1, 64).reshape(16, 4)
    losses: list[float] = []
    part.state["losses"] = losses

    def after(step: int) -> None:
        optimizer.eval()
        with torch.no_grad():
            losses.append(float(part.loss(x, x.sum(1, keepdim=True))))

    part.before, part.after = optimizer.train, after
    part.results = lambda: [torch.tensor(part.state["losses"])]
    return part


def _muon_of_matrices() -> Part:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 1, bias=False))
    return Part(model, torch.optim.Muon(model.parameters(), lr=0.02))


def _muon_with_adam(p: list[nn.Parameter]) -> Optimizer:
    groups = [
        {"params": [q for q in p if q.dim() == 2], "use_muon": True, "lr": 0.02},
        {"params": [q for q in p if q.dim() != 2], "use_muon": False, "lr": 0.01},
    ]
    return package("muon").SingleDeviceMuonWithAuxAdam(groups)  # type: ignore[no-any-return]


def _of_heavyball(name: str) -> Part:
    utils = package("heavyball.utils")
    utils.compile_mode = utils.compile_mode_recommended_to_none = None  # it takes minutes
    return optimizing(lambda p: getattr(package("heavyball"), name)(p, lr=0.02))


def _adam_mini() -> Part:
    model = small_model()
    return Part(
        model,
        package("adam_mini").Adam_mini(model.named_parameters(), lr=0.02, dim=8, verbose=False),
    )


def _adafactor_of_transformers() -> Part:
    optimization = package("transformers.optimization")
    part = optimizing(lambda p: optimization.Adafactor(p, warmup_init=True))
    schedule = optimization.AdafactorSchedule(part.optimizer)
    part.after = lambda step: schedule.step()
    part.state["schedule"] = schedule
    return part


_OTHER = "pytorch_optimizer"
_PROJECTED = {"rank": 2, "update_proj_gap": 4, "scale": 1.0, "proj_type": "std"}
_PROJECTED_AT_RANDOM = {**_PROJECTED, "proj": "random", "scale_type": "channel"}

# Row -> (distribution, what builds the part).
OPTIMIZERS: dict[str, tuple[str, Callable[[], Part]]] = {
    **{
        name: ("torch", named("torch.optim", name))
        for name in ("Adafactor", "ASGD", "NAdam", "RAdam", "Rprop")
    },
    "Muon": ("torch", _muon_of_matrices),
    "Lookahead(AdamW)": (_OTHER, around(_OTHER, "Lookahead", k=3, pullback_momentum="pullback")),
    "ScheduleFreeWrapper(AdamW)": (_OTHER, lambda: switched(around(_OTHER, "ScheduleFreeWrapper"))),
    "TRAC(AdamW)": (_OTHER, around(_OTHER, "TRAC")),
    "SOAP": (_OTHER, named(_OTHER, "SOAP", lr=0.02, precondition_frequency=3)),
    "AdaFactor": (_OTHER, named(_OTHER, "AdaFactor", lr=0.02)),
    "Ranger21": (_OTHER, named(_OTHER, "Ranger21", num_iterations=DURATION, lr=0.02)),
    "StableSPAM": (_OTHER, named(_OTHER, "StableSPAM", lr=0.02, t_max=DURATION, update_proj_gap=9)),
    "SPAM": (_OTHER, named(_OTHER, "SPAM", lr=0.02, density=0.5, update_proj_gap=5)),
    "ScalableShampoo": (
        _OTHER,
        named(
            *(_OTHER, "ScalableShampoo"),
            **{"lr": 0.02, "start_preconditioning_step": 4, "preconditioning_compute_steps": 3},
        ),
    ),
    "Shampoo": (_OTHER, named(_OTHER, "Shampoo", lr=0.02, preconditioning_compute_steps=3)),
    "AdaMuon": (_OTHER, lambda: _of_muon("AdaMuon")),
    "Kron (PSGD)": (_OTHER, named(_OTHER, "Kron", lr=0.01)),
    "Mars": (_OTHER, named(_OTHER, "MARS", lr=0.02)),
    "AdEMAMix": (_OTHER, named(_OTHER, "AdEMAMix", lr=0.02)),
    "GrokFastAdamW": (_OTHER, named(_OTHER, "GrokFastAdamW", lr=0.02)),
    "AggMo": (_OTHER, named(_OTHER, "AggMo", lr=0.02)),
    "A2Grad": (_OTHER, named(_OTHER, "A2Grad")),
    "AdamWScheduleFree": (
        "schedulefree",
        lambda: switched(named("schedulefree", "AdamWScheduleFree", lr=0.02, warmup_steps=9)),
    ),
    "SGDScheduleFree": (
        "schedulefree",
        lambda: switched(named("schedulefree", "SGDScheduleFree", lr=0.1)),
    ),
    "Prodigy": ("prodigyopt", named("prodigyopt", "Prodigy", d0=1e-2)),
    "ProdigyPlusScheduleFree": (
        "prodigy-plus-schedule-free",
        lambda: switched(named("prodigyplus", "ProdigyPlusScheduleFree", d0=1e-2)),
    ),
    "CAME": ("came-pytorch", named("came_pytorch", "CAME", lr=0.02)),
    "DAdaptAdam": ("dadaptation", named("dadaptation", "DAdaptAdam", d0=1e-2)),
    "DAdaptLion": ("dadaptation", named("dadaptation", "DAdaptLion", d0=1e-2)),
    "AdamW": ("bitsandbytes", named("bitsandbytes.optim", "AdamW", lr=0.02)),
    "AdamW8bit": ("bitsandbytes", named("bitsandbytes.optim", "AdamW8bit", min_8bit_size=16)),
    "Lion8bit": ("bitsandbytes", named("bitsandbytes.optim", "Lion8bit", min_8bit_size=16)),
    "SOAP, heavyball": ("heavyball", lambda: _of_heavyball("SOAP")),
    "Muon, heavyball": ("heavyball", lambda: _of_heavyball("Muon")),
    "PSGDKron": ("heavyball", lambda: _of_heavyball("PSGDKron")),
    "Lion": ("lion-pytorch", named("lion_pytorch", "Lion", lr=0.01)),
    "AdaBelief": (
        "adabelief-pytorch",
        named("adabelief_pytorch", "AdaBelief", lr=0.02, print_change_log=False),
    ),
    "Yogi": ("torch-optimizer", named("torch_optimizer", "Yogi", lr=0.02)),
    "Shampoo, torch_optimizer": (
        "torch-optimizer",
        named("torch_optimizer", "Shampoo", lr=0.05, update_freq=3),
    ),
    "Lookahead(AdamW), timm": ("timm", around("timm.optim", "Lookahead", k=3)),
    "MADGRAD": ("timm", named("timm.optim", "MADGRAD", lr=0.02)),
    "Adan": ("timm", named("timm.optim", "Adan", lr=0.02)),
    "GaLoreAdamW": (
        "galore-torch",
        of_matrices(lambda groups: package("galore_torch").GaLoreAdamW(groups), **_PROJECTED),
    ),
    "APOLLOAdamW": (
        "apollo-torch",
        of_matrices(
            lambda groups: package("apollo_torch").APOLLOAdamW(groups, lr=0.02),
            **_PROJECTED_AT_RANDOM,
        ),
    ),
    "MuonWithAuxAdam": ("muon-optimizer", lambda: optimizing(_muon_with_adam)),
    "Adam_mini": ("adam-mini", _adam_mini),
    "Adafactor, AdafactorSchedule": ("transformers", _adafactor_of_transformers),
}


def _of_muon(name: str) -> Part:
    def build(p: list[nn.Parameter]) -> Optimizer:
        groups = [
            {"params": [q for q in p if q.dim() == 2], "use_muon": True},
            {"params": [q for q in p if q.dim() != 2], "use_muon": False},
        ]
        return getattr(package(_OTHER), name)(groups)  # type: ignore[no-any-return]

    return optimizing(build)
