"""Private parts of torch that hvdtrain relies on: one test fails for each that torch changes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, distributed_c10d
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvdtrain.models import attention_kernels
from hvdtrain.models.attention_kernels import attend, attend_backward
from hvdtrain.parallel.schedules import _Stage
from hvdtrain.tasks.sync_batchnorm import SyncBatchNorm
from tests.support.runs import REPOSITORY, environment

_OPTIMIZE = """
import sys
from torch import nn, ones
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer
for name in ("adamw", "sgd", "adam", "lion", "muon", "adafactor"):
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = build_optimizer(OptimConfig(name=name), model)
    model(ones(1, dtype=int)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo.convert_frame" in sys.modules)
"""


def _run(code: str) -> str:
    """Return the last line that the code prints, in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_schedulers_still_mark_the_step_of_their_optimizer() -> None:
    # Without the mark no warning says that a script's scheduler is not saved (api/training.py).
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")


def test_no_optimizer_imports_dynamo_with_the_stand_in() -> None:
    first = "from hvdtrain.runtime.lazy_dynamo import defer; defer()"
    assert _run(first + _OPTIMIZE) == "False"


@pytest.mark.slow
def test_optimizers_import_dynamo_without_the_stand_in() -> None:
    assert _run(_OPTIMIZE) == "True", "torch no longer does: remove hvdtrain/runtime/lazy_dynamo.py"


# Operator -> the arguments that hvdtrain passes by position, and the results that it uses.
SIGNATURES = {
    "_scaled_dot_product_flash_attention": (
        "Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False",
        "Tensor output, Tensor logsumexp",
    ),
    "_scaled_dot_product_flash_attention_backward": (
        "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
        "bool is_causal, Tensor philox_seed, Tensor philox_offset",
        "Tensor grad_query, Tensor grad_key, Tensor grad_value",
    ),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False",
        "Tensor output, Tensor logsumexp",
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "float dropout_p, bool is_causal",
        "Tensor grad_query, Tensor grad_key, Tensor grad_value",
    ),
    "_log_softmax_backward_data": (
        "Tensor grad_output, Tensor output, int dim, ScalarType input_dtype",
        "Tensor",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", SIGNATURES)
def test_operator_has_the_arguments_that_hvdtrain_passes(name: str) -> None:
    arguments, results = SIGNATURES[name]
    schema = str(getattr(torch.ops.aten, name).default._schema)
    assert schema.startswith(f"aten::{name}({arguments}"), schema
    assert schema.partition(" -> ")[2].removeprefix("(").startswith(results), schema


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_returns_denominators_and_gradients(causal: bool) -> None:
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))
    scores = q @ k.mT / 8**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    y, denominators = attend(q.detach(), k.detach(), v.detach(), causal, None)
    torch.testing.assert_close(denominators, scores.logsumexp(-1))
    torch.testing.assert_close(y, scores.softmax(-1) @ v)
    gradient = torch.randn_like(y)
    (scores.softmax(-1) @ v).backward(gradient)
    qkv = (q.detach(), k.detach(), v.detach())
    found = attend_backward((gradient, y, denominators[..., None]), qkv, causal, None)
    for own, tensor in zip(found, (q, k, v), strict=True):
        torch.testing.assert_close(own, tensor.grad)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_attention_operators_of_a_gpu_keep_their_names(name: str) -> None:
    assert hasattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")


