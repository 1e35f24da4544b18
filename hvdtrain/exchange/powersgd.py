"""PowerSGD: gradients are sent as products of two thin matrices.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", arXiv:1905.13727. Here gradients are sums over the ranks, not means, and each rank's
residual is what its own share of the product omits: so the sum of all residuals is the error of the
product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.bucketed import BucketedExchange, flat_views, receive_each
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.exchange.identical import orthonormal, product
from hvdtrain.exchange.residuals import Residuals, require_same_buckets
from hvdtrain.runtime.collectives import begin_sum, completed
from hvdtrain.runtime.state_part import Scope, StatePart


def powersgd_exchange(
    optimizer: Optimizer, model: nn.Module, config: ExchangeConfig
) -> BucketedExchange:
    """Send a gradient of two or more dimensions, as a matrix, as P times Q transposed.

    P (rows x rank) is summed over the ranks while backward still computes other layers; then P is
    made orthonormal, and Q (columns x rank) is summed. Q is the start of the next step's power
    iteration. Vectors, and matrices for which P and Q would not be smaller, are sent uncompressed;
    in the first `start_step` steps all gradients are. The result depends on the number of ranks by
    design. Each rank makes P orthonormal and multiplies by Q itself, with bitwise identical results
    on different processors (identical.py).
    """

    def make(number: int, parameters: Sequence[nn.Parameter]) -> _Bucket:
        return _Bucket(f"powersgd.{number}", parameters, config)

    def parts(buckets: Sequence[_Bucket]) -> list[StatePart]:
        owed = Residuals([bucket.residual for bucket in buckets])
        return [_WarmStart(buckets), *([owed] if config.error_feedback else [])]

    return BucketedExchange(optimizer, model, make, parts, receive=_receive)


def _receive(buckets: Sequence[_Bucket]) -> int:
    """Send each bucket's Q when its P has arrived, while later buckets may still be in transfer."""
    for bucket in buckets:
        bucket.answer()
    return receive_each(buckets)


class _WarmStart:
    """The replicated part "powersgd": Q of each matrix, and the number of steps done."""

    name = "powersgd"
    scope: Scope = "replicated"

    def __init__(self, buckets: Sequence[_Bucket]) -> None:
        self._buckets = buckets

    def tensors(self) -> dict[str, Tensor]:
        found = {}
        for number, bucket in enumerate(self._buckets):
            found[f"{number}/steps"] = bucket.steps
            found |= {f"{number}/q.{i}": q for i, q in enumerate(bucket.qs)}
        return found

    def compared(self) -> dict[str, Tensor]:
        return self.tensors()

    def load(self, pieces: Sequence[Mapping[str, Tensor]]) -> None:
        """Raise UserError if the tensors belong to other buckets."""
        if not pieces:
            for bucket in self._buckets:
                bucket.start_over()
            return
        [tensors] = pieces
        require_same_buckets(self.tensors(), tensors)
        for name, own in self.tensors().items():
            own.copy_(tensors[name])


