"""The ranks of an MPI job for work that needs no Horovod, such as preparing data."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hvdtrain.errors import UserError
from hvdtrain.runtime import environment

T = TypeVar("T")


class Ranks(Protocol):
    """All processes that work together."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks, on every rank."""
        ...

    def abort(self) -> None:
        """Ends every rank with exit code 1; returns where there is only this one."""
        ...


class Alone:
    """One process; MPI is not started, which would need a daemon of its own."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def abort(self) -> None:
        pass


class MPIRanks:
    """The processes of an MPI communicator of mpi4py."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank: int = communicator.Get_rank()
        self.size: int = communicator.Get_size()

    def gather(self, value: T) -> list[T]:
        return self._communicator.allgather(value)

    def abort(self) -> None:
        self._communicator.Abort(1)


def start_ranks() -> Ranks:
    """Finds the other ranks, if a launcher started some.

    Raises:
        UserError: the launcher is not one of MPI; every rank raises it.
    """
    size = environment.launched_size()
    if size is None or size == 1:
        return Alone()
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        raise UserError("this needs MPI's ranks: start it with mpirun, or horovodrun --mpi")
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


def on_all_ranks(ranks: Ranks, part: Callable[[], T]) -> list[T]:
    """Runs a part of the work that may fail on some ranks and not on others.

    Returns:
        What `part` returned on each rank, in the order of the ranks.

    Raises:
        UserError: on every rank, if `part` raised UserError or OSError on any.
    """
    result, message = None, None
    try:
        result = part()
    except UserError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if message is not None and ranks.size > 1:
        message += f" (rank {ranks.rank} on {socket.gethostname()})"
    outcomes = ranks.gather((message, result))
    for theirs, _ in outcomes:
        if theirs is not None:
            raise UserError(theirs)
    return [value for _, value in outcomes]  # type: ignore[misc]
