"""Wrappers such as torch.compile's module: a run has the same names with and without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.parallel import DataParallel

from hvdtrain.checkpoint.export import export
from hvdtrain.checkpoint.format import Checkpoint, write
from hvdtrain.engine.state import ModelState, OptimizerState
from hvdtrain.runtime.wrappers import unwrapped


def model_of(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def compiled_layers(model: nn.Module) -> nn.Module:
    return nn.Sequential(*map(compiled, model.children()))


def states(model: nn.Module) -> tuple[ModelState, OptimizerState, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters())
    return ModelState(unwrapped(model)), OptimizerState(optimizer, unwrapped(model)), optimizer


WRAPPERS = [compiled, DataParallel, compiled_layers, lambda model: compiled(DataParallel(model))]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_names_in_the_state_lack_the_prefixes_of_wrappers(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    plain, wrapped = model_of(lambda model: model), model_of(wrap)
    (model, _, _), (other, optimizer_state, optimizer) = states(plain), states(wrapped)
    assert other.tensors().keys() == model.tensors().keys()
    assert other.compared().keys() == model.compared().keys()
    wrapped(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    names = {name for name, _ in plain.named_parameters()}
    assert {key.rpartition("/")[0] for key in optimizer_state.tensors()} == names


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_checkpoint_with_prefixes_is_loaded(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = model_of(wrap)
    wrapped(torch.ones(4, 2)).sum().backward()
    old = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    moments = {f"{name}/exp_avg": p.grad.clone() for name, p in wrapped.named_parameters()}
    plain = model_of(lambda model: model)
    nn.init.zeros_(plain[0].weight)
    model, optimizer_state, optimizer = states(plain)
    model.load([old])
    optimizer_state.load([moments])
    assert torch.equal(plain[0].weight, next(wrapped.parameters()))
    first = next(iter(moments.values()))
    assert torch.equal(optimizer.state[plain[0].weight]["exp_avg"], first)


def test_submodule_called_module_keeps_its_name() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 1)

    model = ModelState(Outer())
    saved = {name: torch.ones_like(tensor) for name, tensor in model.tensors().items()}
    assert saved.keys() == {"module.weight", "module.bias"}
    model.load([saved])
    assert model.tensors()["module.bias"].item() == 1


def test_exported_weights_lack_the_prefixes(tmp_path: Path) -> None:
    tensors = {name: t.clone() for name, t in compiled(nn.Linear(2, 1)).state_dict().items()}
    assert tensors.keys() == {"_orig_mod.weight", "_orig_mod.bias"}, "torch's prefix has changed"
    saved = write(tmp_path, Checkpoint({"model": tensors}, {"step": 1, "samples": 1}))
    export(saved, {}, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"weight", "bias"}
