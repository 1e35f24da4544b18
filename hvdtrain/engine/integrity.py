"""Hashes of a run's state, also if ranks hold it in shards.

TensorHash detects any single bit flip, and computes on the device that holds the tensors. It uses
multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", The
Computer Journal 57, 2014): the sum of 32-bit words x_i times random 64-bit w_i, modulo
2^64. Here every w_i is odd, so that a change of one word, by less than 2^32, always
changes the sum; changes of several words cancel with a probability of at most 2^-32.
Each block of words has its own sum, and a SHA-256 is computed over the sums.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import prod

import torch
from torch import Tensor

from hvdtrain.parallel.zero_state import ShardedOptimizerState
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.state_part import Saved
from hvdtrain.runtime.tensor_shards import ShardPosition, flattened

# Words of a block: its products are 2 MiB, which fit into the caches of a core.
_BLOCK = 1 << 18
# Blocks in one kernel launch on devices other than CPUs, where launches dominate the cost.
_AT_ONCE = 64
DIGEST_BYTES = 32
SKETCH = 32  # numbers in a sketch, see TensorHash.sketch


class ShardHash:
    """Compare the ranks that hold the same shard, and hash the state of all ranks together."""

    def __init__(self, sharded: ShardedOptimizerState, of_tensors: TensorHash) -> None:
        self._sharded = sharded
        self._hash = of_tensors

    def own(self) -> bytes:
        """Digests of the shards that this rank holds; equally many on each rank."""
        digests = []
        for shard, tensors in self._sharded.held().items():
            # The first holder's update of a shard has overwritten this rank's update of it.
            differs = self._sharded.optimizer.differs(shard)
            digests.append(self._hash(tensors)[:-1] + bytes([differs]))
        return b"".join(digests)

    def differing(self, digests: Sequence[bytes]) -> list[int]:
        """Return the ranks that hold a shard on which the holders differ.

        Args:
            digests: result of `own` on each rank.
        """
        shard_map, found = self._sharded.optimizer.shard_map, set[int]()
        for shard, ranks in enumerate(shard_map.holders):
            seen = set()
            for rank in ranks:
                start = shard_map.shards_of(rank).index(shard) * DIGEST_BYTES
                seen.add(digests[rank][start : start + DIGEST_BYTES])
            if len(seen) > 1:
                found.update(ranks)
        return sorted(found)

    def whole(self, replicated: Mapping[str, Tensor]) -> bytes:
        """Digest that the unsharded state would have; every rank calls it.

        Args:
            replicated: the other tensors.
        """
        name = self._sharded.name
        own = {
            f"{name}/{key}": Saved(t, position or ShardPosition((*t.shape,), 0))
            for key, (t, position) in self._sharded.saved().items()
        }
        return whole_digest(self._hash, own, replicated)


def whole_digest(
    of_tensors: TensorHash,
    own: Mapping[str, Saved],
    replicated: Mapping[str, Tensor] | None = None,
) -> bytes:
    """Digest that the unsharded tensors would have; every rank calls it.

    Args:
        own: the shards that this rank saves; each has a position.
        replicated: tensors that all ranks hold.
    """
    sums = {name: asdict(of_tensors.shard(*each)) for name, each in own.items()}
    sums_of_ranks = gather_json(sums, "replicas.shards")
    spread = whole_sums({n: ShardSums(**s) for n, s in theirs.items()} for theirs in sums_of_ranks)
    return of_tensors(replicated or {}, spread)


@cache  # every generation of an elastic run needs them
def _random_weights() -> Tensor:
    # Identical on every rank, so generated on the CPU, whatever device the rank has.
    generator = torch.Generator().manual_seed(0x9E3779B9)
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(low, high, (_BLOCK,), generator=generator) | 1


class TensorHash:
    """Hash tensors with random weights, of which each device holds a copy."""

    def __init__(self) -> None:
        weights = _random_weights()
        self._weights = {weights.device: weights}
        self._signs: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def __call__(
        self, tensors: Mapping[str, Tensor], spread: Mapping[str, ShardSums] | None = None
    ) -> bytes:
        """`DIGEST_BYTES` of names, shapes, dtypes and bits; equal NaNs are equal.

        Args:
            tensors: tensors of any dtype on any devices.
            spread: additional tensors that are spread over several ranks: the sums of all their
                blocks, see `whole_sums`. The digest is the whole tensors' digest.
        """
        others = spread or {}
        names = sorted({*tensors, *others})
        described = [
            [name, list(t.shape), str(t.dtype)]
            if (t := tensors.get(name)) is not None
            else [name, others[name].shape, others[name].dtype]
            for name in names
        ]
        digest = hashlib.sha256(json.dumps(described).encode())
        sums: dict[str, list[Tensor]] = {}
        for name in names:
            if name in others:
                known = others[name]
                sums.setdefault(known.device, []).append(torch.tensor(known.sums))
                continue
            weights = self._on(tensors[name].device)
            of_device = sums.setdefault(weights.device.type, [])
            of_device.extend(_block_sums(_words(tensors[name]), weights))
        for device in sorted(sums):  # one transfer from each
            on_one = [part.cpu() for part in sums[device]] if others else sums[device]
            digest.update(torch.cat(on_one).cpu().numpy().astype("<i8").tobytes())
        return digest.digest()

    @torch.no_grad()
    def sums(self, tensor: Tensor) -> Tensor:
        """Sums of a whole tensor's blocks, int64 and on its device, as in ShardSums."""
        return torch.cat([*_block_sums(_words(tensor), self._on(tensor.device))])

    @torch.no_grad()
    def sketch(self, tensor: Tensor) -> Tensor:
        """Sums of a tensor's elements with random signs, (SKETCH,) float64, on its device."""
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        if flat.device not in self._signs:
            signs = self._on(flat.device).sign().double()
            self._signs[flat.device] = signs.view(-1, SKETCH)
        signs = self._signs[flat.device]
        total = torch.zeros(SKETCH, dtype=torch.float64, device=flat.device)
        for part in flat.split(_BLOCK):
            rows = torch.nn.functional.pad(part.double(), (0, -len(part) % SKETCH))
            total += rows.view(-1, SKETCH).mul_(signs[: -(-len(part) // SKETCH)]).sum(dim=0)
        return total

    @torch.no_grad()
    def shard(self, tensor: Tensor, position: ShardPosition | None) -> ShardSums:
        """Return the contribution of a shard of a larger tensor to the tensor's sums."""
        assert position is not None
        weights, size = self._on(tensor.device), tensor.element_size()
        number = -(-prod(position.shape) * size // 4) // _BLOCK + 1
        sums = torch.zeros(number, dtype=torch.int64, device=tensor.device)
        for start, flat in _flat_shards(tensor, position):
            first, before = divmod(start * size, 4 * _BLOCK)
            # A sum is linear in the bits of its words: zeros replace what others hold of a block.
            data = flat.view(torch.uint8)
            data = torch.nn.functional.pad(data, (before, -(before + len(data)) % 4))
            found = torch.cat([*_block_sums(data.view(torch.int32), weights)])
            # If the shard ends at a block's end, an extra sum over nothing follows.
            sums[first : first + len(found)] += found[: number - first]
        return ShardSums([*position.shape], str(tensor.dtype), tensor.device.type, sums.tolist())

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        return self._weights[device]


@dataclass(frozen=True)
class ShardSums:
    """Contribution of one shard of a tensor to the sums of the tensor's blocks; JSON serializable.

    Args:
        shape, dtype: shape and dtype of the whole tensor.
        device: type of the device.
        sums: sums of all blocks; int64 with the bits of the unsigned sums.
    """

    shape: list[int]
    dtype: str
    device: str
    sums: list[int]


def whole_sums(shards: Iterable[Mapping[str, ShardSums]]) -> dict[str, ShardSums]:
    """Sums of whole tensors, by name, from each rank's shards."""
    found: dict[str, ShardSums] = {}
    for of_rank in shards:
        for name, sums in of_rank.items():
            known = found.get(name)
            if known is not None:
                added = torch.tensor(known.sums) + torch.tensor(sums.sums)
                sums = replace(sums, sums=added.tolist())
            found[name] = sums
    return found


def _flat_shards(tensor: Tensor, position: ShardPosition) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, elements) of flat shards; zeros for the elements in between."""
    offsets, inner = position.offsets, position.shape[1:]
    width = prod(inner)
    if not offsets or tuple(tensor.shape[1:]) == inner:
        yield position.start or (offsets[0] * width if offsets else 0), tensor.reshape(-1)
        return
    columns = [slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True)][1:]
    place = slice(None), *columns
    rows = max(1, _AT_ONCE * _BLOCK // width)
    for begin in range(0, len(tensor), rows):
        some = tensor[begin : begin + rows]
        filled = some.new_zeros(len(some), *inner)
        filled[place] = some
        yield (offsets[0] + begin) * width, filled.view(-1)


def _block_sums(words: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """Sums of the blocks of `words` in order, as int64 tensors of any length."""
    at_once = 1 if words.device.type == "cpu" else _AT_ONCE
    whole = len(words) // _BLOCK * _BLOCK
    for blocks in (*words[:whole].view(-1, _BLOCK).split(at_once), words[None, whole:]):
        yield blocks.to(torch.int64).mul_(weights[: blocks.shape[1]]).sum(dim=1)


def _words(tensor: Tensor) -> Tensor:
    """Bits of a tensor as int32 of shape (n,), the last word padded with zeros."""
    data = flattened(tensor)
    if data.element_size() % 4:
        data = data.view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    return data.view(torch.int32)
