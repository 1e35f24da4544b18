"""Copies of shards in the memory of other hosts, between steps: `checkpoint.memory`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hvdtrain.checkpoint.config import MemoryCopiesConfig
from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.parallel.copies import MemoryCopies, buddies
from hvdtrain.parallel.spanned import HeldShard
from hvdtrain.parallel.world import own_address
from hvdtrain.runtime import machine
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.mesh import Topology
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.text import plural

# Versions of each shard that are kept.
_KEPT = 2
_MIB = 1 << 20


class KeepCopies(Callback):
    """Take a copy every `config.every` steps, and after the first step of the generation.

    Comes after all callbacks that may change the state. Every rank constructs it, together.

    Args:
        shard: returns this rank's shard; its live tensors.
        agreement: of the ranks on each update: they wait there for copies, and count ranks whose
            copies are not verified.
        step: step at which the generation begins.
    """

    def __init__(
        self,
        config: MemoryCopiesConfig,
        copies: MemoryCopies,
        shard: Callable[[], HeldShard],
        agreement: Agreement,
        context: RankContext,
        step: int,
    ) -> None:
        self._every = config.every
        self._copies = copies
        self._shard = shard
        self._agreement = agreement
        self._timer = context.timer
        self._taken: int | None = None  # step of the newest copy of this generation
        self._limit = 0.0  # of the wait for it, in seconds; 0: the ranks have waited
        self._warned = False
        topology = context.mesh.topology
        address = own_address(topology)[0]
        port = copies.begin(context.claim, step, address)
        listening = gather_json([address, port], "copies.listening")
        keepers = buddies(topology.hosts, topology.rank, config.copies)
        copies.send_to([(*listening[keeper],) for keeper in keepers])
        agreement.unready = self._unready

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        step, taken = loop.progress.step, self._taken
        if taken is not None and step > taken:
            self._look(taken, loop.topology.rank)
        due = taken is None or step // self._every > taken // self._every
        # Copies of all ranks are of the same steps: they take the next one, or none does.
        if not due or loop.generation_ends or (taken is not None and self._agreement.late):
            return
        with self._timer.inside("checkpoint"):
            self._copies.take(self._shard(), record["step_seconds"], since=taken)
        self._taken, self._limit = step, record["step_seconds"]

    def _look(self, taken: int, rank: int) -> None:
        late = self._agreement.late
        if not late:
            self._copies.complete_step = taken
        elif rank == 0 and not self._warned:
            self._warned = True
            logger.warning(
                "the copies in memory of step %d are not complete after a step (%d of the ranks): "
                "the network is too slow for checkpoint.memory.every %d, and more steps would be "
                "repeated after a loss",
                taken,
                late,
                self._every,
            )

    def _unready(self, step: int) -> bool:
        """Wait at most as long as the last step took; then say whether the copy is unverified."""
        if self._taken is not None and step <= self._taken:
            # The run went back within the generation. No rank has a copy of this step yet.
            self._copies.go_back(step - 1)
            self._taken, self._limit = None, 0.0
        limit, self._limit = self._limit, 0.0
        if limit:
            self._copies.wait(limit)
        return self._copies.unverified

    def close(self) -> None:
        self._copies.leave()


def export(exporter: Exporter, copies: MemoryCopies) -> None:
    """Serve the metrics of this rank's copies."""
    exporter.watch(
        "memory_copy_step",
        "Newest step of which all ranks have verified copies in memory; 0: there is none",
        lambda: copies.complete_step,
    )
    exporter.watch(
        "memory_copy_bytes",
        "Host memory in which this rank keeps copies of shards, its own and other ranks'",
        copies.store.nbytes,
    )
    exporter.watch(
        "memory_copy_seconds",
        "Seconds from the end of a step until the copy of this rank's shard was verified",
        lambda: copies.seconds,
    )
    exporter.watch_total(
        "memory_copy_stall_seconds",
        "Seconds for which steps waited for copies in memory",
        lambda: copies.stall_seconds,
    )


def check_memory(config: MemoryCopiesConfig, topology: Topology, shard_bytes: int) -> None:
    """Check that this host has the memory for its ranks' copies.

    Args:
        shard_bytes: size of a copy of a shard; all ranks' shards are about equal.

    Raises:
        UserError: it does not.
    """
    needs = _memory_of_ranks(config, topology, shard_bytes)
    need = sum(needs[rank] for rank in topology.ranks_by_host()[topology.host])
    free = machine.free_memory()
    if need > free:
        raise UserError(
            f"checkpoint.memory: copies in memory need {need / _MIB:.0f} MiB on {topology.host}, "
            f"which has {free / _MIB:.0f} MiB free: lower checkpoint.memory.copies, or set "
            "checkpoint.memory.every 0"
        )


def log_memory(config: MemoryCopiesConfig, topology: Topology, shard_bytes: int) -> None:
    """Log the memory that copies need, and a lack of hosts; arguments as of check_memory."""
    others = len(topology.ranks_by_host()) - 1
    kept = len(buddies(topology.hosts, topology.rank, config.copies))
    logger.info(
        "checkpoint.memory.every %d: a copy of %.1f MiB per rank, on %s too; %.1f MiB of host "
        "memory per rank",
        config.every,
        shard_bytes / _MIB,
        plural(kept, "other host" if others else "other rank"),
        max(_memory_of_ranks(config, topology, shard_bytes)) / _MIB,
    )
    if others < config.copies:
        where = f"on {plural(others, 'other host')}" if others else "on this host only"
        logger.warning(
            "checkpoint.memory.copies %d: copies are %s, because there are no more hosts",
            config.copies,
            where,
        )


def _memory_of_ranks(config: MemoryCopiesConfig, topology: Topology, shard_bytes: int) -> list[int]:
    """Return the bytes of host memory in which each rank keeps copies."""
    hosts, ranks = topology.hosts, range(topology.world_size)
    kept = Counter(buddy for rank in ranks for buddy in buddies(hosts, rank, config.copies))
    return [_KEPT * shard_bytes * (1 + kept[rank]) for rank in ranks]
