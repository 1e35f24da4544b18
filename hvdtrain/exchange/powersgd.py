"""PowerSGD: gradients are sent as products of two thin matrices.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", arXiv:1905.13727. Here gradients are sums over the ranks, not means, and each rank's
residual is what its own share of the product omits: so the sum of all residuals is the error of the
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from hvdtrain.exchange.base import TrainedParameters, gradient_buckets
from hvdtrain.exchange.bucketed import (
    Bucket,
    BucketedExchange,
    flat_views,
    require_same_buckets,
    set_gradients,
)
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.state_part import Scope

# Noise that makes columns independent: relative to their largest element, far below its precision
# in float32; absolute for a column of zeros.
_NOISE, _TINY = 1e-12, 1e-30
_CACHED = 1 << 16  # elements that stay in a processor's cache


def powersgd_exchange(
    optimizer: Optimizer, model: nn.Module, config: ExchangeConfig
) -> BucketedExchange:
    """Send a gradient of two or more dimensions, as a matrix, as P times Q transposed.

    P (rows x rank) is summed over the ranks while backward still computes other layers; then P is
    made orthonormal, and Q (columns x rank) is summed. Q is the start of the next step's power
    iteration. Vectors, and matrices for which P and Q would not be smaller, are sent uncompressed;
    in the first `start_step` steps all gradients are. The result depends on the number of ranks by
    design. Each rank makes P orthonormal and multiplies by Q itself, with bitwise identical results
    on different processors (`orthonormal`, `product`).
    """

    trained = TrainedParameters(optimizer, model)
    groups = gradient_buckets(trained.in_order)
    buckets = [
        PowerSgdBucket(f"powersgd.{number}", group, config) for number, group in enumerate(groups)
    ]
    return BucketedExchange(trained, buckets, [_WarmStart(buckets)])


class _WarmStart:
    """The replicated part "powersgd": Q of each matrix, and the number of steps done."""

    name = "powersgd"
    scope: Scope = "replicated"

    def __init__(self, buckets: Sequence[PowerSgdBucket]) -> None:
        self._buckets = buckets

    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for number, bucket in enumerate(self._buckets):
            found[f"{number}/steps"] = bucket.steps
            found |= {f"{number}/q.{i}": q for i, q in enumerate(bucket.qs)}
        return found

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, saved: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise UserError if the tensors belong to other buckets."""
        if not saved:
            for bucket in self._buckets:
                bucket.start_over()
            return
        [tensors] = saved
        require_same_buckets(self.tensors(), tensors)
        for name, own in self.tensors().items():
            own.copy_(tensors[name])


