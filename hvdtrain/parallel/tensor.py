"""Tensor parallelism: ranks split the matrices of a model between them, with torch's DTensor.

The split is Megatron's (Shoeybi et al., arXiv:1909.08053), with its sequence-parallel norms
(Korthikanti et al., arXiv:2205.05198). A model specifies how it is split: its method
`tensor_plan()` returns patterns of module names and the name of a style for each:

| style | module | its input | its output |
| --- | --- | --- | --- |
| `column` | nn.Linear | whole | this rank's shard of the features |
| `row` | nn.Linear | this rank's shard of the features | whole |
| `row_to_sequence` | nn.Linear | this rank's shard of the features | split by sequence |
| `vocabulary` | nn.Embedding or nn.Linear (a head) | whole | whole |
| `vocabulary_to_sequence` | nn.Embedding | whole | split by sequence |
| `replicated` | computed identically on all ranks, such as a norm | whole | whole |
| `into_sequence` | any, such as a block | the first one is whole, is split by sequence | as is |
| `sequence` | nn.LayerNorm, nn.RMSNorm, nn.Dropout | split by sequence | whole |

"Whole" is a plain tensor, bitwise identical on every rank, "this rank's shard" a plain tensor whose
last dimension is smaller, "split by sequence" a DTensor with Shard(1), of (batch, time, ...). The
outputs of `replicated` and `sequence` are DTensors with Replicate, so that the gradients of all
modules that use such an output are summed in one exchange. A module that matches no pattern stays a
plain module, computed identically by all ranks. A module that divides features into heads infers
the number of heads from its input.

A module with a method `set_tensor_part(rank, size)` receives this rank's number among `size`
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from hvdtrain import comm
from hvdtrain.errors import UserError


class _IntoSequence(ParallelStyle):
    """Split the first argument of a module's forward by sequence, unless it already is."""

    # Private, but torch's way to write a style. If it is renamed, torch raises NotImplementedError;
    # tests/single/test_torch_private.py detects it.
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = inputs
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
            return first.redistribute(placements=[Shard(1)]), *others

        module.register_forward_pre_hook(split)
        return module


def _whole_as_dtensor(now: Replicate | Shard) -> ParallelStyle:
    return PrepareModuleOutput(
        output_layouts=now, desired_output_layouts=Replicate(), use_local_output=False
    )


def _vocabulary(module: nn.Module) -> ParallelStyle:
    if isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    return ColwiseParallel(output_layouts=Replicate())


# torch's styles for a module, applied in this order.
STYLES: dict[str, Callable[[nn.Module], Sequence[ParallelStyle]]] = {
    "column": lambda _: [ColwiseParallel()],
    "row": lambda _: [RowwiseParallel()],
    "row_to_sequence": lambda _: [RowwiseParallel(output_layouts=Shard(1), use_local_output=False)],
    "vocabulary": lambda module: [_vocabulary(module)],
    "vocabulary_to_sequence": lambda _: [
        RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False)
    ],
    "replicated": lambda _: [_whole_as_dtensor(Replicate())],
    "into_sequence": lambda _: [_IntoSequence()],
    "sequence": lambda _: [SequenceParallel(), _whole_as_dtensor(Shard(1))],
}
# Styles that split a matrix, and the modules that have one.
SPLIT_MATRICES: dict[str, tuple[type[nn.Module], ...]] = {
    "column": (nn.Linear,),
    "row": (nn.Linear,),
    "row_to_sequence": (nn.Linear,),
    "vocabulary": (nn.Linear, nn.Embedding),
    "vocabulary_to_sequence": (nn.Embedding,),
}


