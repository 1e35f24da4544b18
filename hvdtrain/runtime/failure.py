"""How a run ends when a rank cannot go on: all ranks, soon, with one message.

The rank that fails first prints its message and ends the others. Under MPI that is
MPI_Abort; under Gloo it leaves Horovod, whereupon every other rank's pending
collective fails at once, and its launcher ends the rest. A rank whose collective
fails because of another rank keeps quiet, so that the cause stays the last thing on
the screen, unless nobody ends it: then it was the network, and it says so.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from typing import NoReturn

from hvdtrain.errors import EXIT_CRASH
from hvdtrain.log import logger
from hvdtrain.runtime.topology import Topology

# How long a rank that lost the others waits for its launcher to end it.
_QUIET_SECONDS = 6.0
_LEAVE_SECONDS = 2.0


def end_all(error: BaseException, topology: Topology) -> NoReturn:
    """Ends this rank because of `error`, and with it every other; exit code 1."""
    where = f"rank {topology.rank} on {topology.host}"
    logger.handlers[:] = [h for h in logger.handlers if isinstance(h, logging.FileHandler)]
    logger.error("%s: %s", type(error).__name__, error, exc_info=error)
    logging.shutdown()
    if type(error).__name__ == "HorovodInternalError":
        time.sleep(_QUIET_SECONDS)
        _say(f"hvdtrain: {where}: lost the other ranks: {error}")
        os._exit(EXIT_CRASH)
    lines = traceback.format_exception(error)
    _say("".join(lines) + f"hvdtrain: {where}: {type(error).__name__}: {error}")
    if topology.world_size > 1:
        _end_others()
    os._exit(EXIT_CRASH)


def _say(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _end_others() -> None:
    import horovod.torch as hvd

    if hvd.mpi_enabled():
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        time.sleep(0.2)  # lets the launcher forward the message before it ends everything
        MPI.COMM_WORLD.Abort(EXIT_CRASH)
    leaving = threading.Thread(target=hvd.shutdown, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_SECONDS)
