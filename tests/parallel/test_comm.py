"""hvdtrain.comm on several ranks and on one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdtrain import comm
from hvdtrain.comm.process import Usage, UserCollectives
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.phases import PhaseTimer

EXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.uint8, torch.int16, torch.complex64)


def _of(rank: int, dtype: torch.dtype = torch.float32, rows: int = 3) -> Tensor:
    """Return (rows, 2) with different values on each rank; small numbers, whose sums are exact."""
    return (torch.arange(2 * rows).reshape(rows, 2) % 7 * (rank + 1)).to(dtype)


def _every(topology: Topology, dtype: torch.dtype) -> Tensor:
    """Return the values of all ranks: (ranks, rows, 2)."""
    return torch.stack([_of(rank, dtype) for rank in range(topology.world_size)])


def _same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_rank_and_size_match_the_topology(topology: Topology) -> None:
    assert (comm.rank(), comm.size()) == (topology.rank, topology.world_size)
    assert (comm.local_rank(), comm.local_size()) == (topology.local_rank, topology.local_size)
    assert comm.is_main_process() == (topology.rank == 0)


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_all_reduce_is_exact_and_keeps_shape_and_dtype(
    topology: Topology, dtype: torch.dtype
) -> None:
    every, own = _every(topology, dtype), _of(topology.rank, dtype)
    _same(comm.all_reduce(own), every.sum(0, dtype=dtype))
    _same(comm.all_reduce(own, "min"), every.amin(0))
    _same(comm.all_reduce(own.t(), "max"), every.amax(0).t())
    if dtype.is_floating_point:
        _same(comm.all_reduce(own, "mean"), every.double().mean(0).to(dtype))
    _same(own, _of(topology.rank, dtype))
    assert comm.all_reduce(torch.ones((), dtype=dtype)).tolist() == topology.world_size
    assert comm.all_reduce(torch.ones(0, 2, dtype=dtype)).shape == (0, 2)


@pytest.mark.parametrize("dtype", (*EXACT, *OTHERS), ids=str)
def test_all_gather_keeps_every_row_bitwise(topology: Topology, dtype: torch.dtype) -> None:
    # Rank 0 has none.
    expected = torch.cat([_of(r, dtype, rows=2 * r) for r in range(topology.world_size)])
    _same(comm.all_gather(_of(topology.rank, dtype, rows=2 * topology.rank)), expected)
    _same(
        comm.all_gather(torch.ones((), dtype=dtype)), torch.ones(topology.world_size, dtype=dtype)
    )
    vector = torch.arange(topology.rank + 1).to(dtype)
    parts = [torch.arange(rank + 1).to(dtype) for rank in range(topology.world_size)]
    _same(comm.all_gather(vector), torch.cat(parts))


@pytest.mark.parametrize("dtype", (*EXACT, *OTHERS), ids=str)
def test_broadcast_is_bitwise_exact_and_keeps_its_input(
    topology: Topology, dtype: torch.dtype
) -> None:
    for root in range(topology.world_size):
        own = _of(topology.rank, dtype)
        _same(comm.broadcast(own, root), _of(root, dtype))
        _same(comm.broadcast(own.t(), root), _of(root, dtype).t())
        _same(own, _of(topology.rank, dtype))
    scalar = torch.tensor(topology.rank).to(dtype)
    _same(comm.broadcast(scalar), torch.tensor(0).to(dtype))


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 8])
def test_reduce_scatter_gives_each_rank_its_own_rows(
    topology: Topology, dtype: torch.dtype, rows: int
) -> None:
    ranks = range(topology.world_size)
    every = torch.stack([_of(rank, dtype, rows) for rank in ranks])
    own = _of(topology.rank, dtype, rows)
    mine = every.sum(0, dtype=dtype).tensor_split(len(ranks))[topology.rank]
    _same(comm.reduce_scatter(own), mine)
    if dtype.is_floating_point:
        mean = every.double().mean(0).to(dtype).tensor_split(len(ranks))[topology.rank]
        _same(comm.reduce_scatter(own, "mean"), mean)


def test_16_bit_sums_are_rounded_once(topology: Topology) -> None:
    # 256 + 1 is not a bfloat16 number: it is rounded to 256.
    own = torch.tensor([256.0 if topology.rank == 0 else 1.5], dtype=torch.bfloat16)
    expected = torch.tensor([256 + 1.5 * (topology.world_size - 1)]).bfloat16()
    _same(comm.all_reduce(own), expected)


def _takes_part(call: Callable[[], object], topology: Topology) -> None:
    """Check that the ranks communicate afterwards as before."""
    call()
    assert comm.all_reduce(torch.ones(())) == topology.world_size


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: comm.all_reduce(torch.ones(2 + rank)),
        lambda rank: comm.all_reduce(torch.ones(2), ("sum", "max")[rank % 2]),
        lambda rank: comm.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int32)[rank % 2])),
        lambda rank: comm.all_gather(torch.ones(1, 1 + rank)),
        lambda rank: comm.broadcast(torch.ones(2 + 1_000_000 * rank)),
        lambda rank: comm.broadcast(torch.ones(2), root=rank),
        lambda rank: comm.reduce_scatter(torch.ones(2, 1 + rank)),
    ],
    ids=["shape", "op", "dtype", "columns", "size", "root", "part"],
)
def test_mismatched_calls_raise_a_collective_error(
    topology: Topology, call: Callable[[int], Tensor]
) -> None:
    if topology.world_size == 1:
        pytest.skip("one rank fits itself")

    def mistaken() -> None:
        with pytest.raises(comm.CollectiveError, match="the ranks call it differently") as caught:
            call(topology.rank)
        assert "Mismatched" in str(caught.value)

    _takes_part(mistaken, topology)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "op": (lambda: comm.all_reduce(torch.ones(1), "avg"), "'avg'.* use one of sum, mean, min, max"),
    "op of a part": (lambda: comm.reduce_scatter(torch.ones(1), "max"), "use one of sum, mean"),
    "no tensor": (lambda: comm.all_reduce(1.0), r"float is not a tensor; torch\.as_tensor"),  # type: ignore[arg-type]
    "root": (
        lambda: comm.broadcast(torch.ones(1), 99),
        "root 99 is not a rank; there are ranks 0 to",
    ),
    "negative root": (lambda: comm.broadcast(torch.ones(1), -1), "root -1 is not a rank"),
    "dtype": (lambda: comm.all_reduce(torch.ones(1, dtype=torch.uint8)), "uint8 cannot be combi"),
    "mean of integers": (lambda: comm.all_reduce(torch.ones(1).int(), "mean"), "is not an integer"),
    "scalar": (lambda: comm.reduce_scatter(torch.ones(())), "a scalar has no parts"),
    "gradient": (lambda: comm.all_gather(torch.ones(1, requires_grad=True)), r"tensor\.detach"),
    "sparse": (lambda: comm.all_reduce(torch.eye(2).to_sparse()), "must be dense"),
    "meta": (lambda: comm.broadcast(torch.ones(1, device="meta")), "have data"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_reported_before_a_collective_begins(topology: Topology, mistake: str) -> None:
    call, message = MISTAKES[mistake]

    def mistaken() -> None:
        with pytest.raises(comm.CollectiveError, match=message) as caught:
            call()
        assert str(caught.value).startswith("comm.")

    # On one rank only; the other ranks do not wait.
    _takes_part(mistaken if topology.rank == 0 else lambda: None, topology)


def test_tensor_that_requires_grad_is_accepted_under_no_grad(topology: Topology) -> None:
    with torch.no_grad():
        assert not comm.all_reduce(torch.ones(1, requires_grad=True)).requires_grad


def _in_a_child(results: Any) -> None:
    try:
        comm.barrier()
        results.put("took part")
    except comm.CollectiveError as error:
        results.put(str(error))


def test_forked_helper_is_refused_a_collective(topology: Topology) -> None:
    if topology.world_size == 1:
        pytest.skip("a single rank does not wait")
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_in_a_child, args=(results,))
    child.start()
    try:
        assert "in a helper process" in results.get(timeout=60)
    finally:
        child.kill()
        child.join()
    comm.barrier()


def test_collective_that_other_ranks_do_not_reach_is_refused(topology: Topology) -> None:
    def mistaken() -> None:
        for number in comm.COLLECTIVES.micro_batches(iter((1, 2, 3)), in_common=2):
            if number < 3:
                comm.barrier()
            elif topology.world_size > 1:
                with pytest.raises(comm.CollectiveError, match="micro-batch 3, where another"):
                    comm.barrier()

    _takes_part(mistaken, topology)


def test_totals_count_calls_and_bytes_and_waiting_is_not_work(
    topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = UserCollectives()
    monkeypatch.setattr(comm, "COLLECTIVES", process)
    process.timer = PhaseTimer(0.0)
    seen: list[str] = []
    process.timer.listen(seen.append)
    process.timer.enter("forward")
    beats, before = heartbeat.HEARTBEAT.read()
    ranks = topology.world_size
    comm.all_reduce(torch.ones(5))
    comm.all_reduce(torch.ones(5, dtype=torch.bfloat16))
    comm.all_gather(torch.ones(3, dtype=torch.int64))
    comm.barrier()
    assert process.timer.phase == "forward" and heartbeat.HEARTBEAT.read()[1] == before
    beats = heartbeat.HEARTBEAT.read()[0] - beats
    found = process.drain()
    if ranks == 1:
        assert found == {} and beats == 0 and process.totals["barrier"] == Usage()
        return
    assert seen == ["forward", *["other", "forward"] * 4]
    assert beats == 2 * 4, "the watchdog is not notified that it waits, or works again"
    counted = {name: (entry["calls"], entry["bytes"]) for name, entry in found.items()}
    assert counted == {"all_reduce": (2, 30), "all_gather": (1, 24 * ranks), "barrier": (1, 0)}
    assert all(0 < entry["seconds"] < 60 for entry in found.values())
    assert process.drain() == {} and process.total_of("bytes")["all_reduce"] == 30
    comm.barrier()
    assert process.drain()["barrier"]["calls"] == 1
