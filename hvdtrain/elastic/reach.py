"""Which hosts this host cannot connect to, after a rendezvous has failed.

Every rank of a generation connects to the others, so it cannot form with two hosts between which
packets are lost. Horovod does not say which connection failed. A rank listens during a rendezvous
and reports its place; if the rendezvous fails twice in a row, one rank of each host tries to
connect to a rank of each other host, and reports the hosts that do not answer.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from hvdtrain.runtime import interfaces

_BACKLOG = 4096  # each host makes one connection; the kernel may allow fewer than this
_ANSWER_SECONDS = 0.1  # after a connection could not be accepted
_END_SECONDS = 5.0
_CONNECT_SECONDS = 2.5  # the kernel sends a lost first packet again after 1 s
# A host that refuses the connection is reached: the rank may have ended, or left the rendezvous.
_REACHED = (0, errno.ECONNREFUSED, errno.ECONNRESET)


@contextmanager
def listening() -> Iterator[tuple[str, int] | None]:
    """Context in which other hosts can connect to this rank; its address and port, if it can."""
    with ExitStack() as stack:
        try:
            address = interfaces.own_address()
            listener = stack.enter_context(socket.create_server((address, 0), backlog=_BACKLOG))
            answers = threading.Thread(target=_answer, args=(listener,), name="reach", daemon=True)
            answers.start()
        except (OSError, RuntimeError):  # no free descriptor or thread: the rendezvous goes ahead
            yield None
            return
        try:
            yield address, listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answers.join(_END_SECONDS)


def _answer(listener: socket.socket) -> None:
    """Accept and close connections until the listener is shut down: its queue may be short."""
    while True:
        try:
            listener.accept()[0].close()
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EBADF):  # it is shut down, or closed
                return
            time.sleep(_ANSWER_SECONDS)


def unreachable(places: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """Return the hosts to which this host cannot connect; at most 2.5 s.

    Args:
        places: host -> address and port at which a rank of it listens.
    """
    found: list[str] = []
    with selectors.PollSelector() as selector, ExitStack() as stack:
        for host, (address, port) in places.items():
            try:
                probe = stack.enter_context(socket.socket())
            except OSError:  # no free descriptor: this says nothing of the other hosts
                break
            probe.setblocking(False)
            error = probe.connect_ex((address, port))
            if error == errno.EINPROGRESS:
                selector.register(probe, selectors.EVENT_WRITE, (host, probe))
            elif error not in _REACHED:
                found.append(host)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                host, probe = key.data
                selector.unregister(probe)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _REACHED:
                    found.append(host)
        found += [key.data[0] for key in selector.get_map().values()]
    return tuple(found)
