"""State of a run during training, and its transfer to checkpoints and to other ranks.

Each part of the state is a StatePart; RunState knows only a part's name and scope. ModelState and
OptimizerState are the parts that every rank holds completely. Snapshot keeps a copy in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.checkpoint.format import Checkpoint, SharedDirectory, read_files_of_ranks
from hvdtrain.checkpoint.layout import file_of_rank, part_and_rank
from hvdtrain.checkpoint.spread import as_in, open_part
from hvdtrain.data.order import SHUFFLED
from hvdtrain.data.sample_facts import SampleFacts
from hvdtrain.engine.extra_state import ExtraState
from hvdtrain.engine.integrity import ShardHash, TensorHash, whole_digest
from hvdtrain.engine.loop import Callback, Loop, Progress, StepRecord
from hvdtrain.engine.spikes import Rollback
from hvdtrain.engine.step import AppliedSteps
from hvdtrain.engine.structure import GrowingBuffers
from hvdtrain.errors import UserError
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors, state_tensors
from hvdtrain.optim.state_dicts import REST, has_rest, members
from hvdtrain.parallel.zero import ShardedOptimizer
from hvdtrain.parallel.zero_state import ShardedOptimizerState
from hvdtrain.runtime.collectives import broadcast_json, broadcast_tensors
from hvdtrain.runtime.mesh import ALONE, Group, Topology
from hvdtrain.runtime.state_part import Saved, Scope, ShardedPart, StatePart
from hvdtrain.runtime.tensor_shards import model_tensors
from hvdtrain.runtime.wrappers import plain_name
from hvdtrain.untrusted import checked, is_of

# Of a checkpoint; another one is refused.
FORMAT = 2
PRECISION = "precision.name"  # its name in an identity
ORDER = "the order of the samples"  # as of data.order.describe
# Values that apply to checkpoints which do not name them.
_ONCE = {PRECISION: "float32", ORDER: SHUFFLED}


@dataclass
class RunState:
    """The model, its optimizer, and the run's progress.

    Args:
        identity: values that determine the run's curve, by the name used in messages: seed, data,
            global batch, ...; a checkpoint of another identity is refused.
        further: parts other than model and optimizer, such as the state of an exchange.
        spanned: the shards of a model that spans ranks and of its optimizer, instead of whole
            parts.
        samples: facts of the training data, if known; a checkpoint of other data is refused.

    Attributes:
        sharded: the optimizer's state, if ranks hold shards of it.
        parts: all parts.
        applied: steps that the tensors have been through.
    """

    model: nn.Module
    optimizer: Optimizer
    progress: Progress
    identity: dict[str, Any]
    further: Sequence[StatePart] = ()
    spanned: Sequence[ShardedPart] = ()
    samples: SampleFacts | None = None
    sharded: ShardedOptimizerState | None = field(init=False, default=None)
    parts: tuple[StatePart, ...] = field(init=False)
    applied: AppliedSteps = field(init=False)

    def __post_init__(self) -> None:
        self.applied = AppliedSteps(self.optimizer)
        extra = ExtraState(self.model)
        if self.spanned and extra.modules:
            raise UserError(
                f"the module {next(iter(extra.modules))!r} has get_extra_state(), which cannot be "
                "saved for a model that spans ranks (parallel.*): use buffers instead"
            )
        if self.spanned:
            self.parts = (*self.spanned, *self.further)
            return
        if isinstance(self.optimizer, ShardedOptimizer):
            self.sharded = ShardedOptimizerState(self.optimizer, self.model)
        optimizer = self.sharded or OptimizerState(self.optimizer, self.model)
        of_model = (ModelState(self.model), *([extra] if extra.modules else ()))
        self.parts = (*of_model, optimizer, *self.further)

    def of_scope(self, *scopes: Scope) -> list[StatePart]:
        return [part for part in self.parts if part.scope in scopes]

    def _sharded_parts(self) -> list[ShardedPart]:
        return self.of_scope("sharded")  # type: ignore[return-value]

    def read_shards(self, directory: Path) -> None:
        """Load this rank's shards of the sharded parts from a checkpoint.

        Raises:
            UserError: a file is damaged, or does not match.
        """
        for part in self._sharded_parts():
            part.read(directory, self.progress.step)

    def compared(self) -> dict[str, Tensor]:
        """Tensors that are bitwise identical on all ranks that hold them, unless one is damaged."""
        parts = self.of_scope("replicated", "sharded")
        return {f"{p.name}/{key}": t for p in parts for key, t in p.compared().items()}

    def saved_shards(self) -> dict[str, Saved]:
        """Tensors of `compared` that this rank saves of a model that spans ranks, and their places.

        All ranks together save each element once.
        """
        found: dict[str, Saved] = {}
        for part in self.spanned:
            compared = part.compared()
            found |= {f"{part.name}/{k}": s for k, s in part.saved().items() if k in compared}
        return found

    def capture(self, group: Group = ALONE, directory: str = "") -> Checkpoint:
        """Checkpoint contents of this rank; its tensors are the live ones.

        Args:
            group: all ranks.
            directory: to which all ranks write, see SharedDirectory; only if there are parts
                that are not replicated.
        """
        local = self.of_scope("local", "sharded")
        parts = {file_of_rank(part.name, group.rank): part.tensors() for part in local}
        positions = {file_of_rank(p.name, group.rank): p.positions() for p in self._sharded_parts()}
        if group.rank == 0:
            parts |= {part.name: part.tensors() for part in self.of_scope("replicated")}
        others = tuple(file_of_rank(p.name, rank) for p in local for rank in range(1, group.size))
        return Checkpoint(
            parts,
            {
                "format": FORMAT,
                **self.progress.state_dict(),
                "identity": self.identity,
                **({} if self.samples is None else {"sample_facts": self.samples.to_json()}),
            },
            SharedDirectory(directory, others) if directory else None,
            positions=positions,
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """Load the replicated parts from a checkpoint; see `load_local` too.

        Raises:
            UserError: it belongs to another model, or another identity.
        """
        state = dict(checkpoint.state)
        if state.pop("format", None) != FORMAT:
            raise UserError("the checkpoint was written by another version of hvdtrain")
        theirs, facts = state.pop("identity", None), state.pop("sample_facts", None)
        try:
            if not is_of(theirs, dict[str, Any]):
                raise ValueError("it lacks the values that determine the run's curve")
            progress = checked(Progress, state)
            known = is_of(progress.evaluations, list[list[float | None]])
            if not known or not all(len(pair) == 2 and pair[0] for pair in progress.evaluations):
                raise ValueError("evaluations")
            if any(len(one) != len(Rollback._fields) for one in progress.rollbacks):
                raise ValueError("rollbacks")
        except ValueError as error:
            raise UserError(f"this is not a checkpoint of hvdtrain ({error})") from None
        for name, own in self.identity.items():
            before = theirs.get(name, _ONCE.get(name))
            if name == ORDER:
                own, before = (_order_until(progress.step, order) for order in (own, before))
            if before != own:
                raise UserError(
                    f"{name} was {before} at the checkpoint of step {state['step']} and "
                    f"is {own} now: the curve could not be continued; use another run.id"
                )
        self._check_samples(facts, progress.step)
        parts = {part.name: part for part in self.of_scope("replicated")}
        saved = self._replicated(checkpoint)
        if parts.keys() != saved.keys():
            raise UserError(
                f"the checkpoint contains the state of {', '.join(saved)}, but this configuration "
                f"requires the state of {', '.join(parts)}; use the configuration that wrote the "
                "checkpoint, or another run.id"
            )
        for name, part in parts.items():
            part.load([saved[name]])
        self._advance_to(progress)

    def _check_samples(self, saved: object, step: int) -> None:
        if self.samples is None or not isinstance(saved, str):
            return
        try:
            place = self.samples.differs_from(SampleFacts.from_json(saved), fixed_only=True)
        except (TypeError, ValueError, AttributeError) as error:
            raise UserError(f"this is not a checkpoint of hvdtrain ({error})") from None
        if place:
            raise UserError(
                f"{place} of the training data is not what it was at the checkpoint of step "
                f"{step}: the curve could not be continued. Give the run the same data (with "
                "random_split, a generator with a seed), or use another run.id. If the change is "
                "intended, give the dataset an attribute fingerprint, which is compared instead"
            )

    def _advance_to(self, progress: Progress) -> None:
        """Copy the progress that the tensors now have; the loop holds the `progress` object."""
        vars(self.progress).update(vars(progress))
        self.applied.count = progress.step

    def _replicated(self, checkpoint: Checkpoint) -> dict[str, dict[str, Tensor]]:
        """Tensors for the replicated parts, even if they were sharded when they were saved."""
        sharded = {part.name for part in self.of_scope("sharded")}
        saved = {name: t for name, t in checkpoint.parts.items() if name not in sharded}
        for part in self.of_scope("replicated"):
            if part.name not in saved and checkpoint.directory is not None:
                spread = open_part(checkpoint.directory, part.name)
                if spread is not None:
                    saved[part.name] = {name: spread.whole(name) for name in spread.names()}
        return saved

    def load_local(self, directory: Path | None, group: Group) -> None:
        """Load the local parts of a checkpoint; every rank reads its own files.

        With another number of ranks than at the time of the save, rank r inherits from those ranks
        r' for which r' modulo the number of ranks is r: nothing is lost, and nothing counts twice.

        Args:
            directory: None: there is no checkpoint, the run begins.
            group: all ranks.

        Raises:
            UserError: a file is damaged, or does not match.
        """
        saved: dict[str, dict[str, Tensor]] = {}
        if directory is not None:
            wanted = read_files_of_ranks(directory, lambda rank: rank % group.size == group.rank)
            saved = dict(sorted(wanted.parts.items()))
        for part in self.of_scope("local"):
            part.load([t for file, t in saved.items() if part_and_rank(file)[0] == part.name])

    def assign_shards(self, topology: Topology, step: int) -> bool:
        """Assign the sharded state to the current ranks, see parallel/zero_state.py.

        Args:
            step: step of the most advanced rank.

        Returns:
            False, on all ranks: a shard was lost with the ranks that held it.
        """
        return self.sharded is None or self.sharded.redistribute(topology, step)

    def drop_local(self) -> None:
        """Reset the local parts to their state at the start of a run."""
        for part in self.of_scope("local"):
            part.load(())

    def start_over(self, model: nn.Module | None) -> None:
        """Load the weights and buffers of a fresh model; reset all other state.

        Args:
            model: a fresh model of the same shapes; None: this model is fresh.
        """
        with torch.no_grad():
            pairs = zip(_all_tensors(self.model), _all_tensors(model), strict=True) if model else ()
            for own, fresh in pairs:
                own.copy_(fresh)
        for part in self.parts:
            if part.name != ModelState.name or part.scope == "sharded":
                part.load(())
        self._advance_to(Progress())

    def broadcast(self, root: int = 0) -> None:
        """Copy the replicated parts of rank `root` to all ranks, unchanged.

        After a RankLostError the state is a mixture of old and new values.

        Horovod's own broadcast_optimizer_state fills an empty optimizer by a step with zero
        gradients, in which weight decay changes the weights; here an empty optimizer stays empty.
        """
        parts = self.of_scope("replicated")
        kept: dict[str, Any] = {
            "progress": asdict(self.progress),
            "applied": self.applied.count,
            "layouts": {part.name: _layout(part.tensors()) for part in parts},
        }
        theirs = broadcast_json(kept, "state", root)
        device = next(self.model.parameters()).device
        for part in parts:
            layout, tensors = theirs["layouts"][part.name], part.tensors()
            same = layout == kept["layouts"][part.name]
            if not same:
                tensors = _empty(layout, device)
            broadcast_tensors(tensors, part.name, root)
            # Of objects with state_dict() the tensors may be copies.
            if not same or isinstance(part, OptimizerState | ExtraState):
                part.load([tensors])
        vars(self.progress).update(theirs["progress"])  # the loop holds this object
        self.applied.count = theirs["applied"]


class ModelState:
    """The replicated part "model": parameters and saved buffers, by name.

    Buffers are not compared: a task may keep buffers that differ between ranks. Replica checks
    compare those of a script with its own loop.
    """

    name = "model"
    scope: Scope = "replicated"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._growing = GrowingBuffers(model)

    def tensors(self) -> dict[str, Tensor]:
        return model_tensors(self._model)

    def compared(self) -> dict[str, Tensor]:
        return {plain_name(name): p.data for name, p in self._model.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        """Saved buffers."""
        named = self._model.named_parameters(remove_duplicate=False)
        parameters = {plain_name(name) for name, _ in named}
        return {name: t for name, t in self.tensors().items() if name not in parameters}

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        tensors = as_in(self._model, saved[0])
        self._growing.fit(tensors)
        _copy(tensors, self.tensors())


class OptimizerState:
    """The replicated part "optimizer": "parameter name/entry"; empty before the first step.

    Optimizers that are not torch's own also have the rest of their state_dict(), see
    optim/state_dicts.py.
    """

    name = "optimizer"
    scope: Scope = "replicated"

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model
        now = self.tensors() if any(map(has_rest, members(optimizer).values())) else {}
        self._initial = {name: tensor.to("cpu", copy=True) for name, tensor in now.items()}

    def tensors(self) -> dict[str, Tensor]:
        return state_tensors(self._optimizer, self._model)

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        own = {name: tensor.clone() for name, tensor in self._initial.items()}
        tensors = as_in(self._model, saved[0]) if saved else own
        names = {*parameter_names(self._optimizer, self._model).values(), REST.rstrip("/")}
        unknown = {key.rpartition("/")[0] for key in tensors} - names
        if unknown:
            raise UserError(f"the checkpoint's optimizer knows parameters {sorted(unknown)}")
        set_state_tensors(self._optimizer, self._model, tensors)


def state_hash(state: RunState, of_tensors: TensorHash) -> str:
    """Hash of parameters and optimizer state, however they are sharded; every rank calls it."""
    if state.spanned:
        return whole_digest(of_tensors, state.saved_shards()).hex()
    if state.sharded is not None:
        return ShardHash(state.sharded, of_tensors).whole(state.compared()).hex()
    return of_tensors(state.compared()).hex()


class Snapshot:
    """Copy in memory of the replicated parts and the progress.

    With local SGD, ranks keep their last common state: after a failure between two
    synchronizations, none of their states is valid. A rank that receives a newer state keeps its
    own state until the newer one is complete.

    Args:
        device: that holds the copy; default: each tensor's own device.
    """

    def __init__(self, state: RunState, device: torch.device | None = None) -> None:
        self._state = state
        self._device = device
        self._progress = Progress()
        self._applied = 0
        self._tensors: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the current state."""
        self._progress = replace(self._state.progress)
        self._applied = self._state.applied.count
        for part in self._state.of_scope("replicated"):
            kept, now = self._tensors.setdefault(part.name, {}), part.tensors()
            for gone in kept.keys() - now.keys():
                del kept[gone]
            for name, tensor in now.items():
                if name in kept and kept[name].shape == tensor.shape:
                    kept[name].copy_(tensor)
                else:
                    kept[name] = tensor.detach().to(self._device or tensor.device, copy=True)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state of the last `keep`."""
        for part in self._state.of_scope("replicated"):
            # Copies: an optimizer keeps and updates the tensors that it is given.
            part.load([{name: t.clone() for name, t in self._tensors[part.name].items()}])
        vars(self._state.progress).update(vars(self._progress))
        self._state.applied.count = self._applied


class KeepCommonState(Callback):
    """Keep the snapshot that is restored after a failure with local SGD.

    Comes after all callbacks that may change the state (ReplicaCheck).
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        snapshot.keep()  # state at the start of the generation

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.ranks_in_sync:
            self._snapshot.keep()


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: [list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type]
        for name, t in tensors.items()
    }


def _empty(layout: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return memory to receive tensors, on the CPU or on the model's device as on their sender."""
    return {
        name: torch.empty(
            shape, dtype=getattr(torch, dtype), device="cpu" if kind == "cpu" else device
        )
        for name, (shape, dtype, kind) in layout.items()
    }


def _order_until(step: int, described: Any) -> str:
    """Format what `describe` says of the order before a step; later changes are allowed."""
    if not is_of(described, list[list[int | str]]) or any(len(one) != 2 for one in described):
        return str(described)
    parts = [one for one in described if not isinstance(one[0], int) or one[0] < max(step, 1)]
    return "; ".join(f"from step {first} on {text}" if first else text for first, text in parts)


def _all_tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    if source.keys() != target.keys() or any(source[k].shape != t.shape for k, t in target.items()):
        differing = sorted(
            key
            for key in source.keys() | target.keys()
            if key not in source or key not in target or source[key].shape != target[key].shape
        )
        raise UserError(
            f"the checkpoint is of another model: {len(differing)} tensors differ, such as "
            f"{differing[0]}; use the configuration that wrote it, or another run.id"
        )
    for key, tensor in target.items():
        tensor.copy_(source[key])
