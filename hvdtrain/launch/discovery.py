"""Probes of hosts: all hosts are probed in parallel, within one timeout.

A driver runs this once a second, so it imports neither torch nor Horovod nor any other library.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import Host
from hvdtrain.launch.mpi import SSH_OPTIONS

# (host name, deadline by time.monotonic()) -> whether the host responds
Probe = Callable[[str, float], bool]
DEFAULT_PROBE = "tcp:22"
_SSH_PORT = 22
# Probes end this long before the caller's deadline.
_SPARE_SECONDS = 0.1


def parse_probe(text: str) -> Probe:
    """Return the probe named by `text`.

    `tcp:PORT`: the port accepts a connection, and on port 22 sends ssh's greeting.
    `ssh`: a command runs on the host, which costs a login each time.

    Raises:
        UserError: `text` is neither.
    """
    kind, _, port = text.partition(":")
    if text == "ssh":
        return _probe_ssh
    if kind == "tcp" and port.isdecimal() and 0 < int(port) < 65536:
        return lambda name, deadline: _probe_tcp(name, int(port), deadline)
    raise UserError(f"--probe {text}: ssh or tcp:PORT is expected, such as {DEFAULT_PROBE}")


def answering(hosts: Sequence[Host], probe: Probe, timeout: float) -> list[Host]:
    """Return the hosts that respond within `timeout` seconds, in the given order.

    This host always counts as responding, under any of its names and addresses.
    """
    end = time.monotonic() + timeout - _SPARE_SECONDS
    others = [host.name for host in hosts if not _is_own_name(host.name)]
    found = passing(others, lambda name: is_this_host(name) or probe(name, end), timeout)
    return [host for host in hosts if _is_own_name(host.name) or host.name in found]


def passing(names: Sequence[str], test: Callable[[str], bool], timeout: float) -> set[str]:
    """Return the hosts that pass a test within `timeout` seconds; all are tested in parallel.

    A test that raises OSError is not passed.
    """
    deadline = time.monotonic() + timeout
    answers: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def ask(name: str) -> None:
        yes = False
        with contextlib.suppress(OSError, UnicodeError):  # raised for a wrong name
            yes = test(name)
        answers.put((name, yes))

    for name in names:
        # A daemon thread: name resolution cannot be interrupted, and must not delay the exit.
        threading.Thread(target=ask, args=(name,), daemon=True).start()
    found = set[str]()
    with contextlib.suppress(queue.Empty):
        for _ in names:
            name, yes = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            found |= {name} if yes else set()
    return found


def is_this_host(name: str) -> bool:
    """Whether a name or an address is this machine's own.

    Raises:
        OSError: it cannot be resolved.
    """
    if _is_own_name(name):
        return True
    found = socket.getaddrinfo(name, _SSH_PORT, type=socket.SOCK_DGRAM)
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own_name(name: str) -> bool:
    own = socket.gethostname()
    return name in ("localhost", own, own.partition(".")[0])


def _is_own(family: int, address: tuple) -> bool:
    """Whether an address is this host's: the kernel would send to it from the address itself."""
    if str(address[0]).startswith("127."):
        return True
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as packet:
        packet.connect(address)  # sends nothing
        return bool(packet.getsockname()[0] == address[0])
    return False


def _probe_tcp(name: str, port: int, deadline: float) -> bool:
    with socket.create_connection((name, port), timeout=_left(deadline)) as connection:
        if port != _SSH_PORT:
            return True
        # A frozen host's kernel still accepts connections; its sshd does not greet.
        connection.settimeout(_left(deadline))
        return connection.recv(4) == b"SSH-"


def _probe_ssh(name: str, deadline: float) -> bool:
    import subprocess

    try:
        done = subprocess.run(
            ["ssh", *SSH_OPTIONS, name, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_left(deadline),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _left(deadline: float) -> float:
    # 0 would mean "do not wait", not "no time left".
    return max(0.01, deadline - time.monotonic())
