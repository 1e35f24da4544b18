"""Adasum of the ranks' gradients against the paper's formula (arXiv:2006.02924)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.exchange.adasum import adasum_exchange
from hvdtrain.exchange.bucketed import BucketedExchange
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.init import controller
from hvdtrain.runtime.mesh import Topology


@pytest.fixture(autouse=True)
def _only_over_mpi(topology: Topology) -> None:
    if topology.world_size > 1 and controller() != "mpi":
        pytest.skip("Horovod has Adasum over MPI only")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.zeros(7, 11))
        self.alike = nn.Parameter(torch.zeros(5))
        self.apart = nn.Parameter(torch.zeros(64))
        self.lonely = nn.Parameter(torch.zeros(3))
        images = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        self.images = nn.Parameter(images)
        self.wide = nn.Parameter(torch.zeros(9, dtype=torch.float64))


def _gradients(rank: int) -> dict[str, Tensor]:
    """Return a rank's gradient of each parameter of Model."""
    generator = torch.Generator().manual_seed(rank)
    apart = torch.zeros(64)
    apart[rank] = 1.0 + rank
    return {
        "odd": torch.randn(7, 11, generator=generator),
        "alike": torch.arange(5.0),
        "apart": apart,
        "lonely": torch.ones(3) if rank == 0 else torch.zeros(3),
        "images": torch.randn(4, 3, 2, 2, generator=generator),
        "wide": torch.randn(9, generator=generator).double(),
    }


def _adasum(gradients: list[Tensor]) -> Tensor:
    """Combine pairs of neighbors, then pairs of pairs."""
    if len(gradients) == 1:
        return gradients[0]
    pairs = zip(gradients[::2], gradients[1::2], strict=True)
    return _adasum([_pair(a.double(), b.double()) for a, b in pairs])


def _pair(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
    return (1 - (dot / aa / 2 if aa else 0)) * a + (1 - (dot / bb / 2 if bb else 0)) * b


def _step(exchange: BucketedExchange, model: Model, own: dict[str, Tensor], ranks: int) -> None:
    """Run a step in two micro-batches, each divided by the number of all ranks', as the engine
    does."""
    exchange.begin(2)
    for _ in range(2):
        products = [(p * own[name]).sum().double() for name, p in model.named_parameters()]
        (torch.stack(products).sum() / (2 * ranks)).backward()
    exchange.reduce()


def test_adasum_equals_the_formula_of_the_paper(topology: Topology) -> None:
    ranks, model = topology.world_size, Model()
    exchange = adasum_exchange(build_optimizer(OptimConfig(), model), model)
    every = [_gradients(rank) for rank in range(ranks)]
    for factor in (1.0, 3.0):  # no state of the previous step is left
        own = {name: factor * gradient for name, gradient in every[topology.rank].items()}
        _step(exchange, model, own, ranks)
        for name, parameter in model.named_parameters():
            found = parameter.grad
            assert found is not None and found.stride() == parameter.stride()
            expected = factor * _adasum([theirs[name] for theirs in every])
            torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)
    assert model.alike.grad is not None and model.apart.grad is not None
    torch.testing.assert_close(model.alike.grad, 3.0 * torch.arange(5.0))
    assert float(model.apart.grad.sum()) == pytest.approx(3.0 * sum(range(1, ranks + 1)))
    bits = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    assert all(theirs == bits for theirs in gather_json(bits, "gradients"))


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
def test_nonfinite_gradient_of_one_rank_is_nonfinite_on_all_ranks(
    topology: Topology, poison: float
) -> None:
    model, own = Model(), _gradients(topology.rank)
    exchange = adasum_exchange(build_optimizer(OptimConfig(), model), model)
    if topology.rank == 0:
        own["odd"][6, 10] = poison
    _step(exchange, model, own, topology.world_size)
    assert model.odd.grad is not None and not bool(model.odd.grad.isfinite().all())
