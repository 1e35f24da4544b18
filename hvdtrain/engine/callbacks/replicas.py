"""Comparison of the replicas: hash each rank's state, compare the hashes, and heal damage.

All ranks apply the same update to bitwise identical values, so their parameters and optimizer state
stay bitwise identical: a rank that differs has been damaged (a bit flip in memory, a defect of a
core or a device). In a script with its own loop, the script may also have computed its state or a
buffer differently on each rank, and messages name what differs. Buffers of tasks are not compared:
a task may keep buffers that differ between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from hvdtrain.engine.integrity import DIGEST_BYTES, ShardHash, TensorHash
from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.state import ModelState, RunState, state_hash
from hvdtrain.errors import EXIT_CRASH, EXIT_USER
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError, gather_bytes, gather_json
from hvdtrain.runtime.mesh import Grid, Topology

_NOT_SAVED = (
    "this state was not saved: start again with the same run.id to resume from the newest "
    "checkpoint, on other hosts if it happens again"
)
_COMPUTED = (
    "the script computes it differently on each rank: let all ranks write the same, such as values "
    "of step.result or training.evaluate"
)
_WEIGHTS = "parameters or optimizer state"


class ReplicaCheck(Callback):
    """Compare the replicas before the callbacks that use the state, so that no damage is saved.

    Adds "state_hash" to the record of a step after which it compared, even on one rank: `hvdtrain
    audit --same` compares these hashes. Adds "healed" (ranks) if it healed ranks.

    Args:
        every: steps between checks.
        save_every: steps between checkpoints, 0 = none: a state to be saved is also compared.
        state: this rank's state.
        emit: called when ranks were healed: "healed" (step, ranks); on rank 0.
        grid: which ranks hold the same shard of the model: these are compared, and not healed.
    """

    def __init__(
        self,
        every: int,
        save_every: int,
        state: RunState,
        emit: Callable[..., None],
        grid: Grid,
    ) -> None:
        self._grid = grid
        self._every = every
        self._save_every = save_every
        self._state = state
        self._emit = emit
        self._hash = TensorHash()
        self._shard_hash = ShardHash(state.sharded, self._hash) if state.sharded else None
        self._script = next((part for part in state.parts if isinstance(part, ScriptState)), None)
        self._identical = state.progress.step  # latest step after which all ranks were identical

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        """Compare the replicas if it is due.

        Raises:
            AgreedError: no group of identical ranks is larger than all others, so the correct state
                is unknown; or ranks that hold the same shard of the optimizer's state differ.
        """
        if not self._due(loop):
            return
        step = loop.progress.step
        own = self._shard_hash.own() if self._shard_hash else b""
        buffers = self._hash(self._buffers()) if self._script else b""
        gathered = gather_bytes(self._digest() + buffers + own, "replicas")
        length = DIGEST_BYTES + len(buffers)
        digests = [theirs[:length] for theirs in gathered]
        if self._grid.replica_size > 1:
            record["state_hash"] = self._of_all_parts(digests, loop.topology, step)
            self._identical = step
            return
        if self._shard_hash is not None:
            differing = self._shard_hash.differing([theirs[length:] for theirs in gathered])
            if differing:
                message = _parts_differ(differing, loop.topology, step, self._identical)
                raise AgreedError(message, EXIT_CRASH, 0)
        majority = largest_group(digests)
        if majority is None:
            what = self._what_differs()
            message = _no_majority(what, digests, loop.topology, step, self._identical)
            # What only the script computes would differ again after a new start.
            raise AgreedError(message, EXIT_CRASH if _WEIGHTS in what else EXIT_USER, 0)
        damaged = [r for r in range(loop.topology.world_size) if r not in majority]
        if damaged:
            what = self._what_differs()
            intact = loop.topology.rank in majority
            self._heal(majority[0], keep_buffers=intact and self._script is None)
            if self._script is not None and not intact:
                self._script.restore()
            record["healed"] = damaged
            logger.warning(
                "step %d: %s of %s differed from the other ranks' and "
                "were healed from %s; gradients of the steps since %d may have been wrong%s",
                step,
                what,
                _names(damaged, loop.topology),
                _names(majority[:1], loop.topology),
                self._identical,
                "" if what == _WEIGHTS else f"; {_COMPUTED}",
            )
            self._emit("healed", step=step, ranks=damaged)
        self._identical = step
        whole = self._shard_hash.whole(self._state.compared()) if self._shard_hash else None
        record["state_hash"] = (whole or digests[majority[0]][:DIGEST_BYTES]).hex()

    def _of_all_parts(self, digests: Sequence[bytes], topology: Topology, step: int) -> str:
        """Return the hash of the whole state, if the holders of each shard agree.

        Raises:
            AgreedError: the holders of a shard differ.
        """
        for holders in self._grid.with_same_parameters:
            of_holders = [digests[rank] for rank in holders]
            if len({*of_holders}) > 1:
                most = [holders[place] for place in largest_group(of_holders) or ()]
                message = _parts_differ(holders, topology, step, self._identical, most)
                raise AgreedError(message, EXIT_CRASH, 0)
        return state_hash(self._state, self._hash)

    def _due(self, loop: Loop) -> bool:
        saved = self._save_every > 0 and loop.due(self._save_every)
        return loop.due(self._every) or saved or loop.ending

    def _digest(self) -> bytes:
        return self._hash(self._state.compared())

    def _buffers(self) -> dict[str, Tensor]:
        return ModelState(self._state.model).buffers()

    def _what_differs(self) -> str:
        """Name what differs between the ranks; every rank calls it."""
        if self._script is None:
            return _WEIGHTS
        others = [part for part in self._state.parts if part is not self._script]
        weights = {f"{p.name}/{name}": t for p in others for name, t in p.compared().items()}
        named = {_WEIGHTS: weights, **self._script.by_name()}
        named |= {f"the buffer {name}": {name: tensor} for name, tensor in self._buffers().items()}
        own = {name: self._hash(tensors).hex() for name, tensors in named.items()}
        theirs = gather_json(own, "replicas.parts")
        names = dict.fromkeys(name for digests in theirs for name in digests)
        found = [name for name in names if len({digests.get(name) for digests in theirs}) > 1]
        return ", ".join(found) or _WEIGHTS

    def _heal(self, root: int, keep_buffers: bool) -> None:
        """Broadcast `root`'s state to all ranks; undamaged ranks keep their own buffers."""
        buffers = list(self._state.model.buffers()) if keep_buffers else []
        kept = [buffer.clone() for buffer in buffers]
        self._state.broadcast(root)
        for buffer, own in zip(buffers, kept, strict=True):
            buffer.copy_(own)


