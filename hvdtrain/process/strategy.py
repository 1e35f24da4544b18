"""How a model is distributed over ranks: `Replicated` (each rank holds it all) or `Spanning`.

This is the only place that distinguishes the two. Everything else calls the methods of the
strategy, or works with shards of any kind. Replicated documents the methods.

In an elastic run, the ranks of a Spanning model build it again in each generation (`regroup`):

1. Each rank reports which shard it holds, as of which step.
2. A rank that may have missed the last step takes it, if another rank has taken it (Agreement).
3. The ranks are arranged so that many of them keep their shards (Grid.of).
4. A holder of a shard sends it to the ranks that need it and do not hold it (parallel/shards.py).
5. The ranks of a replica form a torch.distributed world, and build their shards of the model.

If no rank has a shard as of the newest step, all ranks return to the newest step as of which there
are copies in memory of all shards (checkpoint.memory, parallel/copies.py). Without such a step, all
shards are dropped in 4, and the run continues from its newest checkpoint (resume.py). If a rank is
lost meanwhile, `regroup` raises RankLostError, and process/session.py calls `leave_generation` and
begins the next generation.

Ranks of a Replicated model get the run's state in generation.py instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private, see tasks/sync_batchnorm.py
from torch.optim import Optimizer

from hvdtrain.config import Config
from hvdtrain.elastic.membership import ReplacedError
from hvdtrain.elastic.rendezvous import job_secret
from hvdtrain.engine.loop import MembershipChanged
from hvdtrain.engine.state import RunState
from hvdtrain.engine.step import norm_of_gradients
from hvdtrain.errors import UserError
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.build import build_exchange, spanning_exchange
from hvdtrain.log import logger
from hvdtrain.optim.ema import Ema
from hvdtrain.optim.precision import BF16_PARAMS, MasterWeights, Precision
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.parallel.config import AXES
from hvdtrain.parallel.local_optimizer import LocalOptimizer, total_norm
from hvdtrain.parallel.shards import ShardLostError, ShardMap, placeholder, plan_transfers
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.process.recorder import PersistentState
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.mesh import Grid, Mesh, Topology
from hvdtrain.runtime.state_part import ShardedPart, StatePart
from hvdtrain.tasks import Task, blocks_of, optional

if TYPE_CHECKING:
    from hvdtrain.parallel.copies import MemoryCopies
    from hvdtrain.parallel.cut import CutModel
    from hvdtrain.parallel.spanned import HeldShard, SpannedEma, SpannedModel, SpannedOptimizer


class ShardStatus(NamedTuple):
    """The status of a rank in a rendezvous.

    Args:
        shard: index of the shard that it holds, or None.
        step: optimizer steps done; -1: it holds no shard.
        reachable_step: the step that it can reach by itself: this or the next one, see Agreement.
        before: index of this process's last shard, whether or not it still holds it.
    """

    shard: int | None = None
    step: int = -1
    reachable_step: int = -1
    before: int | None = None

    def holds(self, newest: int) -> int | None:
        """Return the index of the shard that it holds or can make as of step `newest`, or None."""
        return self.shard if newest in (self.step, self.reachable_step) else None


class Regrouped(Protocol):
    """What a generation builds, as far as `regroup` is concerned."""

    state: RunState
    agreement: Agreement | None


C = TypeVar("C", bound=Regrouped)


class Replicated:
    """Each rank holds the whole model, and sums its gradients with all other ranks.

    Attributes:
        holds_whole_model: a single rank can compute with the model.
        rebuilds: each generation builds the components again, with `regroup`.
        stages: with parallel.pipeline, this rank's stages of the model, once it is split.
    """

    holds_whole_model = True
    stages: CutModel | None = None
    rebuilds = False

    def __init__(self, config: Config, elastic: bool) -> None:
        self._config = config
        self._elastic = elastic

    def form(self, topology: Topology, device: torch.device) -> None:
        """Assign shards of the model to ranks; every rank calls it, before the model is built."""

    def mesh(self, topology: Topology) -> Mesh:
        """Return this rank's position in a generation with these ranks."""
        return Mesh.replicated(topology)

    def split(self, task: Task, model: nn.Module) -> None:
        """Split the model between ranks along all axes other than `shard`."""

    def shard(self, task: Task, model: nn.Module) -> None:
        """Shard each parameter over ranks, after all other changes to the model."""

    def optimizer(self, optimizer: Optimizer, precision: Precision) -> Optimizer:
        """Wrap the optimizer of this rank's parameters: master weights, sharded state."""
        wrap = MasterWeights if precision.name == BF16_PARAMS else None
        if self._config.parallel.shard.of_optimizer:
            return ShardedOptimizer(optimizer, self._config.parallel.shard.copies, wrap)
        return wrap(optimizer) if wrap else optimizer

    def exchange(self, optimizer: Optimizer, model: nn.Module, micro_batches: int) -> Exchange:
        """Build the exchange of the gradients.

        Args:
            micro_batches: in a step, over all ranks together.
        """
        return build_exchange(self._config.exchange, micro_batches, optimizer, model, self._elastic)

    def state_parts(
        self, model: nn.Module, optimizer: Optimizer, ema: Ema | None
    ) -> tuple[Sequence[StatePart], Sequence[ShardedPart]]:
        """Return (further parts of the state, sharded parts in place of model and optimizer)."""
        return (() if ema is None else (ema,)), ()

    def agreement(self, state: RunState) -> Agreement | None:
        """Return the agreement before each step; only in an elastic run whose ranks hold shards."""
        return Agreement() if self._elastic and state.sharded is not None else None

    def copies(self, state: RunState) -> tuple[MemoryCopies, Callable[[], HeldShard]] | None:
        """With checkpoint.memory: return the copies, and what returns this rank's live shard."""
        return None

    def norm(self, device: torch.device) -> Callable[[Sequence[Tensor]], Tensor]:
        """Return the function that computes the norm of the whole model's gradients."""
        return norm_of_gradients

    # --- generations of an elastic run ----------------------------------------

    def status(self, persistent: PersistentState, step: int) -> ShardStatus:
        """Return the status of this process; ranks without shards report the step elsewhere.

        Args:
            step: optimizer steps done.
        """
        return ShardStatus(reachable_step=0)

    def regroup(
        self, topology: Topology, persistent: PersistentState, step: int, build: Callable[[], C]
    ) -> C:
        """Build the components of a generation."""
        return build()

    def forget_pending_step(self) -> None:
        """Drop the pending step of a process that becomes a spare."""

    def leave_generation(self, exchange: Exchange | None) -> None:
        """Leave a generation that is over; other ranks may be gone.

        Args:
            exchange: of that generation, if it was built.
        """
        if exchange is not None:
            exchange.abort()

    def abort_collectives(self) -> None:
        """Fail collectives in progress other than Horovod's; any thread may call it."""

    def lost_peers(self) -> AbstractContextManager[None]:
        """Context that converts errors about lost ranks to RankLostError."""
        return nullcontext()

    def close(self) -> None:
        """Leave the other ranks after the last step; every rank calls it."""


