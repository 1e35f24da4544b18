"""Piece of a whole tensor that a rank holds.

A tensor that is split is a DTensor: each dimension of its mesh shards one of its dimensions or
replicates it. Shard divides as `torch.chunk` does: pieces of ceil(size / ranks), the last ones
smaller or empty.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hvdtrain.runtime.parts import local
from hvdtrain.runtime.pieces import Piece


def piece(tensor: Tensor) -> tuple[Piece, Tensor]:
    """Return the place of this rank's piece of `tensor`, and the piece, in the same memory.

    A plain tensor is one piece.

    Args:
        tensor: a parameter, buffer, gradient or entry of an optimizer's state; if a DTensor, with
            placements Shard, FSDP2's strided Shard, and Replicate.

    Raises:
        ValueError: this rank is not in the tensor's mesh, or the tensor is still to be summed over
            ranks.
    """
    part = local(tensor)
    if not isinstance(tensor, DTensor):
        return Piece((*part.shape,), offsets=(0,) * part.dim()), part
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        raise ValueError("this rank is not in the tensor's mesh")
    sizes = tuple(tensor.device_mesh.shape)
    offsets, lengths = extent(tuple(tensor.shape), sizes, tuple(place), tensor.placements)
    assert tuple(part.shape) == lengths, f"{tuple(part.shape)} is not {lengths}"
    return Piece((*tensor.shape,), offsets=offsets), part


def extent(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    place: tuple[int, ...],
    placements: Iterable[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offsets, lengths) of the piece of a tensor of `shape` that stands at `place` in a mesh.

    Args:
        mesh: sizes of its dimensions, each with one of `placements`.

    Raises:
        ValueError: a placement does not determine a piece of the tensor.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for dim, placement in _in_order(list(placements)):
        along = _sharded_dimension(placement)
        if along is None:
            continue
        chunk = -(-lengths[along] // mesh[dim])
        begin = min(place[dim] * chunk, lengths[along])
        offsets[along] += begin
        lengths[along] = min(chunk, lengths[along] - begin)
    return tuple(offsets), tuple(lengths)


def _in_order(placements: list[Placement]) -> list[tuple[int, Placement]]:
    """(dimension of the mesh, placement) in the order in which the tensor was split.

    Strided shards of FSDP2, which splits what tensor parallelism has split, come after the shards
    that follow them.
    """
    numbered = list(enumerate(placements))
    strided = [pair for pair in numbered if hasattr(pair[1], "split_factor")]
    return [pair for pair in numbered if pair not in strided] + strided[::-1]


def _sharded_dimension(placement: Placement) -> int | None:
    if placement.is_partial():
        raise ValueError("the tensor is yet to be summed over ranks")
    return None if placement.is_replicate() else placement.dim  # type: ignore[attr-defined]


def holders(tensor: Tensor, mesh: DeviceMesh) -> int:
    """Number of ranks that hold the same piece of `tensor` as this rank, including this one.

    Args:
        mesh: of the ranks that hold the tensor or pieces of it (the ranks of one pipeline stage of
            one replica), with named dimensions; a DTensor's mesh is this or a part of it.
    """
    number = 1
    for size in _sizes_of_copies(tensor, mesh).values():
        number *= size
    return number


def holders_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Mesh of the replica's ranks that hold the same layers; None: only this rank."""
    assert mesh.mesh_dim_names is not None
    names = tuple(name for name in mesh.mesh_dim_names if name != "pipeline")
    return mesh[names] if names else None


def is_first_holder(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether this rank is the first of the ranks that hold the same piece, see `holders`."""
    return all(mesh.get_local_rank(name) == 0 for name in _sizes_of_copies(tensor, mesh))


def _sizes_of_copies(tensor: Tensor, mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the dimensions of `mesh` along which all ranks hold the same piece."""
    names = mesh.mesh_dim_names
    assert names is not None, "the mesh's dimensions have no names"
    split = set()
    if isinstance(tensor, DTensor):
        own = tensor.device_mesh.mesh_dim_names or ()
        assert set(own) <= set(names), f"{own} are not dimensions of {names}"
        split = {
            name
            for name, placement in zip(own, tensor.placements, strict=True)
            if _sharded_dimension(placement) is not None
        }
    return {name: mesh.size(dim) for dim, name in enumerate(names) if name not in split}
