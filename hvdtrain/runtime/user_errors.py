"""Report an error that ends this process: one message, from one rank. Imports no torch."""

from __future__ import annotations

import socket
import time

from hvdtrain.errors import LauncherError, UserError
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.streams import say
from hvdtrain.untrusted import printable_lines

_LET_RANK_0_REPORT = 2.0


def report(error: UserError, stop: StopFlag) -> int:
    """Print an error that ends this process, on one rank; return the exit code."""
    if launched_rank() == 0:
        say(f"hvdtrain: error: {printable_lines(str(error))}")
    elif isinstance(error, LauncherError):
        time.sleep(_LET_RANK_0_REPORT)  # then the launcher may end all processes
    elif not stop.raised_by_launcher():
        # Rank 0 reported nothing: the error exists only on this host.
        where = f"rank {launched_rank()} on {socket.gethostname()}"
        message = printable_lines(f"{where}: {error}")
        say(f"hvdtrain: error: {message}")
    return error.exit_code
