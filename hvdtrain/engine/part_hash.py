"""Hashes of a state, also of one that ranks hold in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor

from hvdtrain.engine.state import RunState
from hvdtrain.engine.tensor_hash import DIGEST_BYTES, PieceSums, TensorHash, whole_sums
from hvdtrain.parallel.zero_state import ShardedOptimizerState
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.pieces import Piece


class PartHash:
    """Compares the ranks that hold the same part, and hashes what all hold together."""

    def __init__(self, sharded: ShardedOptimizerState, of_tensors: TensorHash) -> None:
        self._sharded = sharded
        self._hash = of_tensors

    def own(self) -> bytes:
        """A digest of each part that this rank holds; as many on each rank."""
        digests = []
        for number, tensors in self._sharded.held().items():
            # What its first holder made of a part has replaced what this one made of it.
            differs = self._sharded.optimizer.differs(number)
            digests.append(self._hash(tensors)[:-1] + bytes([differs]))
        return b"".join(digests)

    def differing(self, digests: Sequence[bytes]) -> list[int]:
        """The ranks that hold some part otherwise than another one does.

        Args:
            digests: of each rank, what `own` gave there.
        """
        dealing, found = self._sharded.optimizer.dealing, set[int]()
        for number, ranks in enumerate(dealing.holders):
            seen = set()
            for rank in ranks:
                start = dealing.parts_of(rank).index(number) * DIGEST_BYTES
                seen.add(digests[rank][start : start + DIGEST_BYTES])
            if len(seen) > 1:
                found.update(ranks)
        return sorted(found)

    def whole(self, replicated: Mapping[str, Tensor]) -> bytes:
        """The digest that the state has where no part of it is spread; every rank calls it.

        Args:
            replicated: the other tensors.
        """
        name, pieces = self._sharded.name, self._sharded.pieces()
        own = {
            f"{name}/{key}": (t, pieces.get(key) or Piece((*t.shape,), 0))
            for key, t in self._sharded.tensors().items()
        }
        return whole_digest(self._hash, own, replicated)


def state_hash(state: RunState, of_tensors: TensorHash) -> str:
    """The hash of parameters and optimizer state, however ranks hold them; every rank calls it."""
    if state.spanned:
        return whole_digest(of_tensors, state.saved_pieces()).hex()
    if state.sharded is not None:
        return PartHash(state.sharded, of_tensors).whole(state.compared()).hex()
    return of_tensors(state.compared()).hex()


def whole_digest(
    of_tensors: TensorHash,
    own: Mapping[str, tuple[Tensor, Piece]],
    replicated: Mapping[str, Tensor] | None = None,
) -> bytes:
    """The digest that tensors have where nothing of them is spread; every rank calls it.

    Args:
        own: the pieces of this rank, and where they lie; each element is in that of one rank.
        replicated: tensors that all ranks hold.
    """
    sums = {name: asdict(of_tensors.piece(*each)) for name, each in own.items()}
    told = gather_json(sums, "replicas.parts")
    spread = whole_sums({n: PieceSums(**s) for n, s in theirs.items()} for theirs in told)
    return of_tensors(replicated or {}, spread)
