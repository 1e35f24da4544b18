"""Tensor parallelism: ranks split the matrices of a model between them, by torch's DTensor.

The split is Megatron's (Shoeybi et al., arXiv:1909.08053), with its sequence-parallel norms
(Korthikanti et al., arXiv:2205.05198). A model says itself how it is split: its method
`tensor_plan()` gives patterns of module names and for each the name of a style:

| style | module | its input | its output |
| --- | --- | --- | --- |
| `column` | nn.Linear | whole | this rank's part of the features |
| `row` | nn.Linear | this rank's part of the features | whole |
| `row_to_sequence` | nn.Linear | this rank's part of the features | split by sequence |
| `vocabulary` | nn.Embedding or nn.Linear (a head) | whole | whole |
| `vocabulary_to_sequence` | nn.Embedding | whole | split by sequence |
| `replicated` | computed alike on all ranks, such as a norm | whole | whole |
| `into_sequence` | any, such as a block | the first one is whole, is split by sequence | as is |
| `sequence` | nn.LayerNorm, nn.RMSNorm, nn.Dropout | split by sequence | whole |

"Whole" is a plain tensor of the same bits on every rank, "this rank's part" a plain tensor whose
last dimension is smaller, "split by sequence" a DTensor with Shard(1), of (batch, time, ...). What
`replicated` and `sequence` return is a DTensor with Replicate, so that the gradients of all modules
that it feeds are summed in one exchange. A module that no pattern names stays a plain one: it is
computed alike by all ranks. A module that divides features into heads takes their number from what
it is given.

A module with a method `set_tensor_part(rank, size)` is told which of `size` parts this rank has.
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
    """The first argument of a module's forward is split by sequence, unless it is already."""

    # Private, but torch's way to write a style. If it is renamed, torch raises NotImplementedError;
    # tests/single/test_torch_private.py notices.
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


# Torch's styles for a module, applied in this order.
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
    """Splits `model` in place over the ranks of `mesh`.

    Nothing is exchanged: each rank takes its parts of the model that stands whole, with the same
    bits, on all of them. The gradient of a parameter, once backward is through, is a DTensor with
    the parameter's placements, or for a plain parameter a plain tensor that is the same on all
    ranks; but of a parameter that all ranks have whole, such as a norm's, it may be a sum that is
    spread over them (PartsExchange adds it up). Parameters that are not to be trained must be
    frozen before.

    Args:
        mesh: of one dimension.
        plan: pattern of module names (`*` stands for any part of a name) -> style. A module is
            split by the first pattern that it matches. Names are those of `named_modules`.

    Raises:
        UserError: the plan has a style that there is not, names no module, or asks for what a
            module cannot do.
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
    """Parts that a model sees as plain tensors have to be of one size."""
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
    """Makes one parameter of those that were one before each module was split."""
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
    """A gradient may arrive split otherwise, or as a sum that is spread over ranks.

    Such a sum over the whole of a parameter is left as it is: adding up is cheap, and a message for
    each pass and each norm of a model is not.
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
    """Time inside counts as waited along `tensor`."""

    def __init__(self, wait: Callable[[Tensor], Tensor]) -> None:
        self._wait = wait

    def __call__(self, tensor: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._wait(tensor)
        with comm.OWN.waiting("tensor"):
            return self._wait(tensor)


def _time_waits() -> None:
    """Of DTensor's collectives, for good: torch has no hook, but one function that all go through.

    A GPU waits by itself, and so does compiled code: nothing is measured there. The function is
    private: if DTensor waits by another one, waits along `tensor` count as computing, and
    tests/single/test_torch_private_ranks.py fails.
    """
    if not isinstance(functional.wait_tensor, _TimedWait):
        functional.wait_tensor = _TimedWait(functional.wait_tensor)
