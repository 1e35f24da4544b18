"""A torch.distributed world of a few processes on this machine, for one function."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# A process that has imported these forks the ranks: unlike pytest, it runs no threads.
_PRELOAD = ["torch.distributed.tensor", "torch.distributed.fsdp", "hvdtrain.models.gpt"]


def on_torch_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0
) -> list[Any]:
    """Call `function(*args)` on each rank of a gloo world of `size`, with one thread each.

    Args:
        function: function of an importable module; it uses torch.distributed's default group.
        args: picklable, like the result.
        timeout: seconds for everything.

    Returns:
        Each rank's result, in rank order.

    Raises:
        AssertionError: a rank failed (with its traceback), or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as directory:
        ranks, ends = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            target = (there, Path(directory) / "store", rank, size, timeout, function, args)
            process = context.Process(target=_rank, args=target, daemon=True)
            process.start()
            there.close()
            ranks.append(process)
            ends.append(here)
        try:
            return [_result(rank, end, deadline) for rank, end in enumerate(ends)]
        finally:
            for process in ranks:
                process.kill()
                process.join(10)


def _rank(
    end: Connection,
    store: Path,
    rank: int,
    size: int,
    timeout: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size,
            timeout=limit,
        )  # fmt: skip
        end.send((True, function(*args)))
        dist.barrier()  # gloo fails a rank that still communicates when its peer ends
    except BaseException:
        end.send((False, traceback.format_exc()))


def _result(rank: int, end: Connection, deadline: float) -> Any:
    assert end.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} has not ended in time"
    try:
        good, value = end.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without a result") from None
    assert good, f"rank {rank}: {value}"
    return value
