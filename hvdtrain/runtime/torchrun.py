"""Ranks that torchrun started, or another launcher of torch's env:// rendezvous, join Horovod.

Horovod's Gloo needs a rendezvous server, which its own launcher would start: rank 0 serves it. The
ranks meet in torch's key-value store at MASTER_ADDR:MASTER_PORT, which torchrun's agent serves:

    rank 0       starts the server, and writes its port and the secret that signs requests
    other ranks  read both, and check that they reach the server
    all ranks    write their host, and read the hosts of all ranks

torchrun starts all ranks again after a failure, or if hosts join or leave, and may keep the store.
A rank may therefore read what an earlier rank 0 wrote; that server is gone, or rejects the
signature, and the rank reads again. What ranks write about themselves has the server's round in its
key.

The store has no authentication: who can connect to it can read the secret (docs/security.md).
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from http.client import HTTPConnection, HTTPException
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from hvdtrain.errors import EXIT_PREEMPTED, LauncherError, UserError, crash
from hvdtrain.runtime import interfaces
from hvdtrain.runtime.environment import TorchRanks, torch_ranks
from hvdtrain.runtime.machine import is_loopback, resolve, source_towards

_WAIT_SECONDS = 300.0  # for the slowest rank: it may import torch from a busy file system
_TICK_SECONDS = 0.1
_RESPONSE_SECONDS = 5.0
_NOT_FOUND = 404
_ANNOUNCED = "rendezvous"


@dataclass(frozen=True)
class RankPlace:
    """Record that a rank writes about itself.

    Args:
        host: name of its host; of its agent, if a host has several.
        local_rank: its rank on this host.
        address: its own address on the route to rank 0.
    """

    host: str
    local_rank: int
    address: str


def join(
    env: MutableMapping[str, str] = os.environ, stop: Callable[[], bool] = lambda: False
) -> None:
    """Set Horovod's variables for ranks and rendezvous if a launcher of torch started this process.

    Args:
        env: this process's environment, changed in place.
        stop: whether this process was asked to stop; it then does not wait any longer.

    Raises:
        UserError: ranks are missing after 300 s, or cannot reach rank 0; exit code 75 after `stop`.
    """
    ranks = torch_ranks(env)
    if ranks is None:
        return
    env.update(
        HOROVOD_RANK=str(ranks.rank),
        HOROVOD_SIZE=str(ranks.size),
        HOROVOD_LOCAL_RANK=str(ranks.local_rank),
        HOROVOD_LOCAL_SIZE=str(ranks.local_size),
    )
    if ranks.size > 1:
        rendezvous = _Rendezvous(env, ranks, stop)
        rendezvous.join()
        atexit.register(rendezvous.close)


class _Rendezvous:
    def __init__(
        self, env: MutableMapping[str, str], ranks: TorchRanks, stop: Callable[[], bool]
    ) -> None:
        self._env, self._ranks, self._stop = env, ranks, stop
        self._name = env["MASTER_ADDR"]
        self._address = resolve(self._name)
        if self._address is None:
            raise crash(f"{socket.gethostname()} cannot resolve MASTER_ADDR={self._name}")
        self._deadline = time.monotonic() + _WAIT_SECONDS
        self._store = self._open_store()

    def join(self) -> None:
        announced = self._serve() if self._ranks.rank == 0 else self._find()
        places = self._gather(announced["round"])
        own = places[self._ranks.rank]
        cross_rank, cross_size = across_hosts(places, self._ranks.rank)
        self._env.update(
            HOROVOD_CROSS_RANK=str(cross_rank),
            HOROVOD_CROSS_SIZE=str(cross_size),
            HOROVOD_HOSTNAME=own.host,
            HOROVOD_GLOO_RENDEZVOUS_ADDR=str(self._address),
            HOROVOD_GLOO_RENDEZVOUS_PORT=str(announced["port"]),
            HOROVOD_RENDEZVOUS_SECRET=announced["secret"],
        )
        interfaces.for_rank(towards_others(str(self._address), places), self._env)

    def close(self) -> None:
        """Close the store, which rank 0 may serve, at the end of the process."""
        del self._store

    def _open_store(self) -> Store:
        port = int(self._env["MASTER_PORT"])
        served = self._env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                self._name,
                port,
                is_master=self._ranks.rank == 0 and not served,
                timeout=timedelta(seconds=_WAIT_SECONDS),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise crash(
                f"{self._where()} cannot open torchrun's store at {self._name}:{port}: {reason}"
            ) from None
        return PrefixStore("hvdtrain", store)

    def _serve(self) -> dict[str, Any]:
        from horovod.runner.common.util import secret
        from horovod.runner.http.http_server import RendezvousServer

        if not hasattr(secret, "RENDEZVOUS_SECRET"):
            raise LauncherError(
                "this Horovod was not built by hvdtrain, and torchrun requires its patches: "
                "`hvdtrain horovod build --install`"
            )
        server = RendezvousServer(secret=secrets.token_hex(32))
        port = server.start()
        server.init([])
        round_ = self._store.add("rounds", 1)
        announced = {"port": port, "secret": server.secret, "round": round_}
        self._store.set(_ANNOUNCED, json.dumps(announced))
        return announced

    def _find(self) -> dict[str, Any]:
        reason = "rank 0 has not started"
        while True:
            if self._store.check([_ANNOUNCED]):
                announced = json.loads(self._store.get(_ANNOUNCED))
                reason = self._why_not(announced["port"], announced["secret"])
                if not reason:
                    return announced
            self._wait(reason)

    def _why_not(self, port: int, secret_key: str) -> str:
        """Why rank 0's server does not serve this rank; "": it does."""
        from horovod.runner.common.util import secret

        path = "/hvdtrain/none"
        where = f"rank 0's rendezvous at {self._name}:{port}"
        server = HTTPConnection(str(self._address), port, timeout=_RESPONSE_SECONDS)
        with closing(server):
            try:
                server.request("GET", path, headers=secret.sign_request(secret_key, "GET", path))
                status = server.getresponse().status
            except (OSError, HTTPException) as error:
                return f"{where} cannot be reached ({error})"
        return "" if status == _NOT_FOUND else f"{where} responds with HTTP status {status}"

    def _gather(self, round_: int) -> list[RankPlace]:
        host = socket.gethostname()
        if "GROUP_RANK" in self._env:
            host += f"-{self._env['GROUP_RANK']}"  # a host may have several agents
        source = source_towards(str(self._address)) or ""
        own = [host, self._ranks.local_rank, source]
        keys = [f"{round_}/{rank}" for rank in range(self._ranks.size)]
        self._store.set(keys[self._ranks.rank], json.dumps(own))
        while not self._store.check(keys):
            self._wait("ranks have not started", keys)
        return [RankPlace(*json.loads(value)) for value in self._store.multi_get(keys)]

    def _wait(self, reason: str, keys: Sequence[str] = ()) -> None:
        """Wait a moment; `keys` of all ranks complete the reason."""
        if self._stop():
            error = UserError(f"{self._where()} was asked to stop before training began")
            error.exit_code = EXIT_PREEMPTED
            raise error
        if time.monotonic() > self._deadline:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            named = f": {', '.join(missing[:8])}" if missing else ""
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise crash(f"{self._where()} waited for {_WAIT_SECONDS:.0f} s: {reason}{named}{more}")
        time.sleep(_TICK_SECONDS)

    def _where(self) -> str:
        return f"rank {self._ranks.rank} on {socket.gethostname()}"


def across_hosts(places: Sequence[RankPlace], rank: int) -> tuple[int, int]:
    """Return this rank's position among the ranks of the same local rank, one of each host."""
    peers = [r for r, place in enumerate(places) if place.local_rank == places[rank].local_rank]
    return peers.index(rank), len(peers)


def towards_others(master: str, places: Sequence[RankPlace]) -> str:
    """Return an address to which the interface of this host leads that other hosts can reach.

    A host may know itself by a loopback address, as Debian's /etc/hosts has it, while the others
    know it by another one.
    """
    if not is_loopback(master):
        return master
    return next((p.address for p in places if p.address and not is_loopback(p.address)), master)
