"""The hash that compares replicas detects every flipped bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvdtrain.engine.callbacks.replicas import largest_group
from hvdtrain.engine.integrity import _BLOCK, DIGEST_BYTES, TensorHash, whole_sums
from hvdtrain.runtime.tensor_shards import ShardPosition

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def _tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _flip(tensor: Tensor, bit: int) -> None:
    data = tensor.view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_detects_every_flipped_bit(dtype: torch.dtype) -> None:
    hashed, tensor = TensorHash(), _tensor(dtype, 5)
    expected = hashed({"a": tensor})
    for bit in range(tensor.numel() * tensor.element_size() * 8):
        if dtype is torch.bool and bit % 8:
            continue  # torch treats any nonzero byte as true
        _flip(tensor, bit)
        assert hashed({"a": tensor}) != expected, bit
        _flip(tensor, bit)
    assert hashed({"a": tensor}) == expected and len(expected) == DIGEST_BYTES


def test_hash_detects_flips_in_later_blocks_and_in_two_words() -> None:
    hashed, tensor = TensorHash(), torch.zeros(2 * _BLOCK + 3)
    expected = hashed({"a": tensor})
    for word in (_BLOCK - 1, _BLOCK, 2 * _BLOCK, 2 * _BLOCK + 2):
        _flip(tensor, 32 * word + 31)  # the highest bits of two words must not cancel
        assert hashed({"a": tensor}) != expected
    _flip(tensor, 31)
    assert hashed({"a": tensor}) != expected


def test_hash_detects_swapped_elements_blocks_and_tensors() -> None:
    hashed = TensorHash()
    tensor = torch.arange(2.0 * _BLOCK)
    seen = {
        hashed({"a": tensor}),
        hashed({"a": tensor.roll(1)}),
        hashed({"a": tensor.roll(_BLOCK)}),
        hashed({"a": tensor.view(2, -1)}),
        hashed({"b": tensor}),
        hashed({"a": tensor, "b": torch.zeros(2)}),
        hashed({"a": torch.zeros(2), "b": tensor}),
    }
    assert len(seen) == 7


def test_hash_depends_on_bits_and_not_on_memory_layout() -> None:
    tensor = torch.randn(6, 7)
    tensor[2, 3] = float("nan")
    tensors = {"a": tensor, "scalar": torch.tensor(3.0), "empty": torch.empty(0)}
    turned = {
        "a": tensor.t().contiguous().t(),
        **{k: tensors[k].clone() for k in tensors if k != "a"},
    }
    assert not turned["a"].is_contiguous()
    assert TensorHash()(tensors) == TensorHash()(turned)
    assert TensorHash()({"a": torch.tensor(0.0)}) != TensorHash()({"a": torch.tensor(-0.0)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shard_hashes_add_up_to_the_whole_and_detect_a_flipped_bit(
    dtype: torch.dtype,
) -> None:
    hashed, shape = TensorHash(), (5, 3, _BLOCK // 3 + 7)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = hashed({"a": tensor})
    half = shape[2] // 2
    boxes = [
        [((0, 0, 0), tensor[:2]), ((2, 0, 0), tensor[2:]), ((5, 0, 0), tensor[5:])],
        [((0, 0, 0), tensor[:, :2]), ((0, 2, 0), tensor[:, 2:])],
        [((0, 0, 0), tensor[..., :half]), ((0, 0, half), tensor[..., half:])],
    ]
    for parts in boxes:
        sums = [{"a": hashed.shard(part, ShardPosition(shape, offsets=at))} for at, part in parts]
        assert hashed({}, whole_sums(sums)) == expected
    _flip(tensor, 16 * tensor.numel() - 2)
    sums = [{"a": hashed.shard(part, ShardPosition(shape, offsets=at))} for at, part in boxes[2]]
    assert hashed({}, whole_sums(sums)) == hashed({"a": tensor}) != expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_hash_is_the_same_on_cpu_and_gpu() -> None:
    tensors = {"a": torch.randn(_BLOCK + 5), "b": torch.randn(3).bfloat16()}
    hashed = TensorHash()
    assert hashed({k: t.cuda() for k, t in tensors.items()}) == hashed(tensors)


GROUPS = {
    "aaa": [0, 1, 2],
    "aba": [0, 2],
    "baa": [1, 2],
    "abca": [0, 3],
    "ab": None,
    "abc": None,
    "aabb": None,
    "aabbc": None,
}


@pytest.mark.parametrize("digests", GROUPS)
def test_largest_group_wins_and_a_tie_is_undecided(digests: str) -> None:
    assert largest_group([d.encode() for d in digests]) == GROUPS[digests]