class Spanning:
    """The ranks of a replica hold a shard of the model each. See Replicated for the methods."""

    holds_whole_model = False

    def __init__(self, config: Config, elastic: bool) -> None:
        from hvdtrain.parallel.world import Connections

        self._config = config
        self._elastic = self.rebuilds = elastic
        self._copies: MemoryCopies | None = None
        if config.checkpoint.memory.every:
            from hvdtrain.parallel.copies import MemoryCopies

            self._copies = MemoryCopies(job_secret())
        self._grid: Grid | None = None  # of this generation; None: in the order of the ranks
        self._mesh: Mesh | None = None
        self.stages: CutModel | None = None
        self._connections = Connections()
        # Components of the last generation that trained; they hold this rank's shard while
        # `_shard` is None.
        self._components: Regrouped | None = None
        self._shard: HeldShard | None = None
        # Index of this process's last shard. torch caches operations on DTensors by mesh, not by
        # this process's position in the mesh, so a process keeps this index for good.
        self._before: int | None = None

    def form(self, topology: Topology, device: torch.device) -> None:
        """The ranks of each replica form a torch.distributed world of their own.

        Raises:
            UserError: the ranks do not form a whole number of replicas.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from hvdtrain.parallel.world import join

        parallel = self._config.parallel
        grid = self._grid or Grid.of(topology.hosts, parallel.degrees, AXES)
        replica = grid.replica_of(topology.rank)
        with self._connections.opened(replica) if self._elastic else nullcontext():
            join(replica, topology, device, self._elastic)
            used = {axis: degree for axis, degree in grid.degrees.items() if degree > 1}
            axes = init_device_mesh(device.type, (*used.values(),), mesh_dim_names=(*used,))
        self.use(Mesh(topology, grid, axes))

    def use(self, mesh: Mesh) -> None:
        """Distribute the model over the ranks of `mesh`, whose world exists."""
        self._mesh, self.stages = mesh, None

    def mesh(self, topology: Topology) -> Mesh:
        assert self._mesh is not None and self._mesh.topology == topology
        return self._mesh

    def split(self, task: Task, model: nn.Module) -> None:
        """See Replicated.

        Raises:
            UserError: the model does not define its split, its sizes are not divisible, or it
                cannot span ranks.
        """
        assert self._mesh is not None
        name, parallel, mesh = self._config.task, self._config.parallel, self._mesh
        if optional(task, "measures"):
            raise UserError(
                f"task {name}: its measures() require ranks that hold the whole model: use degrees "
                "of 1 in `parallel`"
            )
        of_task = f"the model of task {name}"
        has_batchnorm = any(isinstance(module, _NormBase) for module in model.modules())
        if self._elastic and has_batchnorm:
            raise UserError(
                f"{of_task} has BatchNorm, and spans ranks of an elastic run: after a failure its "
                "statistics could be of another step than its weights; use LayerNorm or GroupNorm"
            )
        if parallel.tensor > 1:
            from hvdtrain.parallel.tensor import apply_tensor

            plan = getattr(model, "tensor_plan", None)
            if plan is None:
                raise UserError(
                    f"parallel.tensor {parallel.tensor}: {of_task} does not define its split: "
                    "give it a method tensor_plan() "
                    "(docs/custom-tasks.md#how-ranks-split-a-model)"
                )
            apply_tensor(model, mesh.axes["tensor"], plan())
        if parallel.context > 1:
            from hvdtrain.models.gpt import GPT
            from hvdtrain.parallel.context import apply_context

            if not isinstance(model, GPT):
                raise UserError(
                    f"parallel.context {parallel.context}: {of_task} is not a GPT, the only "
                    "model whose attention can span ranks"
                )
            apply_context(model, mesh.axes.get_group("context"))
        if parallel.pipeline == 1:
            return
        from hvdtrain.parallel.cut import CutModel
        from hvdtrain.parallel.schedules import Layout, virtual_stages

        if has_batchnorm:
            raise UserError(
                f"parallel.pipeline {parallel.pipeline}: {of_task} has BatchNorm, whose statistics "
                "would be of one stage only: use LayerNorm or GroupNorm"
            )
        layout = Layout(parallel.pipeline, virtual_stages(parallel.schedule))
        self.stages = CutModel(task, model, layout, mesh.coordinates["pipeline"])

    def shard(self, task: Task, model: nn.Module) -> None:
        """See Replicated. Blocks of other pipeline stages are no longer in the model.

        Raises:
            UserError: the model has no blocks, or there is no device to offload from.
        """
        assert self._mesh is not None
        shard, axes = self._config.parallel.shard, self._mesh.axes
        if shard.degree == 1:
            return
        offloads = shard.offload == "cpu"
        if offloads and axes.device_type == "cpu":
            raise UserError(
                "parallel.shard.offload cpu: this rank computes on the CPU, whose memory already "
                "holds the parameters: it is for GPUs"
            )
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        from hvdtrain.parallel.fsdp import Sharding, apply_shard

        blocks = blocks_of(task, model)
        if not blocks:
            raise UserError(
                f"parallel.shard.degree {shard.degree}: the model of task {self._config.task} has "
                "no nn.ModuleList of blocks, which ranks gather one at a time: name them with the "
                "task's blocks(model)"
            )
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        in_order = self.stages is None
        sharding = Sharding(shard.stage == 3, offload=offload, in_order=in_order)
        apply_shard(model, blocks, axes["shard"], sharding)
        if self.stages is not None:
            self.stages.leave_after_hooks()

    def optimizer(self, optimizer: Optimizer, precision: Precision) -> Optimizer:
        return LocalOptimizer(optimizer)

    def exchange(self, optimizer: Optimizer, model: nn.Module, micro_batches: int) -> Exchange:
        assert self._mesh is not None
        return spanning_exchange(optimizer, model, self._mesh)

    def state_parts(
        self, model: nn.Module, optimizer: Optimizer, ema: Ema | None
    ) -> tuple[Sequence[StatePart], Sequence[ShardedPart]]:
        from hvdtrain.parallel.spanned import (
            Saves,
            SpannedEma,
            SpannedModel,
            SpannedOptimizer,
        )

        assert self._mesh is not None
        twice = set(self.stages.tied) if self.stages and self.stages.rank > 0 else set[str]()
        saves = Saves(self._mesh, twice)
        parts = SpannedModel(model, saves), SpannedOptimizer(optimizer, model, saves)
        return (), (*parts, SpannedEma(ema, model, saves)) if ema else parts

    def agreement(self, state: RunState) -> Agreement | None:
        return Agreement() if self._elastic else None

    def copies(self, state: RunState) -> tuple[MemoryCopies, Callable[[], HeldShard]] | None:
        if self._copies is None or self._before is None:
            return None
        return self._copies, partial(_shard_of, state, self._before)

    def norm(self, device: torch.device) -> Callable[[Sequence[Tensor]], Tensor]:
        from hvdtrain.parallel.spanned import copies_in_replica, same_layers_mesh

        assert self._mesh is not None
        same_layers = same_layers_mesh(self._mesh.axes)
        # Both ends of the pipeline have the whole gradient of a tied parameter.
        tied = set(self.stages.tied.values()) if self.stages else set()

        @cache
        def copies(parameter: Tensor) -> int:
            own = copies_in_replica(parameter, same_layers) if same_layers else 1
            return 2 * own if parameter in tied else own

        return partial(total_norm, holders=copies, group=None, device=device)

    # --- generations of an elastic run ----------------------------------------

    def status(self, persistent: PersistentState, step: int) -> ShardStatus:
        if self._shard is not None:
            return ShardStatus(self._shard.number, self._shard.step, self._shard.step, self._before)
        if self._components is not None and persistent.trained:
            assert self._components.agreement is not None
            reachable_step = self._components.agreement.reachable_step(step)
            return ShardStatus(self._before, step, reachable_step, self._before)
        return ShardStatus(before=self._before)

    def regroup(
        self, topology: Topology, persistent: PersistentState, step: int, build: Callable[[], C]
    ) -> C:
        """Transfer shards to the ranks that need them, and build the components around them.

        If a shard was lost, `persistent.newest` is set. The components then have the state of
        copies in memory (`persistent.copied_step`). Without copies they are in their initial state,
        and the caller loads the newest checkpoint.

        Args:
            persistent: whether this process holds the state of the run; updated.
            step: optimizer steps done.
            build: calls `form`, `split` and the other methods; nothing else may refer to the last
                generation's components, whose memory is needed.

        Raises:
            RankLostError: another rank is gone; this process still holds its shard, or the newer
                shard that it has received.
            ReplacedError: the index of this process's shard would change.
            MembershipChanged: the index of another rank's shard would change.
        """
        own = self.status(persistent, step)
        statuses = [ShardStatus(*theirs) for theirs in gather_json([*own], "shards.held")]
        newest = max(status.step for status in statuses)  # -1: no rank holds a shard
        if self._shard is None and own.shard is not None:
            assert self._components is not None and self._components.agreement is not None
            self._components.agreement.catch_up(own.step, newest)
            self._shard = _shard_of(self._components.state, own.shard)
        self._components = None  # its memory is needed
        self._grid = self._arrange(topology, statuses, newest)
        if newest >= 0:
            self._transfer_shards(self._grid, statuses, newest, topology.rank, persistent)
        self._before = self._grid.shard(topology.rank)
        with self.lost_peers():
            built = build()
        if self._shard is not None:
            _load_shard(built.state, self._shard)
            self._shard, persistent.trained, persistent.initial = None, True, False
        self._components = built
        return built

    def _arrange(self, topology: Topology, statuses: Sequence[ShardStatus], newest: int) -> Grid:
        parallel = self._config.parallel
        grid, moved = arrange(topology.hosts, statuses, newest, parallel.degrees, AXES)
        if topology.rank in moved:
            raise ReplacedError(
                f"it had shard {self._before} of the model, which enough ranks hold; a new "
                f"process can have shard {grid.shard(topology.rank)}"
            )
        if moved:
            raise MembershipChanged
        return grid

    def _transfer_shards(
        self,
        grid: Grid,
        statuses: Sequence[ShardStatus],
        newest: int,
        rank: int,
        persistent: PersistentState,
    ) -> None:
        """Give every rank its shard as of step `newest`, or as of an older step, from copies.

        If a shard is lost, and no step has copies of all shards, drop all shards.
        """
        from hvdtrain.parallel.spanned import transfer_shards

        shard_map, step = ShardMap.of_replicas(grid), newest
        wanted = [shard_map.held_by(r) for r in range(len(statuses))]
        own = {self._shard.number: self._shard} if self._shard is not None else {}
        try:
            transfers = plan_transfers(
                [placeholder(status.holds(newest)) for status in statuses], wanted
            )
        except ShardLostError:
            persistent.newest = newest
            found = self._copies_of_all_shards(grid, newest, rank, persistent)
            if found is None:
                self._shard, persistent.trained = None, False
                return
            step, held = found
            intervals = [[each for n in numbers for each in placeholder(n)] for numbers in held]
            transfers = plan_transfers(intervals, wanted)
            sent = {each.interval.start for each in transfers if each.source == rank}
            assert self._copies is not None
            own = self._copies.store.shards(step, {*sent, grid.shard(rank)})
            persistent.copied_step = step
        shard = transfer_shards(transfers, rank, own) or own.get(grid.shard(rank))
        if shard is None or (shard.number, shard.step) != (grid.shard(rank), step):
            raise RuntimeError(
                f"this rank holds shard {shard and shard.number} as of step {shard and shard.step} "
                f"instead of shard {grid.shard(rank)} as of step {step}"
            )
        self._shard = shard

    def _copies_of_all_shards(
        self, grid: Grid, newest: int, rank: int, persistent: PersistentState
    ) -> tuple[int, list[list[int]]] | None:
        """Find intact copies in memory of all shards, at most of step `newest`.

        All ranks return the same.

        Returns:
            Their step, and the shards of which each rank holds a copy; None: there is no such step.
        """
        from hvdtrain.parallel.copies import common_step

        if self._copies is None:
            return None
        while True:
            gathered = gather_json(self._copies.store.held(), "copies.held")
            held = [[(number, at) for number, at in own if at <= newest] for own in gathered]
            step = common_step(held, grid.replica_size)
            if step is None:
                return None
            damaged = gather_json(self._copies.store.drop_damaged(step), "copies.damaged")
            if not any(damaged):
                return step, [[number for number, at in own if at == step] for own in held]
            for owner, numbers in enumerate(damaged):
                for number in numbers:
                    what = f"shard {number} of step {step} on rank {owner}"
                    persistent.damaged_copies.append(what)
                    if rank == 0:
                        logger.error("the copy in memory of %s is damaged, and is not used", what)

    def forget_pending_step(self) -> None:
        """See Replicated: the other ranks redo the step without this process.

        They divide its micro-batches differently, so the result may not be bitwise identical.
        """
        if self._components is not None and self._components.agreement is not None:
            self._components.agreement.forget()
        if self._copies is not None:  # the other ranks may return to a step before these
            self._copies.store.drop(lambda step: True)

    def leave_generation(self, exchange: Exchange | None) -> None:
        """See Replicated; ranks that wait for this rank in a collective get an error."""
        from hvdtrain.parallel.world import abandon

        if self._copies is not None:
            self._copies.leave()
        self._connections.leave()
        abandon()

    def abort_collectives(self) -> None:
        self._connections.abort()

    def lost_peers(self) -> AbstractContextManager[None]:
        from hvdtrain.parallel.world import lost_peers

        return lost_peers() if self._elastic else nullcontext()

    def close(self) -> None:
        from hvdtrain.parallel.world import leave

        if self._copies is not None:
            self._copies.leave()
        leave()


Strategy = Replicated | Spanning


def build_strategy(config: Config, elastic: bool) -> Strategy:
    """Build the strategy that `parallel` configures.

    Args:
        elastic: processes may join and leave.
    """
    kind = Spanning if config.parallel.spans_ranks else Replicated
    return kind(config, elastic)


def arrange(
    hosts: Sequence[str],
    statuses: Sequence[ShardStatus],
    newest: int,
    degrees: dict[str, int],
    place: Sequence[str],
) -> tuple[Grid, list[int]]:
    """Return the assignment of shards to ranks, and the ranks whose shard index changes."""
    before = [status.before for status in statuses]
    holders = [rank for rank, status in enumerate(statuses) if status.holds(newest) is not None]
    grid = Grid.of(hosts, degrees, place, before, holders)
    return grid, [rank for rank in grid.ranks if before[rank] not in (None, grid.shard(rank))]


def _shard_of(state: RunState, number: int) -> HeldShard:
    """Return the shard that a state holds, with everything that a rank needs to continue."""
    from hvdtrain.parallel.spanned import HeldShard

    tensors = {f"{p.name}/{key}": t for p in _spanned(state) for key, t in p.held().items()}
    alike = state.of_scope("replicated")
    tensors |= {f"{part.name}/{key}": t for part in alike for key, t in part.tensors().items()}
    return HeldShard(number, asdict(state.progress), state.applied.count, tensors)


def _load_shard(state: RunState, shard: HeldShard) -> None:
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
    from hvdtrain.parallel.spanned import SpannedEma, SpannedModel, SpannedOptimizer

    every = SpannedModel | SpannedOptimizer | SpannedEma
    return [part for part in state.spanned if isinstance(part, every)]