def largest_group(digests: Sequence[bytes]) -> list[int] | None:
    """Return the ranks with the most frequent digest, or None if two digests are equally frequent.

    Two ranks are not damaged in the same way, so a group may be less than half of the ranks.
    """
    groups: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        groups.setdefault(digest, []).append(rank)
    largest, *others = sorted(groups.values(), key=len, reverse=True)
    return None if others and len(others[0]) == len(largest) else largest


def _no_majority(
    what: str, digests: Sequence[bytes], topology: Topology, step: int, identical: int
) -> str:
    groups = {d: [r for r, other in enumerate(digests) if other == d] for d in digests}
    groups_text = "; ".join(_names(ranks, topology) for ranks in groups.values())
    verb = "differ" if what == _WEIGHTS or ", " in what else "differs"
    return (
        f"step {step}: {what} {verb} between {len(groups)} groups of ranks "
        f"({groups_text}) and no group is the largest, so the correct state is unknown (they were "
        f"identical after step {identical}); {_NOT_SAVED if what == _WEIGHTS else _COMPUTED}"
    )


def _parts_differ(
    ranks: Sequence[int], topology: Topology, step: int, identical: int, most: Sequence[int] = ()
) -> str:
    """Args: most: the members of `ranks` that hold identical copies, if more than all others do."""
    differing = [rank for rank in ranks if rank not in most]
    who = (
        f"the copies of {_names(differing, topology)} differ from the majority, "
        f"{_names(most, topology)}"
        if most
        else f"{_names(ranks, topology)}: the correct copy is unknown"
    )
    return (
        f"step {step}: ranks hold different copies of a shard of the optimizer state or of the "
        f"parameters: {who} (they were identical after step {identical}); {_NOT_SAVED}"
    )


def _names(ranks: Sequence[int], topology: Topology) -> str:
    return ", ".join(f"rank {rank} on {topology.hosts[rank]}" for rank in ranks)
