"""State of a sharded optimizer, as a part of the run's state, and its transfer between ranks.

`redistribute` runs when ranks have died, joined or left. A rank that holds elements as of the most
advanced step sends them to the ranks that need them next (shards.py). Every rank makes the same
collective calls in the same order, because all calls follow from what the ranks exchange first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.spread import SpreadPart, open_part
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.optim.optimizer import parameter_names
from hvdtrain.parallel.shards import Interval, ShardLostError, Transfer, plan_transfers
from hvdtrain.parallel.zero import Entries, ShardedOptimizer
from hvdtrain.runtime.collectives import broadcast_tensors, gather_json
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.state_part import Saved, ShardedPart
from hvdtrain.runtime.tensor_shards import ShardPosition

# Elements of each entry sent at once; as much memory is used in addition to the state.
_AT_ONCE = 8 << 20
_SCALAR = "step"  # the entry that is identical in all slices of a parameter


class ShardedOptimizerState(ShardedPart):
    """The sharded part "optimizer": "parameter name/entry", with the names of a whole optimizer.

    A rank saves the shard of which it is the first holder.
    """

    name = "optimizer"

    def __init__(self, optimizer: ShardedOptimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        self._model = model
        self._names = [*parameter_names(optimizer, model).values()]

    def saved(self) -> dict[str, Saved]:
        entries = self.optimizer.entries()
        shapes = [(*p.shape,) for p in self.optimizer.parameters]
        return {
            f"{self._names[i.tensor]}/{entry}": Saved(
                tensor, ShardPosition(shapes[i.tensor], i.start) if tensor.dim() else None
            )
            for i in self.optimizer.first_held()
            for entry, tensor in entries[i].items()
            if tensor.dim() or i.start == 0
        }

    def compared(self) -> dict[str, Tensor]:
        return {}

    def held(self) -> dict[int, dict[str, Tensor]]:
        """Return this rank's state of each shard, by shard; identical on all holders of a shard."""
        entries, shard_map = self.optimizer.entries(), self.optimizer.shard_map
        return {
            shard: {
                f"{self._names[i.tensor]}/{entry}.{i.start}": tensor
                for i in shard_map.shards[shard]
                for entry, tensor in entries[i].items()
            }
            for shard in shard_map.shards_of(self.optimizer.rank)
        }

    def reset(self) -> None:
        self.optimizer.install(self.optimizer.shard_map, self.optimizer.rank, version=0)

    def begin(self, topology: Topology) -> None:
        """Assign shards that no rank holds yet: the state is as at the start of a run."""
        self.optimizer.install(self.optimizer.assign(topology), topology.rank, version=0)
        self._warn(topology)

    def redistribute(self, topology: Topology, step: int) -> bool:
        """See the function; False, on all ranks: no rank holds some shard any more."""
        try:
            redistribute(self.optimizer, topology, step)
        except ShardLostError:
            return False
        self._warn(topology)
        return True

    def _warn(self, topology: Topology) -> None:
        """Warn if a host holds all copies of a shard; with one copy every host does."""
        shard_map, several = self.optimizer.shard_map, len(topology.ranks_by_host()) > 1
        alone, copies = shard_map.sole_hosts(topology.hosts), len(shard_map.holders[0])
        if topology.rank == 0 and several and copies > 1 and alone:
            logger.warning(
                "parallel.shard.copies %d: %s has too many of the ranks for copies on other hosts: "
                "its loss would send the run back to a checkpoint",
                copies,
                " and ".join(alone),
            )

    def read(self, directory: Path, step: int) -> None:
        saved = open_part(directory, self.name, self._model)
        if saved is None:
            raise UserError(f"checkpoint {directory} has no state of an optimizer")
        known: dict[str, list[str]] = {}
        for key in saved.names():
            name, _, entry = key.rpartition("/")
            known.setdefault(name, []).append(entry)
        if unknown := sorted(known.keys() - set(self._names)):
            raise UserError(f"the checkpoint's optimizer knows parameters {unknown}")
        optimizer = self.optimizer
        entries = {
            i: {e: self._read_entry(saved, i, e) for e in known.get(self._names[i.tensor], ())}
            for i in optimizer.entries()
        }
        optimizer.install(optimizer.shard_map, optimizer.rank, step, entries)

    def _read_entry(self, saved: SpreadPart, interval: Interval, entry: str) -> Tensor:
        name = self._names[interval.tensor]
        parameter = self.optimizer.parameters[interval.tensor]
        if entry == _SCALAR:
            return saved.whole(f"{name}/{entry}")
        shape = saved.shape(f"{name}/{entry}")
        if shape != parameter.shape:
            raise UserError(
                f"the checkpoint's {entry} of {name} has the shape {[*shape]}, and the parameter "
                f"{[*parameter.shape]}; use the configuration it was made with, or another run.id"
            )
        return saved.range(f"{name}/{entry}", interval.start, interval.stop).to(parameter.device)


def redistribute(optimizer: ShardedOptimizer, topology: Topology, step: int) -> None:
    """Transfer every rank's shards of the new assignment to it, and complete all parameters.

    Ranks that could take the step of the most advanced rank have taken it. If a rank dies during
    the transfer, each rank still holds what it held before.

    Args:
        topology: the current ranks; some may be new, and have no parameters yet.
        step: of the most advanced rank.

    Raises:
        ShardLostError: on all ranks.
        RankLostError: another rank is gone.
    """
    valid = optimizer.version == step
    entries = optimizer.entries() if valid else {}
    own = {
        "held": [*entries],
        "entries": _describe(entries),
        "complete": optimizer.complete or not valid,
    }
    states = [_HeldState.of(theirs) for theirs in gather_json(own, "zero.held")]
    held = [state.held for state in states]
    shard_map = optimizer.assign(topology)
    wanted = [shard_map.held_by(rank) for rank in range(topology.world_size)]
    # Before the first step there is no state that could be lost.
    exists = any(of for state in states for of in state.entries.values())
    transfers = plan_transfers(held, wanted) if exists else []
    if not all(state.complete for state in states):
        _complete_parameters(optimizer, held)
    described = {tensor: of for state in reversed(states) for tensor, of in state.entries.items()}
    received = _receive(transfers, described, entries, wanted[topology.rank], optimizer)
    optimizer.install(shard_map, topology.rank, step, received)


