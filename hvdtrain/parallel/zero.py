"""Optimizer of which each rank updates a shard, and holds only that shard of the state.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models",
arXiv:1910.02054, stage 1, with each shard on several ranks. Gradients are summed as without it, by
any exchange, and are whole on every rank: so the results are bitwise identical to those of the
whole optimizer, and so is the norm for clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import UserError
from hvdtrain.parallel.parts import Dealing, Slice, deal
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
            what it does to the whole.
        copies: ranks that hold each shard.
        wrap: returns the optimizer that steps, such as MasterWeights, for the inner one over
            slices.

    Attributes:
        parameters: in the optimizer's order.
        dealing: which ranks hold which shards.
        rank: this one, in `dealing`.
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
                "parallel.zero cuts parameters that lie in memory as their shape says, and the "
                "task's model has others (channels_last): make them contiguous"
            )
        self._plain, self._inner, self._wrap = inner, inner, wrap
        self._copies = copies
        self.rank = 0
        self._slices: dict[Slice, nn.Parameter] = {}
        self.dealing = Dealing((), ())
        self._differs = torch.zeros(0, dtype=torch.bool)
        self.version: int | None = None
        self.complete = True

    # --- assignment of shards -------------------------------------------------

    def deal(self, topology: Topology) -> Dealing:
        """Assignment of shards to the ranks of `topology`; nothing is changed."""
        return deal([p.numel() for p in self.parameters], topology.hosts, self._copies)

    def install(
        self, dealing: Dealing, rank: int, version: int, entries: dict[Slice, Entries] | None = None
    ) -> None:
        """Hold the shards that `dealing` assigns to this rank; its parameters are `complete`.

        Args:
            version: the step to which it belongs.
            entries: the inner optimizer's state for each slice that this rank holds; slices without
                state (before the first step) may be omitted.
        """
        self.dealing, self.rank, self.version = dealing, rank, version
        self.complete = True
        device = self.parameters[0].device
        self._differs = torch.zeros(len(dealing.parts), dtype=torch.bool, device=device)
        self._slices = {
            s: nn.Parameter(self.flat(s.number)[s.start : s.stop]) for s in dealing.held(rank)
        }
        first = 0
        for own, inner in zip(self.param_groups, self._plain.param_groups, strict=True):
            last = first + len(own["params"])
            inner["params"] = [p for s, p in self._slices.items() if first <= s.number < last]
            first = last
        self._plain.state.clear()
        self._inner = self._wrap(self._plain) if self._wrap else self._plain
        for piece, given in (entries or {}).items():
            if given:
                self._inner.state[self._slices[piece]] = given

    def flat(self, number: int) -> Tensor:
        """A parameter as a vector that shares its memory."""
        return self.parameters[number].detach().view(-1)

    def entries(self) -> dict[Slice, Entries]:
        """The inner optimizer's live tensors for each slice that this rank holds.

        They have the shape of the slice, except tensors without dimension, such as step counts,
        which are identical on all slices of a parameter.
        """
        return {
            s: {k: t for k, t in self._inner.state.get(p, {}).items() if isinstance(t, Tensor)}
            for s, p in self._slices.items()
        }

    def own_slices(self) -> list[Slice]:
        """Slices of the shard that this rank holds first, sends to others, and saves."""
        return [*self.dealing.parts[self.rank]] if self.dealing.parts else []

    # --- a step ---------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step on this rank's shards; parameters without a gradient are skipped."""
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({key: value for key, value in own.items() if key != "params"})
        for s, parameter in self._slices.items():
            gradient = self.parameters[s.number].grad
            parameter.grad = None if gradient is None else gradient.reshape(-1)[s.start : s.stop]
        self._inner.step()
        for parameter in self._slices.values():
            parameter.grad = None
        self.complete = self._copies >= len(self.dealing.holders)
        self.skip()

    def skip(self) -> None:
        """Count a step that leaves this rank's shard unchanged."""
        assert self.version is not None
        self.version += 1

    @torch.no_grad()
    def gather(self) -> None:
        """Give every rank the parameters that others have updated, in pieces of bounded size.

        Raises:
            RankLostError: another rank is gone. This rank's shards are up to date.
        """
        if self.complete:
            return
        rounds = zip_longest(*(self._chunks(part) for part in self.dealing.parts), fillvalue=())
        for number, chunks in enumerate(rounds):
            own = [self._bytes(s) for s in chunks[self.rank]]
            row = torch.cat(own) if own else self._bytes(Slice(0, 0, 0))
            gathered = gather_rows(row, f"zero.{number}")
            sizes = [self._bytes(s).numel() for chunk in chunks for s in chunk]
            received = iter(gathered.split(sizes))
            for part, (chunk, ranks) in enumerate(zip(chunks, self.dealing.holders, strict=True)):
                for s in chunk:
                    mine, theirs = self._bytes(s), next(received)
                    if self.rank in ranks:
                        self._differs[part] |= (mine != theirs).any()
                    mine.copy_(theirs)
        self.complete = True

    def differs(self, part: int) -> bool:
        """Whether the first holder's update of a shard that this rank also holds differed."""
        return bool(self._differs[part])

    def _chunks(self, part: Sequence[Slice]) -> Iterator[list[Slice]]:
        """A shard in pieces, each of which is gathered together with pieces of the other shards."""
        most = max(1, _GATHERED // len(self.dealing.parts))
        chunk, room = list[Slice](), most
        for number, start, stop in part:
            while start < stop:
                piece = Slice(number, start, min(stop, start + room))
                chunk.append(piece)
                room -= piece.stop - start
                start = piece.stop
                if not room:
                    yield chunk
                    chunk, room = [], most
        if chunk:
            yield chunk

    def _bytes(self, s: Slice) -> Tensor:
        # Horovod supports fewer dtypes than torch.
        return self.flat(s.number)[s.start : s.stop].view(torch.uint8)
