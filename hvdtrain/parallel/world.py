"""A torch.distributed world of the ranks of one replica of the model."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hvdtrain.log import logger
from hvdtrain.runtime.collectives import RankLostError, gather_json
from hvdtrain.runtime.heartbeat import HEARTBEAT
from hvdtrain.runtime.machine import LOOPBACK, address_towards, addresses_by_interface
from hvdtrain.runtime.mesh import Topology

_CUDA = torch.device("cuda")
_INTERFACE = "HOROVOD_GLOO_IFACE"
# Maximum wait for another rank: to join, and in each collective.
LIMIT = timedelta(minutes=5)
# Time in which ranks that were notified of a failure leave their world on their own, if a peer is
# on another host, which may be unreachable, and if it is on this host, which reports its end.
_GRACE_SECONDS = 0.3
_LOCAL_GRACE_SECONDS = 3.0
# For NCCL in elastic runs, unless the user sets them: by default torch ends the process if a peer
# is lost. The last two shorten its report, whose threads would delay the next generation by a
# minute (watchdog) or by eight (monitor).
_NCCL_OF_ELASTIC_RUNS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def join(
    ranks: Sequence[int], topology: Topology, device: torch.device, elastic: bool = False
) -> None:
    """Create a world of `ranks`, in this order, as torch's default group.

    Every rank of the job calls it, each with the ranks of its own world.

    Args:
        elastic: this process survives the loss of another one, see Connections.
    """
    if elastic and device.type == "cuda":
        for name, value in _NCCL_OF_ELASTIC_RUNS.items():
            os.environ.setdefault(name, value)
    address, interface = own_address(topology)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    rank, size = ranks.index(topology.rank), len(ranks)
    store = None
    if rank == 0:
        store = dist.TCPStore(address, 0, size, True, timeout=LIMIT, wait_for_workers=False)
    stores = gather_json([address, store.port] if store else None, "torch.store")
    with HEARTBEAT.waiting():
        if store is None:
            host, port = stores[ranks[0]]
            store = dist.TCPStore(host, port, size, False, timeout=LIMIT)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LIMIT)


def leave() -> None:
    """Leave the world together with the other ranks.

    Gloo aborts a rank that still communicates when its peer leaves. A process that is in no world,
    such as a spare, does nothing.
    """
    if not dist.is_initialized():
        return
    with HEARTBEAT.waiting(), lost_peers():
        # Over gloo. barrier() may choose a GPU by this rank's number, which is another rank's GPU
        # after a change of the ranks.
        dist.all_reduce(torch.zeros(1))
    abandon()


def abandon() -> None:
    """Leave the world without the other ranks, some of which may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Connections:
    """Connections of this process's world, with which a failed world is left.

    NCCL's collectives are aborted. They end as if they were complete, with incomplete results, so
    Horovod's collectives must already fail: then no rank uses such a result (see Agreement).

    Gloo has no call that cancels pending operations: their connections are shut down instead. When
    a write fails, gloo forgets who waits for it (until `LIMIT`), so no write on either side may
    fail before its reader has reached the connection's end. A peer on this host may be short of
    CPU time just then: this process reads from it until it leaves, too, or dies.
    """

    def __init__(self) -> None:
        self._before = set[int]()  # sockets of this process from before the world
        self._servers = set[int]()  # ports on which this process listened before
        self._own: set[int] | None = set()  # sockets of the world; None: it is being formed
        self._left = threading.Event()
        self._kept: list[socket.socket] = []  # of the world that was left, to read from its peers

    @contextmanager
    def opened(self, ranks: Sequence[int]) -> Iterator[None]:
        """Record the connections that are opened inside the context; every rank calls it.

        The context forms the world, and all groups within it. Sockets that other threads open
        meanwhile do not belong to the world: both ends of its connections are in its processes.

        Args:
            ranks: of the world.
        """
        self._left.clear()
        for connection in self._kept:  # all ranks have left that world
            connection.close()
        self._kept.clear()
        before = _sockets()
        self._before, self._own = set(before.values()), None
        self._servers = {port for port in map(_listens_on, before) if port is not None}
        yield
        ends = {inode: ends for inode, ends in _connected().items() if inode not in self._before}
        connections = gather_json([*ends.values()], "torch.connections")
        others = {(tuple(peer), tuple(own)) for rank in ranks for own, peer in connections[rank]}
        self._own = {inode for inode, ends in ends.items() if ends in others}

    def leave(self) -> None:
        """End the connections, when this process is in no collective: the others' collectives fail.

        The others detect the end; this process still reads from them until they end their side too.
        """
        self._left.set()
        own, self._own = [*self._connections()], set()  # a second call finds none
        self._kept += own
        for connection in own:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _GRACE_SECONDS
        while not all(map(_has_ended, own)) and time.monotonic() < deadline:
            time.sleep(0.005)
        _stop_reading([one for one in own if not _is_local(one) or _has_ended(one)])
        _abort_nccl(_groups())

    def abort(self) -> None:
        """Fail the collectives in progress in this process; any thread may call it.

        Does nothing if the process leaves them promptly on its own.
        """
        if self._left.wait(_GRACE_SECONDS):
            return
        groups = _groups()  # not later: they might be those of the next world
        with ExitStack() as stack:
            own = [stack.enter_context(found) for found in self._connections()]
            _stop_reading([one for one in own if not _is_local(one)])
            _abort_nccl(groups)
            if not self._left.wait(_LOCAL_GRACE_SECONDS - _GRACE_SECONDS):
                _stop_reading(own)

    def _connections(self) -> Iterator[socket.socket]:
        """Connections of the world, each with a new descriptor; no listening sockets.

        While the world is being formed: connections opened since then that no earlier server has
        accepted.
        """
        for descriptor, inode in _sockets().items():
            if inode in self._before or (self._own is not None and inode not in self._own):
                continue
            with suppress(OSError):
                connection = socket.socket(fileno=os.dup(descriptor))
                ends = _ends(connection)
                if ends is None or (self._own is None and ends[0][1] in self._servers):
                    connection.close()
                else:
                    yield connection


