"""Models that ranks split, compared with the same model on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import AdamW, Optimizer

from hvdtrain.errors import UserError
from hvdtrain.exchange.spanning import complete_gradients
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.models.sampling import Sampling, continue_tokens
from hvdtrain.models.vocabulary import whole
from hvdtrain.parallel.fsdp import Sharding, apply_shard
from hvdtrain.parallel.local_optimizer import LocalOptimizer, total_norm
from hvdtrain.parallel.spanned import copies_in_replica, is_first_holder, position
from hvdtrain.parallel.tensor import apply_tensor
from hvdtrain.runtime.tensor_shards import ShardPosition, assemble, box, local

BATCH, SEPARATOR = 3, 0
Gradients = dict[str, Tensor]


def sizes(**changes: Any) -> GPTConfig:
    """Return the sizes of a tiny GPT; its vocabulary and its context are odd."""
    standard = {"layers": 2, "heads": 4, "width": 16, "context": 13, "vocab_size": 37}
    return GPTConfig(**(standard | changes))


def gpt(config: GPTConfig) -> GPT:
    torch.manual_seed(1)
    model = GPT(config)
    with torch.no_grad():  # so that no gradient is zero by chance, including biases
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def tokens_of(config: GPTConfig, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (BATCH, config.context + 1), generator=generator)


def loss_of(model: GPT, tokens: Tensor, packed: bool) -> Tensor:
    documents = (tokens[:, :-1] % 5 == SEPARATOR).cumsum(dim=1) if packed else None
    return model.loss(tokens[:, :-1], tokens[:, 1:], documents)


@dataclass(frozen=True)
class Variant:
    """A variant: changes of `sizes`, whether samples are packed documents, and its sharding."""

    changes: Mapping[str, Any]
    packed: bool = True
    sharding: Sharding = field(default_factory=Sharding)


@dataclass(frozen=True)
class Difference:
    """Differences between a split model and the whole model.

    Args:
        loss, gradient: largest absolute difference over all steps
        copies: names of gradients that differ between ranks that hold the same shard
        fraction: this rank's fraction of the memory of parameters, gradients and optimizer state
        dtensors: entries of the optimizer's state that are split tensors
    """

    loss: float
    gradient: float
    copies: list[str]
    fraction: float
    dtensors: int


def trained(
    model: GPT, optimizer: Optimizer, steps: Sequence[Sequence[int]], packed: bool
) -> Iterator[tuple[float, Gradients]]:
    """Return loss and gradients, summed over micro-batches, of each step.

    Args:
        steps: numbers of the micro-batches of each step; they determine data and random numbers.
    """
    parameters = dict(model.named_parameters())
    for numbers in steps:
        model.zero_grad()
        total = 0.0
        for number in numbers:
            torch.manual_seed(number)
            loss = loss_of(model, tokens_of(model.config, number), packed)
            loss.backward()
            total += loss.item()
        complete_gradients([*parameters.values()])
        yield total, {name: p.grad for name, p in parameters.items()}
        optimizer.step()


def compared(degrees: Mapping[str, int], variants: Mapping[str, Variant]) -> dict[str, Difference]:
    """Train each variant whole and split over a mesh of these degrees."""
    mesh = mesh_of(**degrees)
    return {name: _compared(mesh, variant) for name, variant in variants.items()}


def _compared(mesh: DeviceMesh, variant: Variant) -> Difference:
    config = sizes(**variant.changes)
    dense, split = gpt(config), gpt(config)
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        apply_tensor(split, mesh["tensor"], split.tensor_plan())
    shards, shard = 1, 0
    if "shard" in names:
        shards, shard = mesh["shard"].size(), mesh["shard"].get_local_rank()
        apply_shard(split, list(split.blocks), mesh["shard"], variant.sharding)
    steps = [range(4 * step, 4 * step + 4) for step in range(3)]
    own = [numbers[shard::shards] for numbers in steps]
    loss_error, error, copies = 0.0, 0.0, set()
    optimizers = AdamW(dense.parameters(), lr=1e-2), AdamW(split.parameters(), lr=1e-2)
    whole, local_ones = optimizers[0], LocalOptimizer(optimizers[1])
    of_whole = trained(dense, whole, steps, variant.packed)
    of_split = trained(split, local_ones, own, variant.packed)
    for (loss, gradients), (part_of_loss, parts) in zip(of_whole, of_split, strict=True):
        total = torch.tensor(part_of_loss, dtype=torch.float64)
        if "shard" in names:
            dist.all_reduce(total, group=mesh["shard"].get_group())
        loss_error = max(loss_error, abs(float(total) - loss))
        for name, gradient in parts.items():
            error = max(error, _error(position(gradient), local(gradient), gradients[name]))
        copies |= _unequal_copies(parts, mesh)
    fraction = _bytes(split, local_ones) / _bytes(dense, whole)
    dtensors = sum(isinstance(t, DTensor) for t in _entries(local_ones))
    return Difference(loss_error, error, sorted(copies), fraction, dtensors)


def _entries(optimizer: Optimizer) -> list[Tensor]:
    return [tensor for entries in optimizer.state.values() for tensor in entries.values()]


def _bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Return the bytes of parameters, gradients and optimizer state; shared buffers count once."""
    parameters = [*model.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    storages = [local(t).untyped_storage() for t in (*parameters, *gradients, *_entries(optimizer))]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def whole_blocks(shardings: Mapping[str, Sharding]) -> dict[str, dict[str, list[int]]]:
    """Return which blocks of a model of 3 blocks on two ranks are whole, and when."""
    mesh = mesh_of(shard=2)
    return {name: _whole_blocks(mesh, sharding) for name, sharding in shardings.items()}


def _whole_blocks(mesh: DeviceMesh, sharding: Sharding) -> dict[str, list[int]]:
    model = gpt(sizes(layers=3))
    blocks, seen = [*model.blocks], dict[str, list[int]]()
    apply_shard(model, blocks, mesh["shard"], sharding)

    def now() -> list[int]:
        return [n for n, block in enumerate(blocks) if _any_whole(block.parameters())]

    for number, block in enumerate(blocks):
        block.up.register_forward_hook(lambda *_, n=number: seen.update({f"forward {n}": now()}))
        block.up.register_full_backward_hook(
            lambda *_, n=number: seen.update({f"backward {n}": now()})
        )
    tokens = tokens_of(model.config, 0)
    loss = loss_of(model, tokens, packed=False)
    seen["between"] = now()
    loss.backward()
    with torch.no_grad():
        loss_of(model, tokens, packed=False)
    seen["after evaluation"] = now()
    assert not _any_whole(model.parameters())
    return seen


def _any_whole(parameters: Iterable[Tensor]) -> bool:
    return any(not isinstance(p, DTensor) for p in parameters)


def _error(where: ShardPosition, part: Tensor, expected: Tensor) -> float:
    difference = (part - expected[box(where, part)]).abs()
    return float(difference.max()) if difference.numel() else 0.0


def _unequal_copies(gradients: Gradients, mesh: DeviceMesh) -> set[str]:
    own = {name: (position(g).offsets, local(g).numpy().tobytes()) for name, g in gradients.items()}
    of_ranks: list[dict[str, Any]] = [{} for _ in range(mesh.size())]
    dist.all_gather_object(of_ranks, own)
    return {
        name
        for name, (offsets, content) in own.items()
        for other in of_ranks
        if other[name][0] == offsets and len(other[name][1]) == len(content)
        if other[name][1] != content
    }


class Classifier(nn.Module):
    """A user's model: tied, partly frozen, with a head that is called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.inner = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.inner["up"].weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.inner["down"](torch.relu(self.inner["up"](self.norm(x))))
        return self.head(x)


PLAN = {"embed": "vocabulary", "head": "vocabulary", "*.up": "column", "*.down": "row"}
# (plan, expected error text) for that model and 2 ranks.
WRONG_PLANS = [
    ({"*.up": "columns"}, "style 'columns'; styles are: column, row"),
    ({"blocks.*": "column"}, "no module called 'blocks.*'"),
    ({"norm": "row"}, "'norm' is a LayerNorm, but 'row' splits nn.Linear"),
    ({"embed": "vocabulary"}, "'embed.weight' and 'head.weight' are one parameter"),
]


def custom_model() -> dict[str, Any]:
    """Return the results of apply_tensor on a user's model and plans: True if correct."""
    mesh = mesh_of(tensor=2)
    torch.manual_seed(3)
    dense, split = Classifier(), Classifier()
    split.load_state_dict(dense.state_dict())
    apply_tensor(split, mesh, PLAN)
    tokens = torch.randint(11, (4, 5))
    for model in (dense, split):
        model(tokens).square().mean().backward()
        complete_gradients([*model.parameters()])
    right: dict[str, Any] = {"tied": split.head.weight is split.embed.weight}
    right["frozen"] = not split.inner["up"].weight.requires_grad
    right["gradients"] = max(
        _error(position(p.grad), local(p.grad), dense.get_parameter(name).grad)
        for name, p in split.named_parameters()
        if p.grad is not None
    )
    right["errors"] = [message in _error_of(plan, mesh) for plan, message in WRONG_PLANS]
    return right


def _error_of(plan: dict[str, str], mesh: DeviceMesh) -> str:
    try:
        apply_tensor(Classifier(), mesh, plan)
    except UserError as error:
        return str(error)
    return "none"


def texts_and_rough_losses() -> dict[str, Any]:
    """Return tokens written by a GPT on one rank and split, and losses in 16 bits."""
    mesh, config = mesh_of(tensor=2), sizes(norm="rms")
    dense, split = gpt(config), gpt(config)
    apply_tensor(split, mesh, split.tensor_plan())
    greedy = Sampling(length=5, temperature=0.0)
    texts = [continue_tokens(m, [1], 37, greedy) for m in (dense, split)]
    with torch.autocast("cpu", torch.bfloat16):
        losses = [loss_of(m, tokens_of(config, 0), False) for m in (dense, split)]
    losses[1].backward()
    return {"texts": texts, "losses": [loss.item() for loss in losses]}


def tensor_parallel(variants: Mapping[str, Variant]) -> tuple[dict[str, Any], ...]:
    """Run all checks for two ranks, in one world."""
    return compared({"tensor": 2}, variants), custom_model(), texts_and_rough_losses()


def mesh_of(**degrees: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(degrees.values()), mesh_dim_names=tuple(degrees))


def _distributed(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return tensors distributed over a 2 x 2 mesh in several ways, some unevenly."""
    torch.manual_seed(5)

    def spread(shape: tuple[int, ...], onto: DeviceMesh, *placements: Placement) -> Tensor:
        return distribute_tensor(torch.randn(shape), onto, placements, src_data_rank=None)

    return {
        "rows": spread((5, 3), mesh["tensor"], Shard(0)),
        "columns": spread((2, 7), mesh["tensor"], Shard(1)),
        "empty on one rank": spread((1, 3), mesh["tensor"], Shard(0)),
        "copies": spread((4,), mesh["tensor"], Replicate()),
        "both": spread((5, 5), mesh, Shard(0), Shard(1)),
        "twice along one": spread((7,), mesh, Shard(0), Shard(0)),
        "one of two": spread((7, 2), mesh, Replicate(), Shard(0)),
        "plain": torch.randn(3, 2),
        "scalar": torch.randn(()),
    }


def wrong_shards() -> list[str]:
    """Return the names of tensors whose shards, one per first holder, do not form the tensor."""
    mesh = mesh_of(shard=2, tensor=2)
    tensors = {name: (tensor, whole(tensor)) for name, tensor in _distributed(mesh).items()}
    config = sizes(layers=1, mlp_width=6)  # 37 rows of a vocabulary: 19 and 18, then 10, 9, 9, 9
    split, dense = gpt(config), gpt(config)
    apply_tensor(split, mesh["tensor"], split.tensor_plan())
    apply_shard(split, list(split.blocks), mesh["shard"], Sharding())
    for name, parameter in split.named_parameters():
        tensors[name] = parameter, dense.get_parameter(name).detach()
    own = {
        name: (position(t), local(t))
        for name, (t, _) in tensors.items()
        if is_first_holder(t, mesh)
    }
    of_ranks: list[dict[str, tuple[ShardPosition, Tensor]]] = [{} for _ in range(mesh.size())]
    dist.all_gather_object(of_ranks, own)
    wrong = []
    for name, (_, expected) in tensors.items():
        saved = [shards[name] for shards in of_ranks if name in shards]
        if not torch.equal(assemble(saved), expected):
            wrong.append(name)
    return wrong


def norms() -> dict[str, tuple[float, float]]:
    """Return (norm of shards, norm of whole tensors) for sets of tensors of a 2 x 2 mesh."""
    mesh, device = mesh_of(shard=2, tensor=2), torch.device("cpu")
    spread = _distributed(mesh)

    def both(tensors: Sequence[Tensor]) -> tuple[float, float]:
        for tensor in tensors:
            tensor.grad = tensor.detach().clone()
        norm = total_norm(
            tensors, lambda t: copies_in_replica(t, mesh), dist.group.WORLD, torch.device("cpu")
        )
        return norm.item(), sum(float(whole(t).double().square().sum()) for t in tensors) ** 0.5

    found = {name: both([tensor]) for name, tensor in spread.items()}
    found["all"] = both(list(spread.values()))
    found["bfloat16"] = both([spread["rows"].bfloat16(), spread["plain"].bfloat16()])
    # Pipeline stages hold different parameters: here each rank has half, and one has none.
    own = [torch.full((2,), 3.0)] if dist.get_rank() < 2 else []
    for tensor in own:
        tensor.grad = tensor.clone()
    norm = total_norm(own, lambda _: 2, dist.group.WORLD, device)
    found["on some ranks"] = norm.item(), 18.0**0.5
    return found
