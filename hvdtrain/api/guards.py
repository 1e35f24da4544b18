"""Calls of a script that would be wrong or have no effect: refused during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from hvdtrain.engine.loop import Step
from hvdtrain.errors import UserError


class BackwardGuard:
    """Refuses a script's own backward passes to a model's parameters, and new optimizers of them.

    While it is installed it replaces three functions of torch, which other models and losses may
    use as ever: `torch.autograd.backward`, which `Tensor.backward` calls, `GradScaler.scale`, and
    `Optimizer.add_param_group`, which each new optimizer calls. Hooks of the parameters would
    notice a wrong pass too late, and cost time in each right one.

    Args:
        current: returns the step in progress, from its block to the end of the code after it.
    """

    def __init__(self, model: nn.Module, current: Callable[[], Step | None]) -> None:
        self._model, self._current = model, current
        self._backward, self._scale = torch.autograd.backward, torch.amp.GradScaler.scale
        self._add_group = Optimizer.add_param_group

    def install(self) -> None:
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            step = self._current()
            if step is not None and not step.passing:
                tensors, inputs = _again(tensors), _again(inputs)
                self._check(_several(tensors), inputs)
            options = grad_tensors, retain_graph, create_graph, grad_variables
            self._backward(tensors, *options, inputs=inputs)

        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            step = self._current()
            outputs = _again(outputs)
            if step is not None and step.open and scaler.is_enabled() and self._trains(outputs):
                raise UserError(
                    "GradScaler.scale was called inside a step's block: gradients would be too "
                    "large by the scale; remove the GradScaler, and for a loss scale set "
                    "precision.name fp16"
                )
            return self._scale(scaler, outputs)

        def add_param_group(optimizer: Optimizer, group: dict[str, Any]) -> None:
            self._add_group(optimizer, group)
            if self._current() is not None and {*self._model.parameters()} & {*group["params"]}:
                raise UserError(
                    f"the loop created {type(optimizer).__name__}, an optimizer of the model's "
                    "parameters, which would have no effect: the step's block ends with those that "
                    "hvdtrain.training was given. To begin again with one of them, clear its "
                    "state (optimizer.state.clear()) and set the options of its groups"
                )

        torch.autograd.backward = backward
        Optimizer.add_param_group = add_param_group  # type: ignore[method-assign, assignment]
        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        Optimizer.add_param_group = self._add_group  # type: ignore[method-assign]
        torch.autograd.backward = self._backward
        torch.amp.GradScaler.scale = self._scale  # type: ignore[method-assign]

    def _trains(self, outputs: Any) -> bool:
        losses = [loss for loss in _several(outputs) if isinstance(loss, Tensor)]
        return bool(_leaves(losses) & {*self._model.parameters()})

    def _check(self, losses: Iterable[Tensor], inputs: Any) -> None:
        trained = {p for p in self._model.parameters() if p.requires_grad}
        reached = trained & {*_several(inputs)} if inputs is not None else _leaves(losses) & trained
        if reached:
            raise UserError(
                "loss.backward() was called by the script, for parameters of the model: the "
                "gradient of the global batch is that of step.backward(loss), once for each "
                "micro-batch of `for batch in step`. Add an auxiliary loss to that loss; for the "
                "gradient of an input use torch.autograd.grad"
            )


class DatasetGuard:
    """Refuses changes of a dataset in the loop that the run would not see.

    Args:
        workers: processes that load ahead, each with a copy of the dataset from its start.
    """

    def __init__(self, dataset: Any, workers: int) -> None:
        self._dataset, self._workers = dataset, workers
        self._length = self._length_now()
        self._values = self._values_now()

    def check(self) -> None:
        """Compare the dataset with its state before the loop.

        Raises:
            UserError: its length has changed, or, with workers, a plain value among its attributes.
        """
        length = self._length_now()
        if length != self._length:
            raise UserError(
                f"the dataset had {self._length} samples when the loop began and has {length} now: "
                "a run visits those from its beginning. Give the dataset its final length before "
                "the loop, or begin another run"
            )
        now = self._values_now()
        if now != self._values:
            name = next(n for n in self._values | now if self._values.get(n) != now.get(n))
            raise UserError(
                f"the dataset's attribute {name} was changed in the loop, but the data workers "
                f"(loader.workers {self._workers}) have copies of the dataset from their start: "
                "set loader.workers 0"
            )

    def _length_now(self) -> int | None:
        try:
            return len(self._dataset)
        except (TypeError, NotImplementedError):  # iterable
            return None

    def _values_now(self) -> dict[str, Any]:
        if not self._workers:
            return {}
        own = getattr(self._dataset, "__dict__", {})
        return {n: v for n, v in own.items() if isinstance(v, int | float | str | None)}


def refuse_accumulation_hooks(model: nn.Module) -> None:
    """Raise UserError if a parameter has a hook that gets its accumulated gradient."""
    for name, parameter in model.named_parameters():
        # Private, without a public equivalent: a test of the message notices if it is renamed.
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UserError(
                f"the parameter {name} has a hook of register_post_accumulate_grad_hook, which "
                "would get the gradient of one rank: change or read gradients in the step's block "
                "after `for batch in step`, when they are those of the global batch"
            )


def _again(tensors: Any) -> Any:
    """Return tensors that can be read more than once."""
    return tuple(tensors) if isinstance(tensors, Iterator) else tensors


def _several(tensors: Any) -> Sequence[Any]:
    if isinstance(tensors, Mapping):
        return tuple(tensors.values())
    one = isinstance(tensors, Tensor | GradientEdge) or not isinstance(tensors, Iterable)
    return (tensors,) if one else tuple(tensors)


def _leaves(losses: Iterable[Tensor]) -> set[Tensor]:
    """Return the tensors to which a backward pass from `losses` adds gradients."""
    found: set[Tensor] = set()
    found_nodes = [x.node if isinstance(x, GradientEdge) else x.grad_fn for x in losses]
    nodes = [node for node in found_nodes if node is not None]
    seen: set[Any] = {*nodes}  # keeps the nodes' Python objects, and so their identity
    while nodes:
        node = nodes.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        further = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= further
        nodes += further
    return found
