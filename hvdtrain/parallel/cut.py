"""Splitting a model into the stages of a pipeline; a rank keeps its own stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor, nn

from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.models.vocabulary import whole
from hvdtrain.parallel.schedules import Costs, Layout, divide, set_generators
from hvdtrain.tasks import blocks_of

T = TypeVar("T")


class Cuttable(Protocol):
    """Interface that a model needs to be split into pipeline stages.

    It is called as usual, `model(*inputs)`, which must equal `embed(*inputs)`, `apply_block` for
    each of its blocks (see Task.blocks), and `output`. One tensor is passed from each to the next;
    its shape follows from the shapes of the inputs. Each parameter belongs to a block, to
    `first_stage` or to `last_stage`; a parameter that belongs to both stages is tied.

    Attributes:
        first_stage, last_stage: names of the modules and parameters, direct children of the model,
            that `embed` and `output` use; names that do not exist or are None are allowed.
    """

    first_stage: Sequence[str]
    last_stage: Sequence[str]

    def embed(self, *inputs: Any) -> Tensor:
        """Return the input of the first block."""
        ...

    def apply_block(self, block: nn.Module, x: Tensor, *inputs: Any) -> Tensor:
        """Return the output of a block for `x`."""
        ...

    def output(self, x: Tensor, *inputs: Any) -> Any:
        """Return the result of a call of the model from the output `x` of the last block."""
        ...


class _Left(BaseException):
    """Exception that ends the task's loss() from inside its model: this stage has its result.

    Only loss() knows the arguments of its model, so a stage cannot run the modules without it, and
    the code after that call needs scores, which only the last stage can compute. A stand-in for the
    scores either fails there (a stage's own output has another shape) or lets the task act on
    made-up values (a tensor that accepts every operation), and costs each stage the time and the
    memory of a loss. The exception skips that code but runs its `finally` blocks and context
    managers, and as a BaseException it also passes a task's `except Exception`.
    """

    def __init__(self, x: Tensor) -> None:
        self.x = x


class CutModel:
    """The stages of one rank.

    The rest of the model is freed: its parameters and buffers become None in their modules, so the
    remaining ones keep their names. A call of the model becomes a call of one of its stages, in
    whatever context the task calls it; only `run` enables such a call.

    Args:
        task, model: the whole model, which is changed.
        layout: of the pipeline.
        rank: 0 <= rank < layout.ranks.

    Attributes:
        model, layout, rank: as given.
        spans: the blocks of each stage, of all ranks.
        tied: names and parameters that the first and the last stage both hold, on different ranks;
            in the model's order. Empty on all other ranks. FSDP replaces parameters, so read this
            after all changes to the model.

    Raises:
        UserError: the model cannot be split this way.
    """

    def __init__(self, task: Any, model: nn.Module, layout: Layout, rank: int) -> None:
        _check(model)
        self.model, self.layout, self.rank = model, layout, rank
        self._blocks = blocks_of(task, model)
        of_ends = [_parameters(parts) for parts in self._ends()]
        costs = [sum(p.numel() for p in _parameters([block])) for block in self._blocks]
        ends = [float(sum(p.numel() for p in parameters)) for parameters in of_ends]
        self.spans = divide(Costs(ends[0], costs, ends[1]), layout.stages)
        _check_parameters(model, of_ends[0] | of_ends[1], self._blocks)
        both = of_ends[0] & of_ends[1]
        at_an_end = rank in (0, layout.ranks - 1) and layout.ranks > 1
        self._tied = [n for n, p in model.named_parameters() if at_an_end and p in both]
        self._leaves_by_hook = False
        self._left: _Left | None = None
        self._drop()
        self._device = next(model.parameters()).device
        self._begun: tuple[int, Tensor | None, Tensor | None] | None = None
        model.forward = self._forward

    @property
    def tied(self) -> dict[str, nn.Parameter]:
        return {name: self.model.get_parameter(name) for name in self._tied}

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.layout.stages - 1

    def parts(self, stage: int) -> list[nn.Module | nn.Parameter]:
        """The modules and parameters of a stage."""
        ends = self._ends()
        first = ends[0] if stage == 0 else []
        last = ends[1] if stage == self.last else []
        return [*first, *(self._blocks[block] for block in self.spans[stage]), *last]

    def leave_after_hooks(self) -> None:
        """Make passes leave the model only after its current forward hooks have run.

        FSDP's hooks must run, for backward.
        """
        self._leaves_by_hook = True
        self.model.register_forward_hook(self._leave)

    def _ends(self) -> tuple[list[nn.Module | nn.Parameter], list[nn.Module | nn.Parameter]]:
        """Modules and parameters that the first and the last stage use in addition to blocks."""
        first, last = (_names(self.model, end) for end in ("first_stage", "last_stage"))
        return _named(self.model, first), _named(self.model, last)

    def run(
        self, stage: int, x: Tensor | None, draws: Tensor | None, compute: Callable[[], T]
    ) -> T | Tensor:
        """Call `compute`, in which the task calls its model once.

        Args:
            stage: of this rank.
            x: output of the previous stage; None: this is the first one.
            draws: state of torch's generators to set when the model is called; None: unchanged.

        Returns:
            Result of `compute` on the last stage; on others the input of the next stage.

        Raises:
            UnsupportedTaskError: the task did not call its model.
        """
        self._begun = (stage, x, draws)
        try:
            found = compute()
        except _Left as left:
            return left.x
        if self._begun is not None:
            self._begun = None
            raise UnsupportedTaskError(
                "the task's loss() did not call its model, of which a pipeline has a stage on each "
                "rank: it must call model(...) once"
            )
        return found

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._begun is None:
            raise UnsupportedTaskError(
                "a pipeline has a stage of the model on each rank: the task's loss() may call it "
                "once, and nothing else can"
            )
        (stage, x, draws), self._begun = self._begun, None
        if draws is not None:
            set_generators(draws, self._device)
        model = cast("Cuttable", self.model)
        if x is None:
            x = model.embed(*args, **kwargs)
        for block in self.spans[stage]:
            x = model.apply_block(self._blocks[block], x, *args, **kwargs)
        if stage == self.last:
            return model.output(x, *args, **kwargs)
        left = _Left(whole(x))  # ranks of a tensor axis may hold shards of it
        if not self._leaves_by_hook:
            raise left
        self._left = left
        return left.x

    def _leave(self, *_: Any) -> None:
        left, self._left = self._left, None
        if left is not None:
            raise left

    def _drop(self) -> None:
        """Drop everything that no stage of this rank uses."""
        kept = [part for stage in self.layout.of_rank(self.rank) for part in self.parts(stage)]
        parameters, modules = _parameters(kept), _modules(kept)
        first, last = self._ends()
        parts = [*self._blocks, *first, *last]
        for module in _modules(parts) - modules | {self.model}:
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in parameters:
                    setattr(module, name, None)
            if module is not self.model:
                for name, _ in module.named_buffers(recurse=False, remove_duplicate=False):
                    setattr(module, name, None)


def _check(model: nn.Module) -> None:
    wanted = ("embed", "apply_block", "output", "first_stage", "last_stage")
    missing = [name for name in wanted if not hasattr(model, name)]
    if missing:
        raise UserError(
            f"parallel.pipeline: {type(model).__name__} does not say how it is cut into stages: it "
            f"has no {', '.join(missing)} (docs/pipeline.md shows them)"
        )


def _check_parameters(
    model: nn.Module, of_ends: set[nn.Parameter], blocks: Sequence[nn.Module]
) -> None:
    """Check that each parameter is in one block, or at one end or both."""
    holders = Counter(p for block in blocks for p in _parameters([block]))
    holders.update(of_ends)
    for name, parameter in model.named_parameters():
        if holders[parameter] == 0:
            raise UserError(
                f"parallel.pipeline: no stage has the model's parameter {name}: it belongs to none "
                "of its blocks, and neither first_stage nor last_stage names it"
            )
        if holders[parameter] > 1:
            raise UserError(
                f"parallel.pipeline: several blocks share the model's parameter {name}: only what "
                "comes before the blocks and what comes after them can share one"
            )


def _names(model: nn.Module, end: str) -> Sequence[str]:
    return cast("Sequence[str]", getattr(model, end))


def _named(model: nn.Module, names: Iterable[str]) -> list[nn.Module | nn.Parameter]:
    found = [getattr(model, name, None) for name in names]
    return [part for part in found if isinstance(part, nn.Module | nn.Parameter)]


def _parameters(parts: Iterable[nn.Module | nn.Parameter]) -> set[nn.Parameter]:
    return {
        parameter
        for part in parts
        for parameter in (part.parameters() if isinstance(part, nn.Module) else [part])
    }


def _modules(parts: Iterable[nn.Module | nn.Parameter]) -> set[nn.Module]:
    return {m for part in parts if isinstance(part, nn.Module) for m in part.modules()}
