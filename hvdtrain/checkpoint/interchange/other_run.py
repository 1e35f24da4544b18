"""What a run that another trainer began consists of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hvdtrain.checkpoint.weights import Weights
from hvdtrain.errors import UserError

StateDict = dict[str, Any]


@dataclass
class OtherRun:
    """State of a run that another trainer began.

    Args:
        trainer: its name, for messages.
        path: its checkpoint.
        step: optimizer steps done.
        weights: of the model.
        optimizers: state_dict() of each optimizer; parameters are numbered.
        by_name: the optimizer's tensors as "parameter/entry", if the trainer names parameters;
            `optimizers` is then empty.
        options: of the groups of the optimizer, such as "betas", with `by_name`.
        numbering: names the parameters of each group in the order of their numbers, if the trainer
            determines it and not the script.
        schedulers: state_dict() of each learning rate scheduler; none with `by_name`, where the
            trainer's are not torch's.
        shuffle_seed: seed with which loader.order torch has the trainer's order of samples; None:
            its order is not known.
        order: what is known of the order otherwise, for the message.
        global_size: samples of a step; None: unknown.
        clip_norm: to which the norm of the gradient was limited; 0: it was not; None: unknown.
        left: state that hvdtrain does not keep, one phrase each.
    """

    trainer: str
    path: Path
    step: int
    weights: Weights
    optimizers: Sequence[StateDict] = ()
    by_name: dict[str, Tensor] | None = None
    options: Sequence[StateDict] = ()
    numbering: Callable[[], list[list[str]]] | None = None
    schedulers: Sequence[StateDict] = ()
    shuffle_seed: int | None = None
    order: str = "the checkpoint does not say how its samples were ordered"
    global_size: int | None = None
    clip_norm: float | None = None
    left: list[str] = field(default_factory=list)

    def groups(self) -> list[StateDict]:
        """Options of the parameter groups of all optimizers."""
        if self.by_name is not None:
            return [*self.options]
        return [group for state in self.optimizers for group in state["param_groups"]]


def newest_in(path: Path, prefix: str, last: str) -> tuple[Path, list[str]] | None:
    """Find the newest complete checkpoint in a directory of numbered ones.

    Args:
        prefix: of their names, before the number.
        last: the file that the trainer writes last.

    Returns:
        Its path, or that of the newest one if none is complete, and a phrase for each newer one
        that is not, as in `OtherRun.left`; None: there are none.
    """
    names = re.compile(re.escape(prefix) + r"(\d+)")
    numbered = {int(m[1]): one for one in path.iterdir() if (m := names.fullmatch(one.name))}
    if not numbered:
        return None
    complete = [number for number, one in numbered.items() if (one / last).exists()]
    newest = max(complete or numbered)
    newer = [numbered[number].name for number in sorted(numbered) if number > newest]
    return numbered[newest], [f"{name}: it is not complete (no {last})" for name in newer]


def counted_steps(optimizers: Iterable[StateDict]) -> int | None:
    """The number of steps that optimizers have counted; None: they count none."""
    counts = [
        int(entries["step"])
        for state in optimizers
        for entries in state["state"].values()
        if isinstance(entries, dict) and "step" in entries
    ]
    return max(counts, default=None)


def checked_optimizers(path: Path, found: Sequence[Any]) -> list[StateDict]:
    """Return states of optimizers.

    Raises:
        UserError: one is not a state_dict() of an optimizer.
    """
    for state in found:
        known = isinstance(state, dict) and isinstance(state.get("state"), dict)
        groups = state.get("param_groups") if known else None
        if not isinstance(groups, list) or not all(
            isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups
        ):
            raise UserError(f"{path} has no state of an optimizer, but another object in its place")
        for group in groups:  # numbers of numpy, as a script may have set them
            group.update({k: v.item() for k, v in group.items() if isinstance(v, np.generic)})
    return list(found)