@pytest.mark.smoke
def test_attention_on_a_cpu_calls_the_operator_that_checkpointing_keeps() -> None:
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Record():
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default in called


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [False, True])
def test_flash_backward_gets_the_arguments_that_torch_passes_to_it(
    monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    # Meta tensors stand in for a GPU, which has the same operators.
    monkeypatch.setattr(attention_kernels, "has_flash", lambda q: True)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    passed = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is backward:
                passed.append([*map(_described, args[:-2])])  # without the random state
            return func(*args, **(kwargs or {}))

    q, k, v = (
        torch.empty(2, heads, 16, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for heads in (4, 2, 2)
    )
    with Record():
        y = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[0]
        y.backward(torch.empty_like(y))
        qkv = (q.detach(), k.detach(), v.detach())
        y, denominators = attend(*qkv, causal, None)
        attend_backward((torch.empty_like(y), y, denominators[..., None]), qkv, causal, None)
    by_torch, own = passed
    assert own == by_torch


def _described(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return argument.dtype, argument.shape, argument.stride()


@pytest.mark.smoke
def test_storages_are_distinguished_by_their_number() -> None:
    for device in ("cpu", "meta"):
        one, other = torch.empty(4, device=device), torch.empty(4, device=device)
        number = one.untyped_storage()._cdata
        assert number == one[1:].view(3, 1).untyped_storage()._cdata
        assert number != other.untyped_storage()._cdata


@pytest.mark.smoke
def test_normalizations_derive_from_torchs_private_bases() -> None:
    batch = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}
    instance = {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}
    assert all(issubclass(kind, _BatchNorm) for kind in batch)
    assert all(issubclass(kind, _NormBase) for kind in batch | instance)
    assert not any(issubclass(kind, _BatchNorm) for kind in instance)
    assert not any(issubclass(kind, _NormBase) for kind in (nn.LayerNorm, nn.GroupNorm))


@pytest.mark.smoke
def test_batchnorm_calls_the_check_that_hvdtrain_overrides() -> None:
    with patch.object(SyncBatchNorm, "_check_input_dim") as check:
        SyncBatchNorm(nn.BatchNorm1d(3), "one").eval()(torch.ones(2, 3))
    assert check.called, "torch calls another method, which raises unless it is overridden"


@pytest.mark.smoke
def test_pipeline_opens_connections_in_the_method_that_hvdtrain_overrides() -> None:
    name = "_get_init_p2p_neighbors_ops"
    assert name in vars(_Stage), "hvdtrain overrides another method"
    source = inspect.getsource(schedules)
    if hasattr(PipelineStage, name):
        assert f".{name}()" in source, "torch no longer calls it"
    else:  # from torch 2.15
        assert "_init_p2p" not in source, "torch has renamed it"


@pytest.mark.smoke
def test_groups_are_listed_with_their_backends() -> None:
    store = HashStore()
    distributed_c10d.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        groups = [distributed_c10d.group.WORLD, distributed_c10d.new_group([0])]
        assert [*distributed_c10d._world.pg_names] == groups
        for group in groups:
            assert torch.device("cpu") in group._device_types
            assert group._get_backend(torch.device("cpu")).name() == "gloo"
    finally:
        distributed_c10d.destroy_process_group()
    assert not distributed_c10d._world.pg_names


@pytest.mark.smoke
@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="a torch without NCCL")
def test_groups_with_nccl_can_be_aborted() -> None:
    assert callable(distributed_c10d.ProcessGroupNCCL.abort)


@pytest.mark.smoke
def test_parallel_styles_are_applied_by_the_method_that_hvdtrain_overrides() -> None:
    assert "_apply" in ParallelStyle.__abstractmethods__


@pytest.mark.smoke
def test_foreach_operations_equal_a_loop_bitwise() -> None:
    tensors = [torch.randn(n) for n in (1, 7, 1000)]
    for factor in (0.3, torch.tensor(0.3)):
        found = [t.clone() for t in tensors]
        torch._foreach_mul_(found, factor)
        assert all(torch.equal(a, b * factor) for a, b in zip(found, tensors, strict=True))
    copied = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(copied, tensors)
    assert all(torch.equal(a, b) for a, b in zip(copied, tensors, strict=True))
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    expected = [t.double().norm() for t in tensors]
    torch.testing.assert_close([*norms], expected)


@pytest.mark.smoke
def test_leaves_of_nested_arguments_are_found() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    leaves = tree_leaves(((one, [two]), {"x": three, "y": None}))
    assert [leaf for leaf in leaves if isinstance(leaf, Tensor)] == [one, two, three]


@pytest.mark.slow
def test_compilations_call_back_at_begin_and_end() -> None:
    code = """
import torch
from torch._dynamo.callback import callback_handler
called = []
callback_handler.register_start_callback(lambda _: called.append("begin"))
callback_handler.register_end_callback(lambda _: called.append("end"))
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
print(called)
"""
    assert _run(code) == "['begin', 'end']"
