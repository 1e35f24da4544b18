"""What a task returns for each validation sample, of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hvdtrain.errors import UnsupportedTaskError
from hvdtrain.runtime.collectives import gather_rows, on_all_ranks, reduce
from hvdtrain.runtime.mesh import Group


def all_rows(rows: Sequence[Tensor], places: Sequence[Sequence[int]], group: Group) -> Tensor:
    """The rows of all ranks, in the order of the micro-batches; every rank calls it.

    Args:
        rows: of this rank's micro-batches, which are every `group.size`-th one.
        places: the samples of each micro-batch of the evaluation.

    Returns:
        (samples, K), the same for any number of ranks.

    Raises:
        AgreedError: on every rank, where any has not a row for each sample.
    """
    ends = [*accumulate(map(len, places))]
    batches = [torch.arange(end - len(place), end) for end, place in zip(ends, places, strict=True)]
    wanted = [len(batch) for batch in batches[group.rank :: group.size]]
    on_all_ranks("evaluate.rows", lambda: _check([len(part) for part in rows], wanted))
    flat = [part.reshape(len(part), -1) for part in rows]
    width = flat[0].shape[1] if flat else 0
    if group.size > 1:
        # A rank without micro-batches does not know it.
        width = int(reduce(torch.tensor(width), "max", "evaluate.width"))
    own = torch.cat([torch.empty(0, width, dtype=torch.float64), *flat])
    if group.size == 1:
        return own
    order = [batch for rank in range(group.size) for batch in batches[rank :: group.size]]
    found = torch.empty(ends[-1], width, dtype=torch.float64)
    found[torch.cat(order)] = gather_rows(own, "evaluate.rows")
    return found


def _check(lengths: Sequence[int], wanted: Sequence[int]) -> None:
    if lengths != wanted:
        raise UnsupportedTaskError(
            f"the task's loss() returned {list(lengths)} rows for micro-batches of {list(wanted)} "
            "samples: with measures() each sample has one"
        )
