"""Collectives other than gradient synchronization. All ranks must call each, or no rank."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.horovod import HorovodInternalError, hvd
from hvdtrain.runtime.horovod import ProcessSet as ProcessSet
from hvdtrain.runtime.mesh import Grid
from hvdtrain.runtime.tensor_shards import flattened
from hvdtrain.runtime.work import IDLE_TICKS, work

# Another rank is gone, or cannot be reached: no rank starts a collective in this generation.
RankLostError = HorovodInternalError

# Texts of Horovod's ValueError after a shutdown: about itself, and about a process set.
_GONE = ("has not been initialized", "has not been registered", "is shutting down")

_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "min": hvd.Min, "max": hvd.Max}

P = ParamSpec("P")
R = TypeVar("R")

# The slowest supported network for the state transfer: 100 Mbit/s per host.
_LOWEST_BANDWIDTH = 12.5e6  # bytes per second
_GLOO_TIMEOUT_S = 30.0  # Horovod's default
_LARGEST_PIECE = 64 << 20
_SMALLEST_PIECE = 64 << 10
_LONGEST_TURN_S = 30.0
_SAY_SECONDS = 60.0
_LEAVE_SECONDS = 2.0


@contextmanager
def lost_ranks() -> Iterator[None]:
    """Context for the use of process sets, which are gone once Horovod has lost a rank.

    Raises:
        RankLostError: Horovod was shut down.
    """
    try:
        yield
    except ValueError as error:
        if not any(text in str(error) for text in _GONE):
            raise
        raise RankLostError(str(error)) from None


def _waits(collective: Callable[P, R]) -> Callable[P, R]:
    """Decorator that marks this rank as waiting for other ranks, for its watchdog."""

    @wraps(collective)
    def waiting(*args: P.args, **kwargs: P.kwargs) -> R:
        with heartbeat.HEARTBEAT.waiting(), lost_ranks():
            return collective(*args, **kwargs)

    return waiting


@_waits
def broadcast_json(
    value: Any, name: str, root: int = 0, among: ProcessSet = hvd.global_process_set
) -> Any:
    """Return rank `root`'s JSON-serializable `value` on every rank in `among`."""
    if among.size() == 1:
        return value
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()])
    size = hvd.broadcast(length, root, name=f"{name}.size", process_set=among)
    if hvd.rank() != root:
        data = torch.empty(int(size), dtype=torch.uint8)
    broadcast_tensors({"json": data}, name, root, among)
    return json.loads(data.numpy().tobytes())


@_waits
def gather_json(value: Any, name: str) -> list[Any]:
    """Return every rank's `value`, in rank order, on every rank."""
    if hvd.size() == 1:
        return [value]
    line = f"{json.dumps(value)}\n".encode()  # the only line break
    rows = hvd.allgather(torch.frombuffer(bytearray(line), dtype=torch.uint8), name=name)
    return [json.loads(theirs) for theirs in rows.numpy().tobytes().splitlines()]


@_waits
def gather_bytes(value: bytes, name: str) -> list[bytes]:
    """Return every rank's `value`, which has the same length on all ranks, in one collective."""
    if hvd.size() == 1:
        return [value]
    row = torch.frombuffer(bytearray(value), dtype=torch.uint8).unsqueeze(0)
    return [bytes(theirs.tolist()) for theirs in hvd.allgather(row, name=name)]


