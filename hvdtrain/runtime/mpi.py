"""Ranks of an MPI job for work that needs no Horovod, such as preparing data."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hvdtrain.errors import UserError
from hvdtrain.runtime import environment

T = TypeVar("T")


class RankGroup(Protocol):
    """Processes that work together."""

    rank: int
    size: int

    def run(self, part: Callable[[], T]) -> T:
        """Run a part of the work, for which the other ranks may have to wait."""
        ...

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        ...

    def abort(self) -> None:
        """End every rank with exit code 1; return if this is the only rank."""
        ...


class Alone:
    """A single process; MPI, which would need a daemon of its own, is not started."""

    rank = 0
    size = 1

    def run(self, part: Callable[[], T]) -> T:
        return part()

    def gather(self, value: T) -> list[T]:
        return [value]

    def abort(self) -> None:
        pass


class MPIRanks:
    """Processes of an mpi4py communicator."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()

    def run(self, part: Callable[[], T]) -> T:
        return part()

    def gather(self, value: T) -> list[T]:
        return self._communicator.allgather(value)

    def abort(self) -> None:
        self._communicator.Abort(1)


def start_ranks() -> RankGroup:
    """Find the other ranks, if a launcher has started any.

    Raises:
        UserError: the launcher does not use MPI; every rank raises it.
    """
    size = environment.launched_size()
    if size is None or size == 1:
        return Alone()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        raise UserError("this requires MPI: start it with mpirun, or horovodrun --mpi")
    environment.prepare()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(f"mpi4py cannot be loaded: {error}") from None
    ranks = MPIRanks(MPI.COMM_WORLD)
    if ranks.size != size:
        raise UserError(
            f"the launcher started {size} ranks, but MPI sees {ranks.size}: mpi4py uses another "
            "MPI than the launcher, or srun needs --mpi=pmix"
        )
    return ranks


def on_all_ranks(ranks: RankGroup, part: Callable[[], T]) -> list[T]:
    """Run a part of the work that may fail on some ranks only.

    Returns:
        The results of `part` on each rank, in rank order.

    Raises:
        UserError: on every rank, if `part` raised UserError or OSError on any.
    """

    def named() -> T:
        try:
            return part()
        except UserError as error:
            message = str(error)
        except OSError as error:
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        where = f" (rank {ranks.rank} on {socket.gethostname()})" if ranks.size > 1 else ""
        raise UserError(message + where)

    result, message = None, None
    try:
        result = ranks.run(named)
    except UserError as error:
        message = str(error)
    outcomes = ranks.gather((message, result))
    for theirs, _ in outcomes:
        if theirs is not None:
            raise UserError(theirs)
    return [value for _, value in outcomes]  # type: ignore[misc]
