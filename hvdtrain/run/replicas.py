"""Replicas of a model that spans ranks in an elastic run, formed again in each generation.

1. Each rank reports which shard it holds, as of which step.
2. A rank that may have missed the last step takes it, if another rank has taken it (Agreement).
3. The ranks are arranged so that many of them keep their shards (Grid.of).
4. A holder of a shard sends it to the ranks that need it and do not hold it (parallel/regroup.py).
5. The ranks of a replica form a torch.distributed world, and build their shards of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import NamedTuple

from torch import Tensor

from hvdtrain.elastic.membership import ReplacedError
from hvdtrain.engine.loop import MembershipChanged
from hvdtrain.engine.state import RunState
from hvdtrain.parallel.regroup import HeldShard, PartLostError, plan, transfer
from hvdtrain.parallel.spanned_state import SpannedEma, SpannedModel, SpannedOptimizer
from hvdtrain.parallel.world import Connections, abandon, lost_peers
from hvdtrain.run.build import RunComponents, build_components
from hvdtrain.run.prepare import Prepared
from hvdtrain.run.recorder import Held
from hvdtrain.run.spanning import form_mesh
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.mesh import Grid, Mesh, Topology


class PartStatus(NamedTuple):
    """The status of a rank in a rendezvous.

    Args:
        part: index of the shard that it holds, or None.
        step: optimizer steps done; -1: it holds no shard.
        reaches: the step that it can reach by itself: this or the next one, see Agreement.
        before: index of this process's last shard, whether or not it still holds it.
    """

    part: int | None = None
    step: int = -1
    reaches: int = -1
    before: int | None = None

    def holds(self, newest: int) -> int | None:
        """Return the index of the shard that it holds or can make as of step `newest`, or None."""
        return self.part if newest in (self.step, self.reaches) else None


class Replicas:
    """This process's shard of the model, from one generation to the next.

    Args:
        held: whether this process holds the state of the run; updated in place.
    """

    def __init__(self, prepared: Prepared, held: Held) -> None:
        self._prepared = prepared
        self._held = held
        # Components of the last generation that trained; they hold this rank's shard while
        # `_shard` is None.
        self._components: RunComponents | None = None
        self._shard: HeldShard | None = None
        # torch caches operations on DTensors by mesh, not by this process's position in the mesh.
        # A process therefore keeps the index of its shard.
        self._before: int | None = None
        self.connections = Connections()

    def status(self) -> PartStatus:
        """Return the status of this process."""
        if self._shard is not None:
            step = self._shard.step
            return PartStatus(self._shard.number, step, step, self._before)
        if self._components is not None and self._held.trained:
            assert self._components.agreement is not None
            step = self._prepared.progress.step
            reaches = self._components.agreement.reaches(step)
            return PartStatus(self._before, step, reaches, self._before)
        return PartStatus(before=self._before)

    def forget_pending_step(self) -> None:
        """Drop the pending step: the other ranks redo it without this process.

        They divide its micro-batches differently, so the result may not be bitwise identical.
        """
        if self._components is not None and self._components.agreement is not None:
            self._components.agreement.forget()

    def leave_world(self) -> None:
        """Leave a generation; ranks that wait for this rank in a collective get an error."""
        self.connections.leave()
        abandon()

    def lost_peers(self) -> AbstractContextManager[None]:
        """Context that reports lost peers, see world.py."""
        return lost_peers()

    def regroup(self, topology: Topology) -> RunComponents:
        """Build the components of this generation and transfer shards to the ranks that need them.

        If a shard was lost, `held.newest` is set, and the components are as at the start of a run.

        Raises:
            RankLostError: another rank is gone; this process still holds its shard, or the newer
                shard that it has received.
            ReplacedError: the index of this process's shard would change.
            MembershipChanged: the index of another rank's shard would change.
        """
        own = self.status()
        statuses = [PartStatus(*theirs) for theirs in gather_json([*own], "parts")]
        newest = max(status.step for status in statuses)
        if self._shard is None and own.part is not None:
            assert self._components is not None and self._components.agreement is not None
            self._components.agreement.catch_up(own.step, newest)
            self._shard = _held_shard(self._components.state, own.part)
        self._components = None  # its memory is needed
        grid = self._arrange(topology, statuses, newest)
        if newest >= 0:
            self._hand_over(grid, statuses, newest, topology.rank)
        self._before = grid.part(topology.rank)
        with lost_peers():
            made = self._build(topology, grid)
        if self._shard is not None:
            _take(made.state, self._shard)
            self._shard, self._held.trained, self._held.initial = None, True, False
        self._components = made
        return made

    def _arrange(self, topology: Topology, statuses: Sequence[PartStatus], newest: int) -> Grid:
        grid, moved = arrange(
            topology.hosts,
            statuses,
            newest,
            self._prepared.config.parallel.degrees,
            self._prepared.config.parallel.place,
        )
        if topology.rank in moved:
            raise ReplacedError(
                f"it had part {self._before} of the model, of which there are enough; a new "
                f"process can have part {grid.part(topology.rank)}"
            )
        if moved:
            raise MembershipChanged
        return grid

    def _hand_over(
        self, grid: Grid, statuses: Sequence[PartStatus], newest: int, rank: int
    ) -> None:
        """Give every rank its shard as of step `newest`; if one was lost, drop all shards."""
        held = [status.holds(newest) for status in statuses]
        try:
            transfers = plan(held, grid)
        except PartLostError:
            self._shard, self._held.trained, self._held.newest = None, False, newest
            return
        received = transfer(transfers, rank, self._shard)
        if received is not None:
            self._shard = received
        assert self._shard is not None
        if (self._shard.number, self._shard.step) != (grid.part(rank), newest):
            raise RuntimeError(
                f"this rank holds part {self._shard.number} as of step {self._shard.step} instead "
                f"of part {grid.part(rank)} as of step {newest}"
            )

    def _build(self, topology: Topology, grid: Grid) -> RunComponents:
        prepared = self._prepared

        def form() -> Mesh:
            with self.connections.opened(grid.replica_of(topology.rank)):
                return form_mesh(prepared.config.parallel, topology, prepared.device, grid)

        return build_components(prepared, topology, form)


def arrange(
    hosts: Sequence[str],
    statuses: Sequence[PartStatus],
    newest: int,
    degrees: dict[str, int],
    place: Sequence[str],
) -> tuple[Grid, list[int]]:
    """Return the assignment of shards to ranks, and the ranks whose shard index changes."""
    before = [status.before for status in statuses]
    holders = [rank for rank, status in enumerate(statuses) if status.holds(newest) is not None]
    grid = Grid.of(hosts, degrees, place, before, holders)
    return grid, [rank for rank in grid.ranks if before[rank] not in (None, grid.part(rank))]


def _held_shard(state: RunState, number: int) -> HeldShard:
    tensors = {f"{p.name}/{key}": t for p in _spanned(state) for key, t in p.held().items()}
    alike = state.of_scope("replicated")
    tensors |= {f"{part.name}/{key}": t for part in alike for key, t in part.tensors().items()}
    return HeldShard(number, asdict(state.progress), state.applied.count, tensors)


def _take(state: RunState, shard: HeldShard) -> None:
    def of(name: str) -> dict[str, Tensor]:
        start = f"{name}/"
        found = shard.tensors.items()
        return {key.removeprefix(start): t for key, t in found if key.startswith(start)}

    for part in _spanned(state):
        part.take(of(part.name))
    for each in state.of_scope("replicated"):
        each.load([of(each.name)])
    vars(state.progress).update(shard.progress)
    state.applied.count = shard.applied


def _spanned(state: RunState) -> list[SpannedModel | SpannedOptimizer | SpannedEma]:
    every = SpannedModel | SpannedOptimizer | SpannedEma
    return [part for part in state.spanned if isinstance(part, every)]
