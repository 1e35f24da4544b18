"""Which hosts answer right now. All are asked at once; nobody waits longer than the timeout.

Read by a driver once a second: neither torch nor horovod, and no library, is imported.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from hvdtrain.errors import UserError
from hvdtrain.launch.commands import SSH_OPTIONS
from hvdtrain.launch.hostfile import Host

# (host name, time.monotonic() by which to be done) -> does it answer?
Probe = Callable[[str, float], bool]
DEFAULT_PROBE = "tcp:22"
_SSH_PORT = 22
# Looking up, and any thread that is stuck in it, ends before the caller's time does.
_SPARE_SECONDS = 0.1


def parse_probe(text: str) -> Probe:
    """`tcp:PORT`: the port accepts a connection, and on port 22 sends ssh's greeting.
    `ssh`: a command runs there, which costs a login each time.

    Raises:
        UserError: it is neither.
    """
    kind, _, port = text.partition(":")
    if text == "ssh":
        return _probe_ssh
    if kind == "tcp" and port.isdecimal() and 0 < int(port) < 65536:
        return lambda name, deadline: _probe_tcp(name, int(port), deadline)
    raise UserError(f"--probe {text}: ssh or tcp:PORT is expected, such as {DEFAULT_PROBE}")


def answering(hosts: Sequence[Host], probe: Probe, timeout: float) -> list[Host]:
    """The hosts that answer within `timeout` seconds, in the given order.

    This very host always does, under any of its names and addresses.
    """
    deadline = time.monotonic() + timeout
    answers: queue.SimpleQueue[tuple[Host, bool]] = queue.SimpleQueue()

    def ask(host: Host) -> None:
        yes = False
        with contextlib.suppress(OSError, UnicodeError):  # what a wrong name raises
            yes = is_this_host(host.name) or probe(host.name, deadline - _SPARE_SECONDS)
        answers.put((host, yes))

    asked = [host for host in hosts if not _is_own_name(host.name)]
    for host in asked:
        # A daemon: resolving a name cannot be interrupted, and must not keep this process.
        threading.Thread(target=ask, args=(host,), daemon=True).start()
    alive = set(hosts) - set(asked)
    for _ in asked:
        try:
            host, yes = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if yes:
            alive.add(host)
    return [host for host in hosts if host in alive]


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
    """What the kernel would send from, to reach itself, is the address itself."""
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
