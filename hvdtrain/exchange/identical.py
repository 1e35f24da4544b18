"""Linear algebra with bitwise identical results on every processor.

The summation order and the fusion of operations in libraries, including torch's own reductions,
depend on the processor. Here each operation is a separate kernel of one correctly rounded addition,
product, quotient or root for each element, in a fixed order (IEEE 754).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Noise that makes columns independent: relative to their largest element, far below its precision
# in float32; absolute for a column of zeros.
_NOISE, _TINY = 1e-12, 1e-30
_CACHED = 1 << 16  # elements that stay in a processor's cache


def orthonormal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormal columns that span the columns of each (rows, rank) matrix, on one device.

    Gram-Schmidt in float64, twice. A column that depends on earlier ones is replaced by an
    arbitrary one.
    """
    if not matrices:
        return []
    # (matrices, rank, rows); the zero padding of a shorter matrix stays zero.
    columns = pad_sequence([m.double() for m in matrices], batch_first=True).transpose(1, 2)
    columns = columns.contiguous()
    noise = pad_sequence([_noise(m) for m in matrices], batch_first=True).transpose(1, 2)
    largest = columns.abs().amax(dim=2, keepdim=True)
    columns.add_(noise * (largest * _NOISE + _TINY))
    for i in range(columns.shape[1]):
        column = columns[:, i]
        for _ in range(2):
            factors = _sum(columns[:, :i] * column.unsqueeze(1))
            for j in range(i):
                column.sub_(factors[:, j : j + 1] * columns[:, j])
        column.div_(_sum(column * column).sqrt().unsqueeze(1))
    return [
        found[:, : len(m)].t().to(m.dtype)
        for m, found in zip(matrices, columns.unbind(), strict=True)
    ]


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write left (rows, rank) times right (columns, rank) transposed to `out` (rows, columns)."""
    rows_of_right = right.t().contiguous()
    # On a GPU, passes over memory cost less than kernel launches.
    size = len(out) if out.is_cuda else max(1, _CACHED // max(1, out.shape[1]))
    for own, target in zip(left.split(size), out.split(size), strict=True):
        torch.mul(own[:, :1], rows_of_right[0], out=target)
        for i in range(1, len(rows_of_right)):
            target.add_(own[:, i : i + 1] * rows_of_right[i])


def _noise(matrix: Tensor) -> Tensor:
    # Uniform: normal random numbers need functions that processors round differently.
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(matrix.shape, generator=generator, dtype=torch.float64)
    return uniform.sub_(0.5).to(matrix.device)


def _sum(values: Tensor) -> Tensor:
    """Sum over the last dimension: add halves until one element is left."""
    while (size := values.shape[-1]) > 1:
        half = (size + 1) // 2
        first = values[..., :half].clone()
        first[..., : size - half] += values[..., half:]
        values = first
    return values.squeeze(-1)
