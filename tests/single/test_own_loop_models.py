"""What scripts do to models and optimizers in their own loops: as in a plain loop, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain.data.order import sample_order
from hvdtrain.engine.accumulate import depends_on
from tests.support import runs
from tests.support.own_loops import EXACT, curve, error, train

Gradients = Callable[[torch.Tensor, torch.Tensor], None]


def plain_losses(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    backward: Gradients | None = None,
    before: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train as the scripts' authors did, on the same global batches; return the losses.

    Args:
        backward: runs the backward passes of a loss and another one of the errors; default: `loss`.
        before: called at the start of each step.
    """
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)
    found = []
    for step in range(12):
        before(step)
        batch = sample_order(12 * step, 12 * (step + 1), 256, 1234)
        error = model(x[batch]) - y[batch]
        loss = error.square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if backward is None:
            loss.backward()
        else:
            backward(loss, error.pow(4).mean())
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return found


def test_three_optimizers_may_share_a_graph(tmp_path: Path) -> None:
    train(tmp_path, "three", "three.py", "")
    for name in ("encoder", "decoder", "critic"):
        losses = [line[f"{name}_loss"] for line in runs.metrics(tmp_path / "three")]
        assert losses[-1] < losses[0], name


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon before 2.9")
@pytest.mark.parametrize("calls", ["one", "each", "sum"])
def test_muon_and_adamw_train_as_in_a_plain_loop(tmp_path: Path, calls: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]

    def separate(loss: torch.Tensor, other: torch.Tensor) -> None:
        loss.backward(inputs=matrices, retain_graph=True)
        other.backward(inputs=others)

    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    expected = plain_losses(model, optimizers, separate if calls == "sum" else None)

    env = {"HVDTRAIN_TEST_CALLS": calls}
    train(tmp_path, "one", "muon.py", "", *EXACT, **env)
    train(tmp_path, "more", "muon.py", "gloo:3" if calls == "each" else "gloo:2", *EXACT, **env)
    train(tmp_path, "parts", "muon.py", "gloo:2", *EXACT, "--train.duration", "7", **env)
    train(tmp_path, "parts", "muon.py", "", *EXACT, **env)
    found = curve(tmp_path / "one", "mae", "muon_loss", "adamw_loss")
    assert found == curve(tmp_path / "more", "mae", "muon_loss", "adamw_loss")
    assert found == curve(tmp_path / "parts", "mae", "muon_loss", "adamw_loss")
    lines = runs.metrics(tmp_path / "one")
    assert [line["muon_loss"] for line in lines] == pytest.approx(expected, rel=1e-5)
    same = [line["loss"] == line["muon_loss"] == line["adamw_loss"] for line in lines]
    assert all(same) if calls != "sum" else not any(same)


def test_resumed_run_may_add_and_remove_wrappers(tmp_path: Path) -> None:
    train(tmp_path, "whole", "wrapped.py", "", *EXACT, HVDTRAIN_TEST_WRAPPER="")
    for steps, wrapper in enumerate(["compile", "", "both", "parallel", "layer"], start=2):
        flags = *EXACT, "--train.duration", str(12 if wrapper == "layer" else 2 * steps)
        train(tmp_path, "parts", "wrapped.py", "", *flags, HVDTRAIN_TEST_WRAPPER=wrapper)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


@pytest.mark.parametrize("what", ["thaw", "freeze"])
def test_layer_is_frozen_and_trained_as_in_a_plain_loop(tmp_path: Path, what: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(x)))

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)

    def before(step: int) -> None:
        model.body.requires_grad_((step < 4) == (what == "freeze"))

    expected = plain_losses(model, [optimizer], before=before)
    env = {"HVDTRAIN_TEST_LAYERS": what}
    train(tmp_path, "one", "layers.py", "", **env)
    assert runs.losses(tmp_path / "one") == pytest.approx(expected, rel=1e-5)
    train(tmp_path, "wire", "layers.py", "gloo:2", "--exchange.wire", "float16", **env)
    assert runs.losses(tmp_path / "wire") == pytest.approx(expected, rel=1e-2)

    end = train(tmp_path, "exact", "layers.py", "", *EXACT, **env)
    train(tmp_path, "more", "layers.py", "gloo:3", *EXACT, **env)
    train(tmp_path, "parts", "layers.py", "gloo:2", *EXACT, "--train.duration", "7", **env)
    assert train(tmp_path, "parts", "layers.py", "", *EXACT, **env) == end
    assert curve(tmp_path / "exact") == curve(tmp_path / "more") == curve(tmp_path / "parts")


def test_buffer_that_begins_empty_may_grow(tmp_path: Path) -> None:
    env = {"HVDTRAIN_TEST_LAYERS": "queue"}
    end = train(tmp_path, "whole", "layers.py", "", *EXACT, **env)
    assert end.startswith("[9, 2] ")
    train(tmp_path, "parts", "layers.py", "gloo:2", *EXACT, "--train.duration", "7", **env)
    assert train(tmp_path, "parts", "layers.py", "", *EXACT, **env) == end
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


REFUSED = {
    "lazy": "parameter heads.0.weight has no shape yet: run the model once on a tensor of zeros",
    "group": "optimizer.add_param_group() was called after hvdtrain.training had begun",
    "layer": "the parameter heads.1.weight was added to the model inside the loop",
    "other layer": "was replaced in the model inside the loop",
    "thaw without optimizer": "body.weight was frozen when the run began, and the optimizer does",
    "buffer in the forward pass": "the buffer scale appeared in the model inside the loop",
    "longer buffer": "the buffer full changed its shape from [2, 2] to [4, 2] inside the loop",
}


ON_TWO_RANKS = ["lazy", "layer", "buffer in the forward pass"]


@pytest.mark.parametrize(
    ("what", "launcher"), [*((w, "") for w in REFUSED), *((w, "gloo:2") for w in ON_TWO_RANKS)]
)
def test_growing_model_is_refused_when_it_grows(tmp_path: Path, what: str, launcher: str) -> None:
    found = error(tmp_path, "a", "layers.py", launcher, HVDTRAIN_TEST_LAYERS=what)
    assert REFUSED[what] in found
    if what != "lazy":
        steps = 0 if what == "buffer in the forward pass" else 4
        assert len(curve(tmp_path / "a")) in (steps - 1, steps)


def test_layer_that_one_rank_freezes_is_refused(tmp_path: Path) -> None:
    env = {"HVDTRAIN_TEST_LAYERS": "freeze on one rank"}
    found = error(tmp_path, "a", "layers.py", "gloo:2", **env)
    assert "step 5: the model's parameter body.weight is frozen on 1 of 2 ranks" in found


def test_gradient_that_one_rank_deletes_is_refused_by_local_sgd(tmp_path: Path) -> None:
    env = {"HVDTRAIN_TEST_LAYERS": "delete on one rank"}
    found = error(tmp_path, "a", "layers.py", "gloo:2", "--exchange.sync_every", "4", **env)
    assert "a script has set p.grad = None on some ranks only" in found


def test_graph_is_kept_only_if_another_optimizer_needs_it() -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    fake = generator(torch.ones(1, 2))
    [ours, theirs] = [[*module.parameters()] for module in (generator, critic)]
    assert not depends_on(critic(fake.detach()).mean(), ours)
    assert depends_on(critic(fake).mean(), theirs)
    assert depends_on(critic(fake).mean(), ours)
