"""Gradients of all ranks become the gradient of one process over all micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.exchange.base import Exchange, buckets
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.exact import UNIT, exact_exchange
from hvdtrain.exchange.powersgd import powersgd_exchange
from hvdtrain.exchange.topk import topk_exchange
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer
from hvdtrain.runtime.collectives import gather_json, sum_
from hvdtrain.runtime.mesh import Topology

WIDTH = 6


class Model(nn.Module):
    """Two layers always used, one in odd micro-batches only, one never; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = torch.tanh(self.first(x)) * self.frozen
        return self.last(self.odd(x) if number % 2 else x)


def _model() -> Model:
    torch.manual_seed(0)
    return Model().double()  # sums in another order then differ by 1e-16, errors by more


def _loss(model: Model, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
    return model(x, number).square().mean()


def _alone(shares: Callable[[int, int], list[int]], steps: int, ranks: int) -> list[list[Tensor]]:
    """Return the gradients of each step on one process with the micro-batches of all ranks."""
    model = _model()
    optimizer = build_optimizer(OptimConfig(lr=0.05), model)
    gradients = []
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(ranks):
            for number in shares(step, rank):
                _loss(model, step, number).backward()
        for parameter in _trained(model):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients.append([_gradient(p).clone() for p in _trained(model)])
        optimizer.step()
    return gradients


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


SHARES: dict[str, Callable[[int, int], list[int]]] = {
    "even": lambda step, rank: [2 * rank, 2 * rank + 1],
    "uneven": lambda step, rank: [0, 1, 2] if rank == 0 else [3],
    "rank 0 has none": lambda step, rank: [] if rank == 0 else [0, 1, 2],
    "only rank 0 has some": lambda step, rank: [0, 1, 2] if rank == 0 else [],
    "no rank has any": lambda step, rank: [],
    "changing": lambda step, rank: list(range((step + rank) % 3)),
    "no pass reaches": lambda step, rank: [0, 2, 4],
    "the last pass does not reach": lambda step, rank: [1, 0] if rank == 0 else [3],
    "only the last pass reaches": lambda step, rank: [0, 2, 1],
    "one rank alone reaches": lambda step, rank: [0, 2] if rank == 0 else [1, 3],
}


def _exchange(name: str, optimizer: Optimizer, model: nn.Module) -> Exchange:
    if name == "exact":
        return exact_exchange(optimizer, model, micro_batches=8)
    if name == "all of topk":
        return topk_exchange(optimizer, model, ratio=1.0)
    return DenseExchange(optimizer, model, wire="float32" if name == "dense" else name)


# Rounding of a fixed-point gradient, over the micro-batches of a step.
ROUNDING = {"dense": 1e-14, "exact": 8 * UNIT, "all of topk": 1e-14}


@pytest.mark.parametrize("name", ROUNDING)
@pytest.mark.parametrize("case", SHARES)
def test_gradient_equals_one_process_over_all_micro_batches(
    topology: Topology, case: str, name: str
) -> None:
    shares, steps = SHARES[case], 3
    expected = _alone(shares, steps, topology.world_size)
    model = _model()
    optimizer = build_optimizer(OptimConfig(lr=0.05), model)
    exchange = _exchange(name, optimizer, model)
    for step in range(steps):
        optimizer.zero_grad()
        own = shares(step, topology.rank)
        exchange.begin(len(own))
        for number in own:
            _loss(model, step, number).backward()
        exchange.reduce()
        for parameter, gradient in zip(_trained(model), expected[step], strict=True):
            atol = (1 + 10 * step) * ROUNDING[name]
            torch.testing.assert_close(_gradient(parameter), gradient, rtol=1e-12, atol=atol)
        optimizer.step()
    assert model.frozen.grad is None


@pytest.mark.parametrize("name", ROUNDING)
def test_interrupted_step_does_not_affect_the_next_one(topology: Topology, name: str) -> None:
    expected = _alone(SHARES["even"], 1, topology.world_size)[0]
    model = _model()
    exchange = _exchange(name, build_optimizer(OptimConfig(lr=0.05), model), model)
    exchange.begin(1)
    model.last(torch.ones(WIDTH, dtype=torch.float64)).sum().backward()  # not below
    exchange.abort()
    own = SHARES["even"](0, topology.rank)
    exchange.begin(len(own))
    for number in own:
        _loss(model, 0, number).backward()
    exchange.reduce()
    for parameter, gradient in zip(_trained(model), expected, strict=True):
        atol = ROUNDING[name]
        torch.testing.assert_close(_gradient(parameter), gradient, rtol=1e-12, atol=atol)


@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_of_a_bucket_are_contiguous_in_memory(topology: Topology, passes: int) -> None:
    if topology.world_size == 1:
        pytest.skip("one rank sends nothing")
    model = _model()
    exchange = _exchange("dense", build_optimizer(OptimConfig(lr=0.05), model), model)
    for step in range(2):
        model.zero_grad()
        exchange.begin(passes)
        for number in range(passes):
            model(torch.ones(4, WIDTH, dtype=torch.float64), 2 * number + 1).sum().backward()
        exchange.reduce()
        reached = [model.last.bias, model.last.weight]  # the order in which backward reaches them
        first, second = (_gradient(parameter) for parameter in reached)
        assert first.data_ptr() + first.nbytes == second.data_ptr(), step


def test_ranks_stay_bitwise_identical(topology: Topology) -> None:
    model = _model().float()
    optimizer = build_optimizer(OptimConfig(lr=0.05), model)
    exchange = DenseExchange(optimizer, model)
    for step in range(5):
        optimizer.zero_grad()
        exchange.begin(1)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step + topology.rank))
        model(x, step).square().mean().backward()
        exchange.reduce()
        optimizer.step()
    bits = [p.detach().view(torch.int32).flatten().tolist() for p in model.parameters()]
    assert all(other == bits for other in gather_json(bits, "weights"))