_End = tuple[str, int]  # address, port


def _ends(connection: socket.socket) -> tuple[_End, _End] | None:
    """This process's end and the peer's; None: not a TCP connection, or a listening socket."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        own, peer = connection.getsockname(), connection.getpeername()
    except OSError:
        return None
    # A server of both families sees IPv4 addresses as mapped ones.
    (a, p), (b, q) = ((end[0].removeprefix("::ffff:"), end[1]) for end in (own, peer))
    return (a, p), (b, q)


def _is_local(connection: socket.socket) -> bool:
    """Whether the peer is on this host."""
    ends = _ends(connection)
    return ends is not None and ends[0][0] == ends[1][0]


def _connected() -> dict[int, tuple[_End, _End]]:
    """The TCP connections of this process: inode -> their ends."""
    found = {}
    for descriptor, inode in _sockets().items():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            ends = _ends(connection)
            if ends is not None:
                found[inode] = ends
    return found


def _listens_on(descriptor: int) -> int | None:
    """The port on which a socket listens; None: it does not listen."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        inet = found.family in (socket.AF_INET, socket.AF_INET6)
        if inet and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(found.getsockname()[1])
    return None


def _has_ended(connection: socket.socket) -> bool:
    """Whether the peer will write no more, and everything it wrote was read."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _stop_reading(connections: Sequence[socket.socket]) -> None:
    """Shut down reading: gloo then reads the end, and closes the connections."""
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RD)


def _groups() -> list[dist.ProcessGroup]:
    """The world and all groups within it, such as those of a mesh's axes.

    torch has no public list. If it renames this one, a failed elastic run ends in AttributeError;
    tests/single/test_torch_private.py detects it.
    """
    return [*distributed_c10d._world.pg_names]


def _abort_nccl(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort the NCCL collectives of these groups; return when their kernels have ended.

    All groups are aborted at once: an abort waits for the GPU, where the kernel of another group
    may be waiting for its peers. torch's own `_abort_process_group` aborts one after the other, and
    removes the groups from its tables, where the main thread may look for one: it would fail with
    an error that does not name the cause (see lost_peers).
    """
    # _device_types and _get_backend are private, see `_groups`. Gloo serves "cuda", too.
    with_gpus = [group for group in groups if _CUDA in group._device_types]
    nccl = [group for group in with_gpus if group._get_backend(_CUDA).name() == "nccl"]
    aborts = [
        threading.Thread(target=_abort, args=(group,), name="abort", daemon=True) for group in nccl
    ]
    for thread in aborts:
        thread.start()
    for thread in aborts:
        thread.join()


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(_CUDA).abort()
    except RuntimeError as error:
        logger.warning("NCCL did not abort a group: %s", error)


@contextmanager
def lost_peers() -> Iterator[None]:
    """Convert torch's errors about a lost rank of this world to RankLostError.

    Raises:
        RankLostError: as above.
    """
    try:
        yield
    except RankLostError:
        raise
    except RuntimeError as error:
        # Gloo's errors have no class of their own; they name the source file.
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            raise RankLostError(str(error).partition("\n")[0]) from None
        raise


def _sockets() -> dict[int, int]:
    """The open sockets of this process: descriptor -> inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            kind, _, inode = os.readlink(f"/proc/self/fd/{name}").partition(":")
            if kind == "socket":
                found[int(name)] = int(inode.strip("[]"))
    return found


def own_address(topology: Topology) -> tuple[str, str]:
    """This host's address for the other hosts, and its interface; Horovod's interface, if set."""
    interfaces = addresses_by_interface()
    name = os.environ.get(_INTERFACE, "")
    if name in interfaces:
        return interfaces[name][0], name
    several = len(topology.ranks_by_host()) > 1
    address = address_towards(topology.hosts) if several else LOOPBACK
    return address, next(name for name, found in interfaces.items() if address in found)
