"""Check that a process survives the loss of its peer in torch's NCCL groups, on one GPU.

`python -m tests.gpu.nccl_abort [--device cpu]` prints one line per check and exits with 0 or 1. It
needs no Horovod. Both processes use the same GPU: NCCL_HOSTID gives each a host name of its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.parallel import world
from hvdtrain.parallel.world import Connections, abandon, join, leave, lost_peers
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.mesh import Topology

LIMIT_SECONDS = 120.0
ABORT_SECONDS = 10.0  # NCCL's abort takes about one second
WATCHDOG_SECONDS = 10.0  # torch's watchdog notices a lost peer earlier


def _say(check: str, seconds: float, most: float, seen: str) -> None:
    print(f"{'ok' if seconds < most else 'FAILED'}: {check}: {seconds:.1f} s {seen}", flush=True)
    assert seconds < most, check


class Process:
    """One of two processes, which exchange facts through files instead of Horovod."""

    def __init__(self, rank: int, directory: Path, device: torch.device) -> None:
        self.rank, self._directory, self.device = rank, directory, device
        self._calls = 0
        self._ranks = [0, 1]
        self.connections = Connections()
        self.groups: list[Any] = []
        world.gather_json = self._gather

    def _gather(self, value: Any, name: str) -> list[Any]:
        self._calls += 1
        own = self._directory / f"{self._calls}.{self.rank}"
        own.with_suffix(".new").write_text(json.dumps(value))
        own.with_suffix(".new").rename(own)
        paths = [self._directory / f"{self._calls}.{rank}" for rank in self._ranks]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        return [json.loads(path.read_text()) for path in paths]

    def form(self, ranks: list[int]) -> None:
        """Form a world with a group within it, and use both."""
        self._ranks = ranks
        topology = Topology(self.rank, len(ranks), self.rank, len(ranks), ("one",) * len(ranks))
        with self.connections.opened(ranks):
            join(ranks, topology, self.device, elastic=True)
            self.groups = [dist.group.WORLD, dist.new_group(ranks)]
        assert self.sums() == [len(ranks)] * 2, self.sums()

    def sums(self) -> list[float]:
        """Return a sum of ones over each group."""
        ones = [torch.ones(1, device=self.device) for _ in self.groups]
        for one, group in zip(ones, self.groups, strict=True):
            dist.all_reduce(one, group=group)
        return [float(one) for one in ones]

    def fail(self) -> str:
        """Begin collectives in which the peer takes no part; return the error that ends them."""
        began: list[float] = []

        def abort() -> None:
            began.append(time.monotonic())
            self.connections.abort()

        threading.Timer(1.0, abort).start()
        seen = ""
        try:
            with lost_peers():
                seen = f"(first result {self.sums()}) "
                self.sums()
        except RankLostError as error:
            seen += str(error)[:100]
        else:
            raise AssertionError(f"the collectives of an aborted group succeed: {seen}")
        _say("collectives end after an abort", time.monotonic() - began[0], ABORT_SECONDS, seen)
        return seen

    def leave_failed(self) -> None:
        began = time.monotonic()
        self.connections.leave()
        abandon()
        _say("an aborted world is left", time.monotonic() - began, ABORT_SECONDS, "")


def _rank_0(own: Process, peer: int) -> None:
    own.form([0, 1])
    own.fail()
    own.leave_failed()
    began = time.monotonic()
    own.form([0, 1])
    _say("the next world is formed", time.monotonic() - began, 30.0, "")
    os.kill(peer, signal.SIGKILL)
    one = torch.ones(1, device=own.device)
    with suppress(RankLostError), lost_peers():
        dist.all_reduce(one, group=own.groups[1])  # on a GPU it returns at once
    time.sleep(WATCHDOG_SECONDS)
    print("ok: torch's watchdog does not end a process whose peer is killed", flush=True)
    own.leave_failed()
    own.form([0])
    leave()
    print("ok: a world of the survivor is formed", flush=True)


def _rank_1(own: Process) -> None:
    own.form([0, 1])
    time.sleep(3.0)  # as if it were stopped, while rank 0 waits
    own.leave_failed()
    own.form([0, 1])
    time.sleep(LIMIT_SECONDS)  # until it is killed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    device = torch.device(arguments.device)
    rank = 0 if arguments.directory is None else 1
    os.environ["NCCL_HOSTID"] = f"host{rank}"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank:
        _rank_1(Process(1, arguments.directory, device))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "tests.gpu.nccl_abort", "--device", arguments.device]
        peer = subprocess.Popen([*command, "--directory", directory])
        try:
            _rank_0(Process(0, Path(directory), device), peer.pid)
        finally:
            peer.kill()
            peer.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
