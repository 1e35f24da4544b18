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
from hvdtrain.runtime.collectives import broadcast_json, gather_json
from hvdtrain.runtime.grid import Grid
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.topology import Topology


class PartStatus(NamedTuple):
    """What a rank tells of itself.

    Args:
        part: that it holds, or None.
        step: optimizer steps done.
        reaches: the step that it can do alone, if another rank has: this or the next one.
    """

    part: int | None = None
    step: int = -1
    reaches: int = -1


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
        self.connections = Connections()

    def status(self) -> PartStatus:
        """What this process holds."""
        components = self._components
        if components is not None and components.mesh is not None and self._held.trained:
            mesh, step = components.mesh, self._prepared.progress.step
            pending = components.agreement is not None and components.agreement.pending is not None
            return PartStatus(mesh.grid.part(mesh.topology.rank), step, step + pending)
        if self._part is not None:
            return PartStatus(self._part.number, self._part.step, self._part.step)
        return PartStatus()

    def leave_world(self) -> None:
        """After a generation: its other ranks may be gone."""
        abandon()

    def lost_peers(self) -> AbstractContextManager[None]:
        """See world.py."""
        return lost_peers()

    def regroup(self, topology: Topology) -> RunComponents:
        """What trains in this generation; every rank holds its part, if any rank held one.

        Where a part was lost, `held.parts_lost` is set, and all is as at the start of a run.

        Raises:
            RankLostError: another rank is gone; this process still holds what it held.
        """
        own = self.status()
        statuses = [PartStatus(*theirs) for theirs in gather_json([*own], "parts")]
        top = max(status.step for status in statuses)
        if self._components is not None and self._held.trained:
            if own.step < top == own.reaches:
                _roll_forward(self._components)
            self._part = _held_part(self._components, own, top)
        self._components = None  # its memory is needed
        held = [s.part if top in (s.step, s.reaches) else None for s in statuses]
        if top >= 0:
            self._hand_over(topology, held, top, source=[s.step for s in statuses].index(top))
        with lost_peers():
            made = self._build(topology, held)
        if self._part is not None:
            _take(made.state, self._part.tensors)
            self._part, self._held.trained, self._held.initial = None, True, False
        self._components = made
        return made

    def _hand_over(self, topology: Topology, held: list[int | None], top: int, source: int) -> None:
        """Every rank holds its part, or none does where one was lost.

        Args:
            top: the most advanced step.
            source: a rank that has done it.
        """
        parallel = self._prepared.config.parallel
        grid = Grid.of(topology.hosts, parallel.degrees, parallel.place, held)
        try:
            transfers = plan(held, grid)
        except PartLostError:
            self._held.parts_lost, self._part = True, None
            return
        own = self._part.tensors if self._part else {}
        received = transfer(transfers, topology.rank, own)
        progress = broadcast_json(asdict(self._prepared.progress), "parts.progress", source)
        vars(self._prepared.progress).update(progress)
        self._part = HeldPart(grid.part(topology.rank), top, received or own)

    def _build(self, topology: Topology, held: list[int | None]) -> RunComponents:
        prepared = self._prepared

        def form() -> Mesh:
            with self.connections.opened():
                return form_mesh(prepared.config.parallel, topology, prepared.device, held)

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