def apply_tensor(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Split `model` in place over the ranks of `mesh`.

    Nothing is exchanged: each rank keeps its shards of the model, which must be whole and bitwise
    identical on all ranks. After backward, the gradient of a split parameter is a DTensor with the
    parameter's placements; the gradient of a plain parameter is a plain tensor, identical on all
    ranks. The gradient of a parameter that all ranks hold completely, such as a norm's, may be a
    partial sum on each rank (SpanningExchange sums it). Parameters that are not trained must
    already be frozen.

    Args:
        mesh: of one dimension.
        plan: pattern of module names (`*` matches any part of a name) -> style. A module is split
            by the first pattern that it matches. Names are as in `named_modules`.

    Raises:
        UserError: the plan has an unknown style, matches no module, or requires what a module does
            not support.
    """
    tied = _names_by_parameter(model)
    for name, style in _matched(model, plan):
        _apply(model.get_submodule(name), name, style, mesh)
    _tie(model, tied)
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.requires_grad:
            parameter.register_hook(_split_as(parameter))
    if mesh.device_type == "cpu":
        _time_waits()
    for module in model.modules():
        tell = getattr(module, "set_tensor_part", None)
        if tell is not None:
            tell(mesh.get_local_rank(), mesh.size())


def _matched(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name of a module, style) of all modules that are split."""
    names = [name for name, _ in model.named_modules() if name]
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UserError(
                f"tensor_plan: {pattern!r} has style {style!r}; styles are: {', '.join(STYLES)}"
            )
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            raise UserError(f"tensor_plan: the model has no module called {pattern!r}")
        for name in found:
            styles.setdefault(name, style)
    return list(styles.items())


def _apply(module: nn.Module, name: str, style: str, mesh: DeviceMesh) -> None:
    if style in SPLIT_MATRICES:
        matrices = SPLIT_MATRICES[style]
        if not isinstance(module, matrices):
            kinds = " or ".join(f"nn.{kind.__name__}" for kind in matrices)
            raise UserError(
                f"tensor_plan: {name!r} is a {type(module).__name__}, but {style!r} splits {kinds}"
            )
        _check_even(module, name, style, mesh.size())
    trained = {key: p.requires_grad for key, p in module.named_parameters()}
    for torch_style in STYLES[style](module):
        parallelize_module(module, mesh, torch_style, src_data_rank=None)
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(trained[key])


def _check_even(module: nn.Module, name: str, style: str, ranks: int) -> None:
    """Check that shards that a model sees as plain tensors are of one size."""
    if style.startswith("vocabulary"):
        return
    assert isinstance(module, nn.Linear)
    size = module.out_features if style == "column" else module.in_features
    if size % ranks:
        raise UserError(
            f"tensor_plan: {name!r} has {size} features to split, which {ranks} ranks do not "
            "divide; choose another parallel.tensor"
        )


def _names_by_parameter(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _tie(model: nn.Module, tied: list[list[str]]) -> None:
    """Tie parameters that were tied before each module was split."""
    for first, *others in tied:
        parameter = model.get_parameter(first)
        for name in others:
            if _placements(model.get_parameter(name)) != _placements(parameter):
                raise UserError(
                    f"tensor_plan: {first!r} and {name!r} are one parameter, but are split in "
                    "different ways"
                )
            path, _, key = name.rpartition(".")
            model.get_submodule(path).register_parameter(key, parameter)


def _placements(parameter: Tensor) -> object:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _split_as(parameter: DTensor) -> Callable[[Tensor], Tensor]:
    """Return a hook that converts a gradient to the placements of its parameter.

    A gradient may have other placements, or be a partial sum. A partial sum of a parameter that is
    replicated is left unchanged: accumulating it is cheap, and a message for each pass and each
    norm of a model is not.
    """
    placements = parameter.placements
    spread = (Partial(),), (Replicate(),)

    def split(gradient: Tensor) -> Tensor:
        assert isinstance(gradient, DTensor)
        if gradient.placements == placements or (gradient.placements, placements) == spread:
            return gradient
        return gradient.redistribute(placements=placements)

    return split


class _TimedWait:
    """Time inside counts as waiting along `tensor`."""

    def __init__(self, wait: Callable[[Tensor], Tensor]) -> None:
        self._wait = wait

    def __call__(self, tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._wait(tensor)
        with comm.COLLECTIVES.waiting("tensor"):
            return self._wait(tensor)


def _time_waits() -> None:
    """Time the waits of DTensor's collectives, permanently.

    torch has no hook, but one function that all waits use. A GPU waits asynchronously, and so does
    compiled code: nothing is measured there. The function is private: if DTensor waits with another
    one, waits along `tensor` count as computation, and tests/single/test_torch_private_ranks.py
    fails.
    """
    if not isinstance(functional.wait_tensor, _TimedWait):
        functional.wait_tensor = _TimedWait(functional.wait_tensor)
