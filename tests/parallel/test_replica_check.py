"""Comparison of the ranks' states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.engine.callbacks import replicas
from hvdtrain.engine.callbacks.replicas import ReplicaCheck
from hvdtrain.engine.integrity import TensorHash
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.state import RunState
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer, state_tensors
from hvdtrain.runtime.collectives import AgreedError, gather_bytes
from hvdtrain.runtime.mesh import Grid, Topology
from hvdtrain.runtime.tensor_shards import model_tensors

GRID = Grid((0, 1), {})


def _state(seed: int) -> RunState:
    """Return the state after one step; BatchNorm's buffers also depend on the seed."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = build_optimizer(OptimConfig(), model)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return RunState(model, optimizer, Progress(seed, seed, 0, 0), identity={})


def _loop(topology: Topology, step: int) -> Any:
    progress = Progress(step=step)
    return SimpleNamespace(
        topology=topology,
        progress=progress,
        ending=False,
        due=lambda every: progress.step % every == 0,
    )


def test_hashes_are_equal_only_for_equal_tensors(topology: Topology) -> None:
    tensors = model_tensors(_state(seed=0).model)
    digests = gather_bytes(TensorHash()(tensors), "digests")
    assert len(digests) == topology.world_size and len(set(digests)) == 1
    tensors["0.weight"].view(torch.int32)[0, 0] ^= topology.rank
    assert len(set(gather_bytes(TensorHash()(tensors), "digests"))) == topology.world_size


def test_broadcast_copies_the_state_of_the_root_rank(topology: Topology) -> None:
    for root in (topology.world_size - 1, 0, topology.world_size - 1):
        state, expected = _state(seed=topology.rank), _state(seed=root)
        progress = state.progress
        state.broadcast(root)
        assert state.progress is progress and progress == expected.progress
        for name, tensor in model_tensors(expected.model).items():
            assert torch.equal(model_tensors(state.model)[name], tensor), name
        for key, tensor in state_tensors(expected.optimizer, expected.model).items():
            assert torch.equal(state_tensors(state.optimizer, state.model)[key], tensor), key


def test_replica_check_ignores_different_buffers(topology: Topology) -> None:
    state = _state(seed=0)
    state.model[1].running_mean += topology.rank  # type: ignore[index,operator]
    record: dict[str, Any] = {}
    ReplicaCheck(10, 0, state, lambda *a, **k: pytest.fail("healed"), GRID).on_step(
        _loop(topology, 10), record
    )
    assert record.keys() == {"state_hash"}


def test_tie_between_states_ends_every_rank(topology: Topology) -> None:
    if topology.world_size != 2:
        pytest.skip("two ranks have no majority")
    state = _state(seed=0)
    check = ReplicaCheck(10, 0, state, lambda step, ranks: None, GRID)
    check.on_step(_loop(topology, 10), {})
    next(state.model.parameters()).data.view(torch.int32)[0, 0] ^= topology.rank
    check.on_step(_loop(topology, 19), {})  # not due
    with pytest.raises(AgreedError, match="identical after step 10") as caught:
        check.on_step(_loop(topology, 20), {})
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_context_ranks_are_compared_and_tensor_ranks_are_not(topology: Topology, axis: str) -> None:
    if topology.world_size != 2:
        pytest.skip("for two ranks")
    state, record = _state(seed=topology.rank), dict[str, Any]()
    check = ReplicaCheck(10, 0, state, lambda step, ranks: None, Grid((0, 1), {axis: 2}))
    if axis == "tensor":
        check.on_step(_loop(topology, 10), record)
        assert record["state_hash"]
        return
    with pytest.raises(AgreedError, match=r"rank 0 on .*, rank 1 on .*: the correct"):
        check.on_step(_loop(topology, 10), record)


def test_healing_copies_the_buffers_of_a_healthy_rank(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    if topology.world_size != 2:
        pytest.skip("for two ranks")
    monkeypatch.setattr(replicas, "largest_group", lambda digests: [1])
    state = _state(seed=0)
    mean = state.model[1].running_mean  # type: ignore[index]
    mean.fill_(topology.rank + 5.0)  # type: ignore[operator]
    weight = next(state.model.parameters()).data
    expected = weight.clone()
    weight.view(torch.int32)[0, 0] ^= 1 - topology.rank
    heard: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    check = ReplicaCheck(10, 0, state, lambda event, **fields: heard.append(fields), GRID)
    check.on_step(_loop(topology, 20), record)
    assert (
        record.pop("state_hash")
        and record == {"healed": [0]}
        and heard == [{"step": 20, "ranks": [0]}]
    )
    assert torch.equal(weight, expected)
    assert mean.unique().tolist() == [6.0]  # type: ignore[operator]
    check.on_step(_loop(topology, 20), record)  # again, as after an elastic reset


def test_state_is_checked_before_each_save(topology: Topology) -> None:
    if topology.world_size != 2:
        pytest.skip("two ranks have no majority")
    state = _state(seed=topology.rank)
    check = ReplicaCheck(100, 7, state, lambda step, ranks: None, GRID)
    loop = _loop(topology, 13)
    check.on_step(loop, {})
    for step, ending in ((14, False), (13, True)):
        loop.progress.step, loop.ending = step, ending
        with pytest.raises(AgreedError):
            check.on_step(loop, {})
