"""Optimizer of which each rank updates a shard, and holds only that shard of the state.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
arXiv:1910.02054, stage 1, with each shard on several ranks. Gradients are summed as without it, by
any exchange, and are whole on every rank: so results and the norm for clipping are bitwise
identical to the whole optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.optim.state_dicts import check_no_rest
from hvdtrain.parallel.shards import Interval, ShardMap
from hvdtrain.runtime.collectives import gather_rows
from hvdtrain.runtime.mesh import Topology

# Elements that each rank receives in one all-gather of new parameters.
_GATHERED = 8 << 20

Entries = dict[str, Tensor]


class ShardedOptimizer(Optimizer):
    """Optimizer over a model's parameters that lets an inner optimizer step on a shard of them.

    A step is `step` or `skip`, and `gather`. In an elastic run the ranks agree before it (see
    agreement.py). A rank that could not take the step then finds its shard on other ranks one step
    further, and a rank that was not notified can follow them.

    Its `state` is empty: `entries` returns the state that this rank holds.

    Args:
        inner: over the model's parameters; elementwise, so that it does to a slice of a parameter
            what it does to the whole parameter.
        copies: ranks that hold each shard.
        wrap: returns the optimizer that steps, such as MasterWeights, for the inner optimizer over
            slices of the parameters.

    Attributes:
        parameters: in the optimizer's order.
        shard_map: which ranks hold which shards.
        rank: this one, in `shard_map`.
        version: the step to which this rank's shard belongs; None if it holds none.
        complete: all parameters on this rank belong to that step.

    Raises:
        UserError: a parameter is not contiguous.
    """

    def __init__(
        self,
        inner: Optimizer,
        copies: int,
        wrap: Callable[[Optimizer], Optimizer] | None = None,
    ) -> None:
        super().__init__([{**group} for group in inner.param_groups], defaults={})
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        if not all(p.is_contiguous() for p in self.parameters):
            raise UserError(
                "parallel.shard.stage 1 cuts parameters that lie in memory as their shape says, "
                "and the task's model has others (channels_last): make them contiguous"
            )
        self._plain, self._inner, self._wrap = inner, inner, wrap
        self._copies = copies
        self.rank = 0
        self._slices: dict[Interval, nn.Parameter] = {}
        self.shard_map = ShardMap()
        self._differs = torch.zeros(0, dtype=torch.bool)
        self.version: int | None = None
        self.complete = True

    # --- assignment of shards -------------------------------------------------

    def assign(self, topology: Topology) -> ShardMap:
        """Return an assignment of shards to the ranks of `topology`; nothing is changed."""
        return ShardMap.even([p.numel() for p in self.parameters], topology.hosts, self._copies)

    def install(
        self,
        shard_map: ShardMap,
        rank: int,
        version: int,
        entries: dict[Interval, Entries] | None = None,
    ) -> None:
        """Hold the shards that `shard_map` assigns to this rank; its parameters are `complete`.

        Args:
            version: the step to which it belongs.
            entries: the inner optimizer's state for each interval that this rank holds; intervals
                without state (before the first step) may be omitted.
        """
        self.shard_map, self.rank, self.version = shard_map, rank, version
        self.complete = True
        device = self.parameters[0].device
        self._differs = torch.zeros(len(shard_map.shards), dtype=torch.bool, device=device)
        self._slices = {
            i: nn.Parameter(self.flat(i.tensor)[i.start : i.stop]) for i in shard_map.held_by(rank)
        }
        first = 0
        for own, inner in zip(self.param_groups, self._plain.param_groups, strict=True):
            last = first + len(own["params"])
            inner["params"] = [p for i, p in self._slices.items() if first <= i.tensor < last]
            first = last
        self._plain.state.clear()
        self._inner = self._wrap(self._plain) if self._wrap else self._plain
        for interval, given in (entries or {}).items():
            if given:
                self._inner.state[self._slices[interval]] = given

    def flat(self, tensor: int) -> Tensor:
        """Return a parameter as a vector that shares its memory."""
        return self.parameters[tensor].detach().view(-1)

    def entries(self) -> dict[Interval, Entries]:
        """Return the inner optimizer's live tensors for each interval that this rank holds.

        They have the interval's length, except tensors without dimension, such as step counts,
        which are identical in all intervals of a parameter.

        Raises:
            UserError: the inner optimizer has other state.
        """
        check_no_rest(self._inner, "parallel.shard.stage 1")
        return {
            i: {k: t for k, t in self._inner.state.get(p, {}).items() if isinstance(t, Tensor)}
            for i, p in self._slices.items()
        }

    def first_held(self) -> list[Interval]:
        """Return the intervals of the shard whose first holder is this rank, which saves it."""
        return [*self.shard_map.shards[self.rank]] if self.shard_map.shards else []

    # --- a step ---------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step on this rank's shards; parameters without a gradient are skipped."""
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
        for (tensor, start, stop), parameter in self._slices.items():
            gradient = self.parameters[tensor].grad
            parameter.grad = None if gradient is None else gradient.reshape(-1)[start:stop]
        self._inner.step()
        for parameter in self._slices.values():
            parameter.grad = None
        self.complete = self._copies >= len(self.shard_map.holders)
        self.skip()

    def skip(self) -> None:
        """Count a step that leaves this rank's shard unchanged."""
        assert self.version is not None
        self.version += 1

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank the parameters that others have updated, in chunks of bounded size.

        Raises:
            RankLostError: another rank is gone. This rank's shards are up to date.
        """
        if self.complete:
            return
        shards = self.shard_map.shards
        rounds = zip_longest(*(self._chunks(shard) for shard in shards), fillvalue=())
        for number, chunks in enumerate(rounds):
            own = [self._bytes(i) for i in chunks[self.rank]]
            row = torch.cat(own) if own else self._bytes(Interval(0, 0, 0))
            gathered = gather_rows(row, f"zero.{number}")
            sizes = [self._bytes(i).numel() for chunk in chunks for i in chunk]
            received = iter(gathered.split(sizes))
            holders = self.shard_map.holders
            for shard, (chunk, ranks) in enumerate(zip(chunks, holders, strict=True)):
                for interval in chunk:
                    mine, theirs = self._bytes(interval), next(received)
                    if self.rank in ranks:
                        self._differs[shard] |= (mine != theirs).any()
                    mine.copy_(theirs)
        self.complete = True

    def differs(self, shard: int) -> bool:
        """Whether the first holder's update of a shard that this rank also holds differed."""
        return bool(self._differs[shard])

    def _chunks(self, shard: Sequence[Interval]) -> Iterator[list[Interval]]:
        """Split a shard into chunks; the n-th chunks of all shards are gathered together."""
        most = max(1, _GATHERED // len(self.shard_map.shards))
        chunk, room = list[Interval](), most
        for tensor, start, stop in shard:
            while start < stop:
                taken = Interval(tensor, start, min(stop, start + room))
                chunk.append(taken)
                room -= taken.stop - start
                start = taken.stop
                if not room:
                    yield chunk
                    chunk, room = [], most
        if chunk:
            yield chunk

    def _bytes(self, interval: Interval) -> Tensor:
        # Horovod supports fewer dtypes than torch.
        tensor, start, stop = interval
        return self.flat(tensor)[start:stop].view(torch.uint8)