def _gradients_on(wire: str, topology: Topology) -> Callable[[float], tuple[list[Tensor], ...]]:
    """Return the gradients of a step with a loss scale: from the exchange, and from one process."""
    model = _model()
    optimizer = build_optimizer(OptimConfig(lr=0.05), model)
    exchange = _exchange(wire, optimizer, model)

    def gradients(scale: float) -> tuple[list[Tensor], ...]:
        optimizer.zero_grad()
        own = SHARES["even"](0, topology.rank)
        exchange.begin(len(own))
        for number in own:
            (scale * _loss(model, 0, number)).backward()
        exchange.reduce()
        found = [_gradient(p).clone() for p in _trained(model)]
        exchange.commit(applied=all(gradient.isfinite().all() for gradient in found))
        alone = _alone(SHARES["even"], 1, topology.world_size)[0]
        return found, [scale * gradient for gradient in alone]

    return gradients


def test_bfloat16_wire_keeps_tiny_and_huge_gradients(topology: Topology) -> None:
    gradients = _gradients_on("bfloat16", topology)
    for scale in (1.0, 1e-30, 1e30):
        for found, expected in zip(*gradients(scale), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=scale * 2e-3)
    overflresidual = any(gradient.isinf().any() for gradient in gradients(1e42)[0])
    assert overflresidual or topology.world_size == 1


def test_float16_wire_scales_gradients_and_recovers_from_overflow(topology: Topology) -> None:
    gradients = _gradients_on("float16", topology)
    for scale in (1.0, 1e-3):
        for found, expected in zip(*gradients(scale), strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=scale * 1e-4)
    skipped = 0
    while not all(gradient.isfinite().all() for gradient in gradients(1e5)[0]):
        skipped += 1
        assert skipped < 10
    assert skipped >= 1 or topology.world_size == 1
    for found, expected in zip(*gradients(1e5), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=10.0)


COMPRESSIONS = {
    "topk": ExchangeConfig(compression="topk", ratio=0.1),
    "powersgd": ExchangeConfig(compression="powersgd", rank=2, start_step=1),
}


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_compression_keeps_residuals_and_ranks_receive_identical_bits(
    topology: Topology, name: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    optimizer = build_optimizer(OptimConfig(lr=0.05), model)
    exchange = _compressed(COMPRESSIONS[name], optimizer, model)
    parts = {part.name: part for part in exchange.state_parts()}
    received: dict[nn.Parameter, Tensor] = {p: torch.zeros_like(p) for p in _trained(model)}
    own = {p: torch.zeros_like(p) for p in received}
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + topology.rank)
        x = torch.randn(4, 16, generator=generator).double()
        gradients = torch.autograd.grad(model(x).square().mean(), [*received])
        optimizer.zero_grad()
        exchange.begin(1)
        model(x).square().mean().backward()
        exchange.reduce()
        exchange.commit(applied=step != 2)  # the skipped step has no effect
        bits = [_gradient(p).tolist() for p in received]
        assert all(other == bits for other in gather_json(bits, "gradients"))
        if step != 2:
            for parameter, gradient in zip(received, gradients, strict=True):
                received[parameter] += _gradient(parameter)
                own[parameter] += gradient
    residual = torch.cat([t.flatten() for t in parts["residual"].tensors().values()])
    assert float(residual.abs().max()) > 1e-3
    due = sum_(torch.stack([t.sum() for t in own.values()]).sum(), "due")
    got = torch.stack([t.sum() for t in received.values()]).sum()
    torch.testing.assert_close(got + sum_(residual.sum(), "residual"), due, rtol=1e-9, atol=1e-11)
    if name == "powersgd":
        assert int(parts["powersgd"].tensors()["0/steps"]) == 4


def _compressed(config: ExchangeConfig, optimizer: Optimizer, model: nn.Module) -> Exchange:
    if config.compression == "topk":
        return topk_exchange(optimizer, model, config.ratio)
    return powersgd_exchange(optimizer, model, config)


def test_powersgd_is_exact_for_a_low_rank_matrix(topology: Topology) -> None:
    model = nn.Linear(16, 16, bias=False).double()
    optimizer = build_optimizer(OptimConfig(lr=0.05), model)
    exchange = powersgd_exchange(optimizer, model, COMPRESSIONS["powersgd"])
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(topology.rank)).double()
    expected = sum_(torch.ones(16, 1, dtype=torch.float64) @ x, "expected")
    for _ in range(3):
        optimizer.zero_grad()
        exchange.begin(1)
        model(x).sum().backward()
        exchange.reduce()
        exchange.commit(applied=True)
        torch.testing.assert_close(_gradient(model.weight), expected, rtol=1e-9, atol=1e-12)


def test_buckets_cover_all_parameters_by_dtype_within_the_limit() -> None:
    def sized(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    a, b, c, d, e = sized(2), sized(100), sized(3), sized(4), sized(1, torch.float64)
    groups = buckets([a, b, c, d, e], limit=32)
    assert [[id(p) for p in group] for group in groups] == [
        [id(e)],
        [id(d), id(c)],
        [id(b)],
        [id(a)],
    ]
    assert buckets([], limit=32) == []


def test_first_bucket_has_a_smaller_limit() -> None:
    a, b, c, d = (torch.zeros(n) for n in (4, 4, 1, 1))
    assert [len(group) for group in buckets([a, b, c, d], limit=40)] == [4]
    small_first = buckets([a, b, c, d], limit=40, first=8)
    assert [[tensor.numel() for tensor in group] for group in small_first] == [[1, 1], [4, 4]]