@_waits
def broadcast_tensors(
    tensors: dict[str, Tensor],
    name: str,
    root: int = 0,
    among: ProcessSet = hvd.global_process_set,
) -> None:
    """Overwrite the tensors, of the same names and shapes on every rank, with rank `root`'s.

    They are sent in chunks, because Gloo's timeout applies to the whole path of a chunk.

    Args:
        among: the ranks, all of which call this function.
    """
    if among.size() == 1:
        return
    most = _ranks_of_a_host(f"{name}.ranks", among)
    most = among.size() if most == hvd.size() else min(most, among.size() - 1)
    timeout = float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS") or _GLOO_TIMEOUT_S)
    size = chunk_bytes(timeout, among.size(), most)
    sent = []
    for key, tensor in sorted(tensors.items()):
        # As bytes: Horovod supports fewer dtypes than torch, for example no complex ones.
        data = flattened(tensor).view(torch.uint8)
        handles = [
            hvd.broadcast_async_(piece, root, name=f"{name}.{key}.{number}", process_set=among)
            for number, piece in enumerate(data.split(size) if data.numel() else ())
        ]
        sent.append((tensor, data, handles))
    for tensor, data, handles in sent:
        for handle in handles:
            hvd.synchronize(handle)
        if data.data_ptr() != tensor.data_ptr():  # it was not contiguous
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def chunk_bytes(timeout_seconds: float, world_size: int, ranks_of_a_host: int) -> int:
    """Return the largest size of a broadcast in bytes that takes at most half of the timeout.

    Gloo broadcasts down a binomial tree: the root sends to depth = ceil(log2(world_size)) ranks
    at once, the first receivers to depth - 1 more, and so on. Therefore depth + ... + 1 copies
    follow each other on the path to the last rank, and the ranks of a host, which forward at
    the same time, share its 100 Mbit/s. (Gloo's ring all-reduce needs no such limit: it waits for
    segments of 1 MiB, and its all-gather for one rank's data.)
    """
    if ranks_of_a_host == world_size:
        return _LARGEST_PIECE  # no network
    depth = (world_size - 1).bit_length()
    copies = ranks_of_a_host * max(1, depth * (depth + 1) // 2)
    size = int(timeout_seconds / 2 * _LOWEST_BANDWIDTH / copies)
    return min(max(size, _SMALLEST_PIECE), _LARGEST_PIECE)


def _ranks_of_a_host(name: str, among: hvd.ProcessSet) -> int:
    """Return the most ranks on any host, counting all ranks: no fewer than its ranks in `among`."""
    own = torch.tensor(hvd.local_size())
    return int(hvd.allreduce(own, op=hvd.Max, name=name, process_set=among))


@_waits
def sum_(values: Tensor, name: str) -> Tensor:
    """Return the sum over the ranks."""
    return _sum(values, name)


def _sum(values: Tensor, name: str) -> Tensor:
    return values if hvd.size() == 1 else hvd.allreduce(values, op=hvd.Sum, name=name)


@_waits
def reduce(values: Tensor, op: str, name: str) -> Tensor:
    """Return the elementwise sum, mean, min or max over the ranks."""
    return hvd.allreduce(values, op=_OPS[op], name=name)


@_waits
def gather_rows(rows: Tensor, name: str) -> Tensor:
    """Return the rows (N, ...) of all ranks, in rank order; N may differ between ranks."""
    return hvd.allgather(rows, name=name)


@_waits
def reduce_scatter(values: Tensor, op: str, name: str) -> Tensor:
    """Return this rank's shard, along the first dimension, of the sum or mean over the ranks."""
    return hvd.reducescatter(values, op=_OPS[op], name=name)


@_waits
def check_same_shape(tensor: Tensor, name: str) -> None:
    """Check before a transfer in chunks, whose number depends on the shape.

    Raises:
        RankLostError: shapes or dtypes differ; on all ranks, with Horovod's wording.
    """
    here = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    codes = torch.tensor([here, -here])
    highest, lowest = hvd.allreduce(codes, op=hvd.Max, name=f"{name}.shape").tolist()
    if highest != -lowest:
        raise RankLostError(
            f"Mismatched tensors: {tensor.dtype} of shape {list(tensor.shape)} on rank "
            f"{hvd.rank()}, something else on another"
        )


@_waits
def completed(handle: int) -> Tensor:
    """Wait for a collective that was begun earlier and return its result; `handle`: Horovod's."""
    return hvd.synchronize(handle)


def begin_sum(values: Tensor, name: str) -> int:
    """Begin to replace `values` by their sum over the ranks; see `completed`.

    It is never summed in one buffer with other tensors that are ready (environment.prepare): with
    three or more ranks, its rounding may depend on the position in the buffer, and which tensors
    are ready depends on timing.
    """
    return hvd.allreduce_async_(values, op=hvd.Sum, name=name)


def begin_adasum(vectors: Sequence[Tensor], name: str) -> int:
    """Begin to replace each of `vectors` by its Adasum over the ranks; see `completed`."""
    return hvd.grouped_allreduce_async_(vectors, op=hvd.Adasum, name=name)


def begin_gather(row: Tensor, name: str) -> int:
    """Begin to gather a row (1 x N) of each rank into a table (ranks x N); see `completed`."""
    return hvd.allgather_async(row, name=name)


class AgreedError(UserError):
    """An error of at least one rank, raised on all ranks: they end together, and one reports it."""

    def __init__(self, message: str, exit_code: int, rank: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.rank = rank


def on_all_ranks(name: str, part: Callable[[], R]) -> R:
    """Run a part that may fail on some ranks only; then either all ranks continue or none does.

    The part may take any time on any rank as long as it makes progress, such as reading a large
    checkpoint on rank 0.

    Args:
        name: name of the collective; identical on all ranks.

    Returns:
        The result of `part` on this rank.

    Raises:
        AgreedError: on every rank, if `part` raised UserError on any; with the error of the
            lowest such rank.
        RankLostError: another rank is gone.
    """
    result, error = None, None
    vote = _FailureVote(name)
    try:
        result = part()
    except UserError as failure:
        error = failure
    except BaseException:
        vote.abandon()
        raise
    if vote.failures(failed=error is not None):
        _raise_first(error, name)
    return result  # type: ignore[return-value]


def _raise_first(error: UserError | None, name: str) -> None:
    own = None if error is None else [str(error), error.exit_code]
    for rank, theirs in enumerate(gather_json(own, name)):
        if theirs is not None:
            raise AgreedError(theirs[0], theirs[1], rank)


class _FailureVote:
    """Barrier at the end of a part that also counts the ranks on which the part failed.

    Until the last rank has finished, the ranks vote every 30 s whether a rank is still working:
    Horovod reports a rank that takes no part in a collective after 60 s, and ends the run after
    900 s. A thread votes, and only while the part makes progress, so that this limit applies to a
    rank that hangs. A watchdog detects a hang earlier, but there may be no watchdog, or its limit
    may be disabled. Ranks log each minute what they wait for.

    Args:
        name: name of the collective; identical on all ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = self._began = time.monotonic()
        self._seen: tuple[int, int, float] | None = None  # heartbeats, work, when
        self._finished = threading.Event()
        self._failed = self._abandoned = False
        self._failures: Future[int] = Future()
        self._thread = threading.Thread(target=self._vote_until_finished, name="turns", daemon=True)
        with lost_ranks():
            self._alone = hvd.size() == 1
            self._first = hvd.rank() == 0
        if not self._alone:
            self._thread.start()

    def failures(self, failed: bool) -> int:
        """Wait for all ranks; return the number of ranks on which the part failed.

        Raises:
            RankLostError: another rank is gone.
        """
        self._failed = failed
        self._finished.set()
        if self._alone:
            return int(failed)
        with heartbeat.HEARTBEAT.waiting():
            while not wait([self._failures], _SAY_SECONDS).done:
                self._say("waiting for other ranks")
            return self._failures.result()

    def abandon(self) -> None:
        """Stop voting: another error has ended the part on this rank."""
        self._abandoned = True
        self._finished.set()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_SECONDS)

    def _vote_until_finished(self) -> None:
        try:
            # 0: no limit for a missing rank.
            limit = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0)) or math.inf
            interval, unfinished = min(limit / 3, _LONGEST_TURN_S), 1
            while unfinished:
                while not (finished := self._finished.wait(interval)):
                    if self._progresses():
                        self._say("still working")
                        break
                    self._say("no progress; other ranks may wait for this one")
                if self._abandoned:
                    return
                with lost_ranks():
                    votes = torch.tensor([not finished, finished and self._failed]).int()
                    unfinished, failures = _sum(votes, f"{self._name}.failures").tolist()
            self._failures.set_result(failures)
        except BaseException as error:  # raised in the thread that waits for the result
            self._failures.set_exception(error)

    def _progresses(self) -> bool:
        """Whether the part has advanced or worked since the last call; true if unknown."""
        if heartbeat.HEARTBEAT.judged:
            return True  # only the watchdog knows how long the user lets a rank wait
        before = self._seen
        try:
            self._seen = heartbeat.HEARTBEAT.read()[0], work(os.getpid()), time.monotonic()
        except OSError:  # no /proc
            return True
        if before is None:
            return True
        beats, done, seconds = (a - b for a, b in zip(self._seen, before, strict=True))
        return beats != 0 or abs(done) > IDLE_TICKS * seconds

    def _say(self, what: str) -> None:
        """Log at most once a minute; before logs are open, only rank 0's warnings are visible."""
        now = time.monotonic()
        if now - self._said >= _SAY_SECONDS:
            self._said = now
            level = logging.WARNING if self._first else logging.INFO
            logger.log(level, "%s: %s (%.0f s so far)", self._name, what, now - self._began)


# --- process sets -------------------------------------------------------------


def set_of_shard(grid: Grid, rank: int) -> ProcessSet:
    """Return the set of ranks with the same shard as `rank`; all ranks call it identically.

    Requires HOROVOD_DYNAMIC_PROCESS_SETS=1 (environment.prepare), because the sets depend on the
    ranks' hosts.
    """
    if grid.replica_size == 1 or grid.replicas == 1:
        return hvd.global_process_set
    groups = [sorted(grid.same_shard(first)) for first in grid.replica_of(grid.ranks[0])]
    with lost_ranks():
        sets = {tuple(group): _set_of(group) for group in groups}
    return next(found for group, found in sets.items() if rank in group)


@contextmanager
def passing_set(ranks: Sequence[int]) -> Iterator[ProcessSet]:
    """Context with a temporary set of these ranks; all ranks call it identically.

    Raises:
        RankLostError: another rank is gone.
    """
    if len(ranks) == hvd.size():
        yield hvd.global_process_set
        return
    with lost_ranks():
        made = hvd.add_process_set([*ranks])
    yield made
    with lost_ranks():
        hvd.remove_process_set(made)


def _set_of(ranks: list[int]) -> ProcessSet:
    """Return a new set, or an earlier model's set: Horovod rejects two sets of the same ranks."""
    from horovod.common import process_sets

    for number, known in process_sets._basics._get_process_set_ids_and_ranks().items():
        if sorted(known) == ranks:
            found = ProcessSet(ranks)
            found.process_set_id = number
            return found
    return hvd.add_process_set(ranks)
