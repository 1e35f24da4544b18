"""Stand-in for a rank that warm.py forks: warm_rank.py DIRECTORY PARENTS -m MODULE [FLAGS].

Uses only the standard library, so that it starts immediately.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


def main(directory: str, parents: str, *arguments: str) -> None:
    """End as the rank ends, with the same signal if a signal ended it."""
    rank = 0
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if rank:
            with suppress(ProcessLookupError):  # it has ended, and its exit code will arrive
                os.kill(rank, number)
        else:
            early.append(number)

    for passed_on in _PASSED_ON:
        signal.signal(passed_on, pass_on)
    number = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"{directory}/{number % int(parents)}")
        request = {
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "processors": sorted(os.sched_getaffinity(0)),
            "arguments": arguments,
        }
        content = json.dumps(request).encode()
        # The connection of a rank to the launcher of MPICH or Intel MPI.
        launcher = [int(os.environ["PMI_FD"])] if "PMI_FD" in os.environ else []
        socket.send_fds(connection, [b"%16d" % len(content)], [0, 1, 2, *launcher])
        connection.sendall(content)
        with connection.makefile("r") as answer:
            rank = int(answer.readline())
            for came in early:
                pass_on(came, None)
            code = int(answer.readline() or 70)
    if code < 0:
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
