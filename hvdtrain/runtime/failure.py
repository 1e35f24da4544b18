"""End of a run when a rank cannot continue: all ranks end soon, with one message.

The rank that fails first prints its message and ends the others. Under MPI it calls
MPI_Abort. Under Gloo it leaves Horovod, so every other rank's pending collective fails
at once, and the launcher ends the ranks. A rank whose collective fails because of another
rank prints nothing, so that the cause stays the last line on the screen. If no launcher ends
that rank, the network has failed, and the rank prints an error.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from typing import NoReturn

from hvdtrain.errors import EXIT_CRASH, UnsupportedTaskError, UserError
from hvdtrain.log import logger
from hvdtrain.runtime.device import without_kernel
from hvdtrain.runtime.horovod import HorovodInternalError, hvd
from hvdtrain.runtime.memory import explained
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.signals import restore_default
from hvdtrain.streams import flush, say

# How long a rank that lost the others waits for its launcher to end it.
_QUIET_SECONDS = 6.0
# Time for the other ranks to block in the next exchange and for their output to be forwarded,
# so that the message is the last line on the screen.
_SETTLE_SECONDS = 0.3
# Time for a launcher to forward the message before it receives the abort and ends all ranks.
_FLUSH_SECONDS = 0.2
_LEAVE_SECONDS = 2.0
_SHUTDOWN_SECONDS = 10.0  # all ranks shut down at the same time
_EXIT_INTERRUPTED = 130


def abort_all_ranks(error: BaseException, topology: Topology) -> NoReturn:
    """End this rank because of `error`, and all other ranks with it.

    The exit code is 1, the UserError's own code, or 130 after Ctrl-C.
    """
    where = f"rank {topology.rank} on {topology.host}: "
    files: list[logging.Handler] = [
        h for h in logger.handlers if isinstance(h, logging.FileHandler)
    ]
    logger.handlers[:] = files or [logging.NullHandler()]  # without any, logging writes to stderr
    logger.error("%s: %s", type(error).__name__, error, exc_info=error)
    logging.shutdown()
    error = without_kernel(error) or error
    # From here on a launcher's SIGTERM ends this rank at once, and a data worker that ends (torch
    # handles SIGCHLD) raises no error.
    for number in (signal.SIGTERM, signal.SIGCHLD):
        restore_default(number)
    code = EXIT_CRASH
    if isinstance(error, HorovodInternalError):
        time.sleep(_QUIET_SECONDS)
        _say(f"hvdtrain: error: {where}lost the other ranks: {error}")
        os._exit(code)
    time.sleep(_SETTLE_SECONDS)
    if isinstance(error, KeyboardInterrupt):
        code = _EXIT_INTERRUPTED
        if topology.rank == 0:
            _say("hvdtrain: interrupted")
    elif isinstance(error, UserError):
        code = error.exit_code
        if isinstance(error, UnsupportedTaskError) and topology.rank > 0:
            time.sleep(_QUIET_SECONDS)  # rank 0 reports the same, and ends this rank
        _say(f"hvdtrain: error: {where}{error}")
    elif explanation := explained(error):
        _say(f"hvdtrain: error: {where}{explanation}")
    else:
        lines = "".join(traceback.format_exception(error))
        _say(f"{lines}hvdtrain: error: {where}{type(error).__name__}: {error}")
    if topology.world_size > 1:
        _end_others(code)
    os._exit(code)


def force_exit(code: int) -> NoReturn:
    """End this rank although a library hangs, for which a normal exit would wait."""
    flush()
    leave_horovod()
    os._exit(code)


_left_mpi = False


def check_not_left_mpi() -> None:
    """Check that this process has not left MPI, which cannot start twice in a process.

    Raises:
        UserError: it has.
    """
    if _left_mpi:
        raise UserError(
            "a second run began in a process whose first run has ended, but MPI cannot be started "
            "twice: start one mpirun for each run, or start this script with horovodrun --gloo"
        )


def leave_horovod(seconds: float = _SHUTDOWN_SECONDS) -> None:
    """Shut Horovod down; wait for `seconds` at most, as it waits for the other ranks."""
    global _left_mpi
    _left_mpi = _left_mpi or bool(hvd.is_initialized() and hvd.mpi_enabled())
    leaving = threading.Thread(target=hvd.shutdown, daemon=True)
    leaving.start()
    leaving.join(seconds)


def _say(message: str) -> None:
    flush()
    say(message)


def _end_others(code: int) -> None:
    if hvd.mpi_enabled():
        import mpi4py

        # Horovod has initialized MPI; mpi4py only provides MPI_Abort.
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        time.sleep(_FLUSH_SECONDS)
        MPI.COMM_WORLD.Abort(code)
    leave_horovod(_LEAVE_SECONDS)