class PowerSgdBucket(Bucket):
    """Bucket whose matrices are sent as P and Q.

    Attributes:
        qs: (columns, rank) of each matrix, after the last committed step.
        steps: number of committed steps.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], config: ExchangeConfig
    ) -> None:
        super().__init__(name, parameters, error_feedback=True)
        self._config = config
        self._gradient = torch.zeros_like(self.flat)
        self._gradient_of = flat_views(self._gradient, parameters)
        self._matrices = [p for p in parameters if _worth_it(p, config.rank)]
        self._others = [p for p in parameters if not _worth_it(p, config.rank)]
        self.qs = [self.flat.new_empty(p.numel() // len(p), config.rank) for p in self._matrices]
        self.steps = torch.tensor(0)
        self.start_over()
        self._new_qs = self._own_qs = self.qs
        self._ps: list[Tensor] = []
        self._sent = self._sent_qs = self.flat
        self._alone = True

    @property
    def _compresses(self) -> bool:
        return bool(self.steps >= self._config.start_step) and bool(self._matrices)

    def start_over(self) -> None:
        generator = torch.Generator().manual_seed(0)  # identical on all ranks
        for q in self.qs:
            q.copy_(torch.randn(q.shape, generator=generator, dtype=q.dtype))
        self.steps.zero_()

    @torch.no_grad()
    def send(self, alone: bool) -> None:
        """Send all P, and the uncompressed gradients; in the first steps the whole sum."""
        self._alone = alone
        if self._compresses:
            pairs = zip(self._matrices, self.qs, strict=True)
            ps = [_matrix(self.view_of[parameter]) @ q for parameter, q in pairs]
            self._sent = _joined([*ps, *(self.view_of[p] for p in self._others)])
        else:
            self._sent = self.flat.clone()
        if not alone:
            self.handle = begin_sum(self._sent, f"{self.name}.p")

    @torch.no_grad()
    def send_second_round(self) -> None:
        """Wait for the sum of all P, and send all Q."""
        if self.handle is not None:
            completed(self.handle)
        self.handle = None
        if not self._compresses:
            return
        shapes = [(len(p), self._config.rank) for p in self._matrices]
        *ps, _ = _split(self._sent, shapes)
        self._ps = orthonormal(ps)
        sums = (_matrix(self.view_of[p]) for p in self._matrices)
        self._own_qs = [m.t() @ p for m, p in zip(sums, self._ps, strict=True)]
        self._sent_qs = _joined(self._own_qs)
        if not self._alone:
            self.handle = begin_sum(self._sent_qs, f"{self.name}.q")

    @torch.no_grad()
    def receive(self) -> int:
        if self.handle is not None:
            completed(self.handle)
        sent = self._sent.nbytes
        if self._compresses:
            self._multiply()
            sent += self._sent_qs.nbytes
        else:
            self._gradient.copy_(self._sent)
            self.flat.zero_()
        set_gradients(self._gradient_of)
        return sent

    def _multiply(self) -> None:
        """Compute the gradient, P times Q transposed, and this rank's residual in `flat`."""
        self._new_qs = _split(self._sent_qs, [q.shape for q in self._own_qs])[:-1]
        products = zip(self._matrices, self._ps, self._own_qs, self._new_qs, strict=True)
        for parameter, p, own_q, q in products:
            product(p, q, out=_matrix(self._gradient_of[parameter]))
            omitted = _matrix(self.view_of[parameter]) - p @ own_q.t()
            self.view_of[parameter].copy_(omitted.view(parameter.shape))
        offset = sum(p.numel() for p in self._ps)
        for parameter in self._others:
            summed = self._sent[offset : offset + parameter.numel()]
            self._gradient_of[parameter].copy_(summed.view(parameter.shape))
            self.view_of[parameter].zero_()
            offset += parameter.numel()

    def commit(self, applied: bool) -> None:
        super().commit(applied)
        if not applied:
            return
        if self._compresses:
            torch._foreach_copy_(self.qs, self._new_qs)
        self.steps += 1


def _worth_it(parameter: Tensor, rank: int) -> bool:
    if parameter.dim() < 2:
        return False
    rows, columns = len(parameter), parameter.numel() // len(parameter)
    return (rows + columns) * rank < rows * columns


def _matrix(tensor: Tensor) -> Tensor:
    """Reshape to (first dimension, all others)."""
    return tensor.reshape(len(tensor), -1)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split into matrices of these shapes, and as the last item the remainder."""
    sizes = [rows * columns for rows, columns in shapes]
    *rows, remainder = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [*(row.view(*shape) for row, shape in zip(rows, shapes, strict=True)), remainder]


# Linear algebra with bitwise identical results on every processor. The summation order and the
# fusion of operations in libraries, including torch's own reductions, depend on the processor. Here
# each operation is a separate kernel of one correctly rounded addition, product, quotient or root
# for each element, in a fixed order (IEEE 754).


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
    noise = _noise(tuple(m.shape for m in matrices), columns.device)
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


@cache
def _noise(shapes: tuple[torch.Size, ...], device: torch.device) -> Tensor:
    """Fixed random numbers: (matrices, rank, rows), padded with zeros; each step uses them."""
    found = []
    for shape in shapes:
        # Uniform: normal random numbers need functions that processors round differently.
        generator = torch.Generator().manual_seed(0)
        found.append(torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.5))
    return pad_sequence(found, batch_first=True).transpose(1, 2).to(device)


def _sum(values: Tensor) -> Tensor:
    """Sum over the last dimension: add halves until one element is left."""
    while (size := values.shape[-1]) > 1:
        half = (size + 1) // 2
        first = values[..., :half].clone()
        first[..., : size - half] += values[..., half:]
        values = first
    return values.squeeze(-1)