class _Bucket:
    """See bucketed.Bucket.

    Args:
        name: of the bucket's all-reduces.

    Attributes:
        qs: (columns, rank) of each matrix, after the last committed step.
        steps: number of committed steps.
        residual: (n,), error feedback; like `qs` and `steps` it changes when a step is committed.
    """

    def __init__(
        self, name: str, parameters: Sequence[nn.Parameter], config: ExchangeConfig
    ) -> None:
        numel, device = sum(p.numel() for p in parameters), parameters[0].device
        wide = torch.float64 if parameters[0].dtype == torch.float64 else torch.float32
        self._name = name
        self._config = config
        self.residual = torch.zeros(numel, dtype=wide, device=device)
        self._sum = torch.zeros_like(self.residual)
        self._sum_of = flat_views(self._sum, parameters)
        self._gradient = torch.zeros_like(self.residual)
        self._gradient_of = flat_views(self._gradient, parameters)
        self._matrices = [p for p in parameters if _worth_it(p, config.rank)]
        self._others = [p for p in parameters if not _worth_it(p, config.rank)]
        self.qs = [
            torch.empty(p.numel() // len(p), config.rank, dtype=wide, device=device)
            for p in self._matrices
        ]
        self.steps = torch.tensor(0)
        self.start_over()
        self._new_qs = self._own_qs = self.qs
        self._ps: list[Tensor] = []
        self._sent = self._sent_qs = self._sum
        self._several = False
        self._handle: int | None = None

    @property
    def _compresses(self) -> bool:
        return bool(self.steps >= self._config.start_step) and bool(self._matrices)

    def start_over(self) -> None:
        generator = torch.Generator().manual_seed(0)  # identical on all ranks
        for q in self.qs:
            q.copy_(torch.randn(q.shape, generator=generator, dtype=q.dtype))
        self.steps.zero_()

    def begin(self) -> None:
        self._sum.copy_(self.residual)
        self._handle = None

    @torch.no_grad()
    def arrived(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self._sum_of[parameter].add_(gradient)

    @torch.no_grad()
    def send(self, several: bool) -> None:
        """Send all P, and the uncompressed gradients; in the first steps the whole sum."""
        self._several = several
        if self._compresses:
            pairs = zip(self._matrices, self.qs, strict=True)
            ps = [_matrix(self._sum_of[parameter]) @ q for parameter, q in pairs]
            self._sent = _joined([*ps, *(self._sum_of[p] for p in self._others)])
        else:
            self._sent = self._sum.clone()
        if several:
            self._handle = begin_sum(self._sent, f"{self._name}.p")

    @torch.no_grad()
    def answer(self) -> None:
        """Send all Q, when P has arrived."""
        if self._handle is not None:
            completed(self._handle)
        self._handle = None
        if not self._compresses:
            return
        shapes = [(len(p), self._config.rank) for p in self._matrices]
        *ps, _ = _parted(self._sent, shapes)
        self._ps = orthonormal(ps)
        sums = (_matrix(self._sum_of[p]) for p in self._matrices)
        self._own_qs = [m.t() @ p for m, p in zip(sums, self._ps, strict=True)]
        self._sent_qs = _joined(self._own_qs)
        if self._several:
            self._handle = begin_sum(self._sent_qs, f"{self._name}.q")

    @torch.no_grad()
    def receive(self) -> int:
        if self._handle is not None:
            completed(self._handle)
        sent = self._sent.nbytes
        if self._compresses:
            self._multiply()
            sent += self._sent_qs.nbytes
        else:
            self._gradient.copy_(self._sent)
            self._sum.zero_()
        for parameter, view in self._gradient_of.items():
            parameter.grad = view.to(parameter.dtype)
        return sent

    def _multiply(self) -> None:
        """Compute the gradient, P times Q transposed, and this rank's residual in `_sum`."""
        self._new_qs = _parted(self._sent_qs, [q.shape for q in self._own_qs])[:-1]
        products = zip(self._matrices, self._ps, self._own_qs, self._new_qs, strict=True)
        for parameter, p, own_q, q in products:
            product(p, q, out=_matrix(self._gradient_of[parameter]))
            owed = _matrix(self._sum_of[parameter]) - p @ own_q.t()
            self._sum_of[parameter].copy_(owed.view(parameter.shape))
        offset = sum(p.numel() for p in self._ps)
        for parameter in self._others:
            part = self._sent[offset : offset + parameter.numel()]
            self._gradient_of[parameter].copy_(part.view(parameter.shape))
            self._sum_of[parameter].zero_()
            offset += parameter.numel()

    def commit(self, applied: bool) -> None:
        # A skipped step changes nothing.
        if not applied:
            return
        if self._config.error_feedback:
            self.residual.copy_(self._sum)
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


def _parted(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Split into matrices of these shapes, and as the last item the remainder."""
    sizes = [rows * columns for rows, columns in shapes]
    *parts, rest = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [*(part.view(*shape) for part, shape in zip(parts, shapes, strict=True)), rest]
