"""Ranks over Gloo, without a launcher, that enqueue all-reduces until one of them is lost."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import time
from multiprocessing.connection import Connection

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer

_GLOO = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_GLOO_IFACE": "lo",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_HOSTNAME": "localhost",
    "HOROVOD_LOG_LEVEL": "fatal",
}
_MOST = 20_000  # number of waiting tensors


def kill_one(seconds: float, timeout: float, process_sets: bool) -> list[str]:
    """Kill the last of the ranks while all of them enqueue.

    Without process sets one of four ranks is not next to the killed rank in a ring: it gets its
    error only if its neighbors close their connections (patch 0003).

    Args:
        seconds: between the first all-reduce and the kill.
        timeout: time limit for each of the other ranks to get an error.
        process_sets: each pair of ranks reduces among itself.

    Returns:
        The name of the error of each other rank; "waits" if it got none.
    """
    size = 3 if process_sets else 4
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.enqueuing"])
    secret = secrets.token_hex(32)
    server = RendezvousServer(0, secret)
    port = server.start()
    server.init([SlotInfo("localhost", r, r, 0, size, size, 1) for r in range(size)])
    env = {
        **_GLOO,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_RENDEZVOUS_SECRET": secret,
        "HOROVOD_DYNAMIC_PROCESS_SETS": str(int(process_sets)),
        "HOROVOD_SHARED_MEMORY": str(int(process_sets)),  # a ring requires sockets
    }
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=_enqueue, args=(rank, size, env, end, process_sets), daemon=True)
        for rank, (_, end) in enumerate(pipes)
    ]
    heard = [pipe for pipe, _ in pipes]
    try:
        for rank in ranks:
            rank.start()
        assert all(pipe.poll(60.0) and pipe.recv() == "began" for pipe in heard)
        time.sleep(seconds)
        ranks[-1].kill()
        return [str(pipe.recv()) if pipe.poll(timeout) else "waits" for pipe in heard[:-1]]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(10)
        server.stop()


def _enqueue(
    rank: int, size: int, env: dict[str, str], end: Connection, process_sets: bool
) -> None:
    place = {"rank": rank, "size": size, "local_rank": rank, "local_size": size}
    os.environ |= env | {f"HOROVOD_{k.upper()}": str(v) for k, v in place.items()}
    os.environ |= {"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"}
    torch.set_num_threads(1)
    hvd.init()
    sets = [hvd.global_process_set]
    if process_sets:
        pairs = [hvd.add_process_set(pair) for pair in ([0, 1], [0, 2], [1, 2])]
        sets = [pair for pair in pairs if rank in pair.ranks]
    handles: list[int] = []
    said = ""
    try:
        while len(handles) < _MOST:
            among = sets[len(handles) % len(sets)]
            name = str(len(handles))
            handles.append(hvd.allreduce_async(torch.ones(4), name=name, process_set=among))
            if len(handles) == 1:
                end.send("began")
    except (HorovodInternalError, ValueError) as error:
        said = type(error).__name__
    for handle in handles:
        try:
            hvd.synchronize(handle)
        except HorovodInternalError as error:
            said = said or type(error).__name__
    end.send(said)
    time.sleep(60.0)  # it is killed
