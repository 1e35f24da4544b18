"""End of a job of MPICH or Intel MPI whose rank fails before MPI has started.

Their launcher, Hydra, ends all ranks when a rank calls MPI_Abort, or fails after it has started
MPI. It ignores the exit code of an earlier end, and the other ranks would wait for the rank in
MPI_Init. MPI_Abort itself is a line that is sent to the launcher, and no rank needs MPI for it.
https://github.com/pmodels/mpich/blob/main/src/pmi/src/pmi_v1.c
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

_CONNECTION = "PMI_FD"  # the descriptor of a rank's connection to its launcher


def abort_job(code: int, env: Mapping[str, str] = os.environ) -> None:
    """Ask Hydra to end all ranks with this exit code, unless `taken` was called."""
    if env.get(_CONNECTION, "").isdigit():
        with suppress(OSError):
            os.write(int(env[_CONNECTION]), b"cmd=abort exitcode=%d\n" % code)


def taken(env: MutableMapping[str, str] = os.environ) -> None:
    """Note that MPI has started: it owns the connection and ends the job itself."""
    env.pop(_CONNECTION, None)
