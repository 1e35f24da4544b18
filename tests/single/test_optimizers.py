"""Each optimizer takes the same steps as its reference implementation."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.optim.algorithms import muon_parameters
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import (
    build_optimizer,
    set_learning_rate,
    set_state_tensors,
    state_tensors,
)
from hvdtrain.optim.trainable import freeze

LR, DECAY = 0.01, 0.2


def _model(tied: bool = False) -> GPT:
    torch.manual_seed(0)
    sizes = GPTConfig(layers=1, heads=2, width=16, context=8, vocab_size=11, tied_embeddings=tied)
    return GPT(sizes)


def _train(model: GPT, *optimizers: Optimizer, steps: int = 4) -> dict[str, Tensor]:
    for step in range(steps):
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in optimizers:
            set_learning_rate(optimizer, LR / (step + 1))
            optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _groups(model: nn.Module) -> list[dict[str, object]]:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adafactor", "fused"])
def test_optimizer_steps_match_torch(name: str) -> None:
    model = _model()
    other = copy.deepcopy(model)
    fused = name == "fused"
    given: Any = {"name": "adamw" if fused else name, "fused": fused}
    config = OptimConfig(**given, betas=(0.8, 0.9), eps=1e-3, momentum=0.7, weight_decay=DECAY)
    groups = _groups(other)
    plain = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.9), eps=1e-3),
        "fused": lambda: torch.optim.AdamW(groups, LR, (0.8, 0.9), 1e-3, fused=True),
        "adam": lambda: torch.optim.Adam(groups, lr=LR, betas=(0.8, 0.9), eps=1e-3),
        "sgd": lambda: torch.optim.SGD(groups, lr=LR, momentum=0.7),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=LR),
    }[name]()
    _assert_same(_train(model, build_optimizer(config, model)), _train(other, plain))


def test_lion_matches_algorithm_2_of_its_paper() -> None:
    model = _model()
    other = copy.deepcopy(model)
    config = OptimConfig(name="lion", betas=(0.9, 0.99), weight_decay=DECAY)
    ours = _train(model, build_optimizer(config, model), steps=3)
    momenta = {name: torch.zeros_like(p) for name, p in other.named_parameters()}
    for step in range(3):
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        other.zero_grad()
        other.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        with torch.no_grad():
            for name, p in other.named_parameters():
                assert p.grad is not None
                m, decay = momenta[name], DECAY if p.dim() >= 2 else 0.0
                update = torch.sign(0.9 * m + 0.1 * p.grad) + decay * p
                p -= LR / (step + 1) * update
                momenta[name] = 0.99 * m + 0.01 * p.grad
    for name, p in other.named_parameters():
        torch.testing.assert_close(ours[name], p.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_updates_only_hidden_matrices_and_adamw_the_rest(tied: bool) -> None:
    model = _model(tied)
    taken = {id(p) for p in muon_parameters(model)}
    names = {name for name, p in model.named_parameters() if id(p) in taken}
    inner = ("attention.q", "attention.k", "attention.v", "attention.out", "up", "down")
    assert names == {f"blocks.0.{part}.weight" for part in inner}
    other = copy.deepcopy(model)
    config = OptimConfig(name="muon", momentum=0.95, weight_decay=DECAY)
    matrices = list(muon_parameters(other))
    inside = {id(p) for p in matrices}
    scaled = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, **scaled)  # type: ignore[arg-type]
    rest = [p for p in other.parameters() if id(p) not in inside]
    decaying = {"params": [p for p in rest if p.dim() >= 2], "weight_decay": DECAY}
    vectors = {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([decaying, vectors], lr=LR, betas=(0.9, 0.95))
    _assert_same(_train(model, build_optimizer(config, model)), _train(other, muon, adamw))


def test_muon_rejects_model_without_matrices() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4))
    with pytest.raises(UserError, match="muon: the model has no matrix to train"):
        build_optimizer(OptimConfig(name="muon"), model)


def test_only_frozen_parameters_stay_unchanged() -> None:
    model = _model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    freeze(model, ["embedding.*", "blocks.?.attention.q.*"])
    after = _train(model, build_optimizer(OptimConfig(), model))
    frozen = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    expected = {"embedding.weight", "blocks.0.attention.q.weight", "blocks.0.attention.q.bias"}
    # A bias of the keys shifts all scores of a query equally, so its gradient is only rounding.
    assert frozen - {"blocks.0.attention.k.bias"} == expected


def test_invalid_optimizer_options_are_rejected() -> None:
    with pytest.raises(UserError, match=r"optim.freeze: 'embeding' matches no parameter .*embedd"):
        freeze(_model(), ["norm.*", "embeding"])
    assert parse(["--optim.freeze", "norm.*"]).config.optim.freeze == ["norm.*"]
    with pytest.raises(UserError, match=r"optim.fused requires optim.name adamw or adam"):
        parse(["--optim.name", "lion", "--optim.fused", "true"])
    with pytest.raises(UserError, match=r"optim.eps must be > 0, not 0"):
        parse(["--optim.eps", "0"])


def test_adamw8bit_state_is_restored_from_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(model: nn.Module) -> Optimizer:
        return build_optimizer(OptimConfig(name="adamw8bit", lr=LR), model)

    def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = make(model)
    train(model, optimizer, range(3))
    saved = {key: tensor.clone() for key, tensor in state_tensors(optimizer, model).items()}
    assert saved["0.weight/state1"].dtype == torch.uint8, "the moments do not take 8 bits"
    other = copy.deepcopy(model)
    fresh = make(other)
    set_state_tensors(fresh, other, saved)
    train(model, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    with pytest.raises(UserError, match=r"adamw8bit excludes exchange.sync_every"):
        parse(["--optim.name", "adamw8bit", "--exchange.sync_every", "4"])
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(UserError, match=r"pip install 'hvdtrain\[adamw8bit\]'"):
        make(model)
