"""A hash of tensors that finds any flipped bit, computed where the tensors are.

Multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", The
Computer Journal 57, 2014): the sum of 32-bit words x_i times random 64-bit w_i, modulo
2^64. Here every w_i is odd, so that a change of one word, by less than 2^32, always
changes the sum; changes of several words cancel with a probability of at most 2^-32.
Each block of words has a sum of its own, and the sums go into a SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import Tensor

# Words of a block: its products are 2 MiB, which the caches of a core hold.
_BLOCK = 1 << 18
# Blocks in one launch on other devices than CPUs, for which launches are what costs.
_AT_ONCE = 64
DIGEST_BYTES = 32


class TensorHash:
    """Keeps the random weights, one copy a device."""

    def __init__(self) -> None:
        # The same on every rank, so made on the CPU, whatever device the rank has.
        generator = torch.Generator().manual_seed(0x9E3779B9)
        low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
        weights = torch.randint(low, high, (_BLOCK,), generator=generator) | 1
        self._weights = {weights.device: weights}

    @torch.no_grad()
    def __call__(self, tensors: dict[str, Tensor]) -> bytes:
        """`DIGEST_BYTES` of names, shapes, dtypes and bits; equal NaNs are equal.

        Args:
            tensors: of any dtype, on any devices.
        """
        names = sorted(tensors)
        described = [[name, list(tensors[name].shape), str(tensors[name].dtype)] for name in names]
        digest = hashlib.sha256(json.dumps(described).encode())
        sums: dict[torch.device, list[Tensor]] = {}
        for name in names:
            weights = self._on(tensors[name].device)
            sums.setdefault(weights.device, []).extend(_block_sums(_words(tensors[name]), weights))
        for device in sorted(sums, key=str):  # one transfer from each
            digest.update(torch.cat(sums[device]).cpu().numpy().astype("<i8").tobytes())
        return digest.digest()

    def _on(self, device: torch.device) -> Tensor:
        if device not in self._weights:
            self._weights[device] = self._weights[torch.device("cpu")].to(device)
        return self._weights[device]


def _block_sums(words: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """The sums of the blocks of `words` in order, as int64 tensors of any length."""
    at_once = 1 if words.device.type == "cpu" else _AT_ONCE
    whole = len(words) // _BLOCK * _BLOCK
    for blocks in (*words[:whole].view(-1, _BLOCK).split(at_once), words[None, whole:]):
        yield blocks.to(torch.int64).mul_(weights[: blocks.shape[1]]).sum(dim=1)


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as int32 of shape (n,), the last word filled up with zeros."""
    data = tensor.contiguous().view(-1)
    if data.element_size() % 4:
        data = data.view(torch.uint8)
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    return data.view(torch.int32)