# For each entry of a parameter: its dtype, and its value if it has no dimension.
Described = dict[str, tuple[str, float | None]]


@dataclass(frozen=True)
class _HeldState:
    """What a rank holds, as of the most advanced step.

    Args:
        entries: by number of the parameter.
        complete: its parameters belong to that step, or it will receive all of them.
    """

    held: list[Interval]
    entries: dict[int, Described]
    complete: bool

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _HeldState:
        entries = {int(n): {e: (d, v) for e, (d, v) in of.items()} for n, of in state["entries"]}
        return cls([Interval(*i) for i in state["held"]], entries, state["complete"])


def _describe(entries: Mapping[Interval, Entries]) -> list[Any]:
    """Return [number of a parameter, its Described] in a form that JSON can hold."""
    found = {
        interval.tensor: {
            name: [str(t.dtype).removeprefix("torch."), None if t.dim() else t.item()]
            for name, t in of.items()
        }
        for interval, of in entries.items()
    }
    return [*found.items()]


def _complete_parameters(optimizer: ShardedOptimizer, held: Sequence[Sequence[Interval]]) -> None:
    """Give every rank the parameters of the ranks that updated them."""
    whole = [Interval(n, 0, p.numel()) for n, p in enumerate(optimizer.parameters)]

    def rows(interval: Interval) -> dict[str, Tensor]:
        tensor, start, stop = interval
        return {f"{tensor}.{start}": optimizer.flat(tensor)[start:stop]}

    for _ in _broadcast(plan_transfers(held, [whole] * len(held)), rows, "zero.parameters"):
        pass


def _receive(
    transfers: Sequence[Transfer],
    described: Mapping[int, Described],
    old: Mapping[Interval, Entries],
    wanted: Sequence[Interval],
    optimizer: ShardedOptimizer,
) -> dict[Interval, Entries]:
    """Return the entries of each interval that this rank wants, from its old ones and from others.

    Args:
        described: by number of the parameter.
    """

    def allocate(interval: Interval) -> Entries:
        device = optimizer.parameters[interval.tensor].device
        return {
            name: torch.empty(interval.stop - interval.start, dtype=_dtype(dtype), device=device)
            if value is None
            else torch.tensor(value, dtype=_dtype(dtype))
            for name, (dtype, value) in described.get(interval.tensor, {}).items()
        }

    def rows(interval: Interval) -> dict[str, Tensor]:
        row = allocate(interval)
        for held, entries in old.items():
            _copy_overlap(row, interval, entries, held)
        return {
            f"{interval.tensor}.{interval.start}.{name}": tensor
            for name, tensor in row.items()
            if tensor.dim()
        }

    new = {interval: allocate(interval) for interval in wanted}
    for interval, own in new.items():
        for held, entries in old.items():
            _copy_overlap(own, interval, entries, held)
    for sent, received in _broadcast(transfers, rows, "zero.state"):
        named = {key.rpartition(".")[2]: tensor for key, tensor in received.items()}
        for interval, own in new.items():
            _copy_overlap(own, interval, named, sent)
    return new


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _copy_overlap(target: Entries, to: Interval, source: Entries, of: Interval) -> None:
    """Copy the elements that two intervals have in common, if any."""
    start, stop = max(to.start, of.start), min(to.stop, of.stop)
    if to.tensor != of.tensor or start >= stop:
        return
    for name, tensor in source.items():
        if tensor.dim():
            target[name][start - to.start : stop - to.start] = tensor[
                start - of.start : stop - of.start
            ]


def _broadcast(
    transfers: Sequence[Transfer], rows: Callable[[Interval], dict[str, Tensor]], name: str
) -> Iterator[tuple[Interval, dict[str, Tensor]]]:
    """Send transfers to all ranks; yield intervals with their received tensors.

    All ranks receive everything, because most ranks need something of every sender, and a process
    set for each group of receivers would have to be agreed on first.

    Args:
        rows: the tensors of an interval: on its source the data, on other ranks memory to receive
            it.
    """
    for source, of_source in groupby(transfers, key=lambda transfer: transfer.source):
        for number, batch in enumerate(_batches(transfer.interval for transfer in of_source)):
            made = [(interval, rows(interval)) for interval in batch]
            tensors = {key: row for _, of_interval in made for key, row in of_interval.items()}
            if tensors:
                broadcast_tensors(tensors, f"{name}.{source}.{number}", source)
            yield from made


def _batches(intervals: Iterable[Interval]) -> Iterator[list[Interval]]:
    """Yield intervals of at most `_AT_ONCE` elements, in batches of at most as many elements."""
    batch, elements = list[Interval](), 0
    for tensor, begin, end in intervals:
        for start in range(begin, end, _AT_ONCE):
            interval = Interval(tensor, start, min(start + _AT_ONCE, end))
            size = interval.stop - interval.start
            if batch and elements + size > _AT_ONCE:
                yield batch
                batch, elements = [], 0
            batch.append(interval)
            elements += size
    if batch:
        yield batch
