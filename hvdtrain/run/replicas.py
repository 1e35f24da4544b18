"""A model that spans ranks in an elastic run: each generation forms its replicas anew.

every rank tells which part it holds, as of which step
one that may have missed the last step takes it, where another has         (see Agreement)
the ranks are arranged so that many keep the part that they hold           (Grid.of)
the ranks of a replica form a torch.distributed world, and build their parts of the model
whoever holds a part gives it to those that are to hold it and do not      (parallel/regroup.py)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, NamedTuple

from hvdtrain.engine.state import RunState
from hvdtrain.parallel.regroup import HeldPart, PartLostError, plan, transfer
from hvdtrain.parallel.spanned_state import SpannedEma, SpannedModel, SpannedOptimizer
from hvdtrain.parallel.world import Connections, abandon, lost_peers
from hvdtrain.run.build import RunComponents, build_components
from hvdtrain.run.held import Held
from hvdtrain.run.prepare import Prepared
from hvdtrain.run.spanning import form_mesh
from hvdtrain.run.start_checks import crash
from hvdtrain.runtime.collectives import RankLostError, broadcast_json, gather_json
from hvdtrain.runtime.grid import Grid
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.topology import Topology


class PartStatus(NamedTuple):
    """What a rank tells of itself.

    Args:
        part: that it holds, or None.
        step: optimizer steps done.
        reaches: the step that it can do alone, if another rank has: this or the next one.
        before: the part that this process had last, whether it holds anything of it or not.
    """

    part: int | None = None
    step: int = -1
    reaches: int = -1
    before: int | None = None


class Replicas:
    """This process's part of the model, from one generation to the next.

    Args:
        held: says whether this process holds the state of the run; brought up to date.
    """

    def __init__(self, prepared: Prepared, held: Held) -> None:
        self._prepared = prepared
        self._held = held
        # Of the last generation, if it got as far as to make some; else from before them.
        self._components: RunComponents | None = None
        self._part: HeldPart | None = None
        # torch caches what DTensors do by the mesh, and not by this process's place in it: so a
        # process keeps its part.
        self._before: int | None = None
        self.connections = Connections()

    def status(self) -> PartStatus:
        """What this process holds."""
        components = self._components
        if components is not None and components.mesh is not None and self._held.trained:
            step = self._prepared.progress.step
            pending = components.agreement is not None and components.agreement.pending is not None
            return PartStatus(self._before, step, step + pending, self._before)
        if self._part is not None:
            step = self._part.step
            return PartStatus(self._part.number, step, step, self._before)
        return PartStatus(before=self._before)

    def leave_world(self) -> None:
        """After a generation; those that wait for this rank in a collective get an error."""
        self.connections.leave()
        abandon()

    def lost_peers(self) -> AbstractContextManager[None]:
        """See world.py."""
        return lost_peers()

    def regroup(self, topology: Topology) -> RunComponents:
        """What trains in this generation; every rank holds its part, if any rank held one.

        Where a part was lost, `held.parts_lost` is set, and all is as at the start of a run.

        Raises:
            RankLostError: another rank is gone; this process still holds what it held.
            UserError: this process would have another part than before: it is to be started anew.
        """
        own = self.status()
        statuses = [PartStatus(*theirs) for theirs in gather_json([*own], "parts")]
        top = max(status.step for status in statuses)
        if self._components is not None and self._held.trained:
            if own.step < top == own.reaches:
                _roll_forward(self._components)
            self._part = _held_part(self._components, own, top)
        self._components = None  # its memory is needed
        before = [status.before for status in statuses]
        grid = self._arrange(topology, before)
        if top >= 0:
            held = [s.part if top in (s.step, s.reaches) else None for s in statuses]
            self._hand_over(grid, held, (top, [s.step for s in statuses].index(top)), topology.rank)
        self._before = grid.part(topology.rank)
        with lost_peers():
            made = self._build(topology, before)
        if self._part is not None:
            _take(made.state, self._part.tensors)
            self._part, self._held.trained, self._held.initial = None, True, False
        self._components = made
        return made

    def _arrange(self, topology: Topology, before: list[int | None]) -> Grid:
        parallel = self._prepared.config.parallel
        grid = Grid.of(topology.hosts, parallel.degrees, parallel.place, before)
        moved = [r for r in grid.ranks if before[r] not in (None, grid.part(r))]
        if topology.rank in moved:
            raise crash(
                f"this process had part {before[topology.rank]} of the model, of which there are "
                f"enough; one that begins anew can have part {grid.part(topology.rank)}"
            )
        if moved:
            raise RankLostError(f"rank {moved[0]} begins anew, with another part of the model")
        return grid

    def _hand_over(
        self, grid: Grid, held: list[int | None], reached: tuple[int, int], rank: int
    ) -> None:
        """Every rank holds its part, or none does where one was lost.

        Args:
            reached: the most advanced step, and a rank that has done it.
            rank: this one.
        """
        step, source = reached
        try:
            transfers = plan(held, grid)
        except PartLostError:
            self._held.parts_lost, self._part = True, None
            return
        own = self._part.tensors if self._part else {}
        received = transfer(transfers, rank, own)
        progress = broadcast_json(asdict(self._prepared.progress), "parts.progress", source)
        vars(self._prepared.progress).update(progress)
        self._part = HeldPart(grid.part(rank), step, received or own)

    def _build(self, topology: Topology, before: list[int | None]) -> RunComponents:
        prepared = self._prepared

        def form() -> Mesh:
            with self.connections.opened():
                return form_mesh(prepared.config.parallel, topology, prepared.device, before)

        return build_components(prepared, topology, form)


def _roll_forward(components: RunComponents) -> None:
    """The step that another rank has done, whose gradients this one has."""
    assert components.agreement is not None
    if components.agreement.pending:
        components.state.optimizer.step()


def _held_part(components: RunComponents, own: PartStatus, top: int) -> HeldPart:
    assert own.part is not None
    step = top if own.reaches == top else own.step
    tensors = {
        f"{part.name}/{key}": t
        for part in _parts(components.state)
        for key, t in part.held().items()
    }
    return HeldPart(own.part, step, tensors)


def _take(state: RunState, tensors: dict[str, Any]) -> None:
    for part in _parts(state):
        start = f"{part.name}/"
        part.take({k.removeprefix(start): t for k, t in tensors.items() if k.startswith(start)})


def _parts(state: RunState) -> list[SpannedModel | SpannedOptimizer | SpannedEma]:
    every = SpannedModel | SpannedOptimizer | SpannedEma
    return [part for part in state.spanned if isinstance(part, every)]
