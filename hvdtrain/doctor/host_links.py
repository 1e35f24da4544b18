"""On a host: real listeners, and attempts to reach the listeners of other hosts.

Ranks and launchers use TCP. UDP only serves to send a packet of a known size that the network
must not fragment.
"""

from __future__ import annotations

import errno
import selectors
import socket
import statistics
import threading
import time
from contextlib import suppress
from typing import Any

_CONNECT_SECONDS = 2.0
_IDLE_SECONDS = 20.0
_BLOCK = bytes(1 << 18)
_PINGS = 50
_PING, _SINK = b"p", b"s"
_DATAGRAM_SECONDS, _DATAGRAMS = 0.3, 3
_UDP_HEADERS = 28  # IPv4 and UDP headers
# linux/in.h: never fragment, whatever the kernel assumes about the path.
_IP_MTU_DISCOVER, _PROBE = 10, 3


def listen(ranges: dict[str, list[int]]) -> dict[str, Any]:
    """Open listeners on all addresses, until the agent ends.

    Args:
        ranges: name -> [first port, last port, number of listeners].

    Returns:
        ports: name -> listening ports; stream, udp: the ports of `stream` and `packet`.
    """
    waiting = selectors.DefaultSelector()
    ports: dict[str, list[int]] = {}
    for name, (first, last, count) in ranges.items():
        opened = [_open(first, last, n, count) for n in range(count)]
        for listener in filter(None, opened):
            waiting.register(listener, selectors.EVENT_READ)
            ports.setdefault(name, []).append(listener.getsockname()[1])
    stream = socket.create_server(("", 0), backlog=64)
    echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    echo.bind(("", 0))
    for serve, what in ((_accept, waiting), (_serve_streams, stream), (_echo, echo)):
        threading.Thread(target=serve, args=(what,), daemon=True).start()
    return {"ports": ports, "stream": stream.getsockname()[1], "udp": echo.getsockname()[1]}


def _open(first: int, last: int, number: int, count: int) -> socket.socket | None:
    """Listen on the first free port in the `number`-th of `count` equal parts of a range."""
    size = (last - first + 1) / count
    for port in range(first + int(number * size), first + int((number + 1) * size)):
        with suppress(OSError):
            return socket.create_server(("", port), backlog=64)
    return None


def _accept(waiting: selectors.BaseSelector) -> None:
    while waiting.get_map():
        for key, _ in waiting.select():
            with suppress(OSError):
                key.fileobj.accept()[0].close()  # type: ignore[union-attr]


def reach(address: str, ports: list[int]) -> dict[str, str]:
    """Port -> "" if its listener accepts, else the failure; all ports at once."""
    found: dict[str, str] = {}

    def attempt(port: int) -> None:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except TimeoutError:
            found[str(port)] = "no answer"
        except ConnectionRefusedError:
            found[str(port)] = "refused"
        except OSError as error:
            found[str(port)] = error.strerror or str(error)
        else:
            found[str(port)] = ""

    threads = [threading.Thread(target=attempt, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def packet(address: str, port: int, mtu: int) -> str:
    """Send a packet of `mtu` bytes and check whether it arrives unfragmented.

    Returns:
        "arrives"; "told": a router reports that it is too large, which TCP detects too;
        "vanishes"; "unknown": a small packet does not arrive either.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        own.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
        own.settimeout(_DATAGRAM_SECONDS)
        own.connect((address, port))
        if _echoed(own, 64) != "arrives":
            return "unknown"
        return _echoed(own, mtu - _UDP_HEADERS)


def _echoed(own: socket.socket, size: int) -> str:
    for _ in range(_DATAGRAMS):
        try:
            own.send(bytes(size))
            while int(own.recv(16)) != size:
                pass  # late answer to an earlier datagram
        except TimeoutError:
            continue
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return "told"
            return "unknown"
        return "arrives"
    return "vanishes"


def _echo(server: socket.socket) -> None:
    """Answer each datagram with its size."""
    while True:
        with suppress(OSError):
            content, sender = server.recvfrom(1 << 16)
            server.sendto(str(len(content)).encode(), sender)


def stream(address: str, port: int, seconds: float) -> dict[str, float]:
    """latency: median round-trip seconds of a byte; bandwidth: bytes per second, one way.

    Args:
        seconds: approximate duration of each of the two measurements.
    """
    with socket.create_connection((address, port), _CONNECT_SECONDS) as own:
        own.settimeout(_IDLE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.sendall(_PING)
        times = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            own.sendall(b".")
            own.recv(1)
            times.append(time.perf_counter() - began)
            if sum(times) > seconds:
                break  # the host is far away, and the other hosts wait
    with socket.create_connection((address, port), _CONNECT_SECONDS) as own:
        own.settimeout(_IDLE_SECONDS)
        own.sendall(_SINK)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            own.sendall(_BLOCK)
        own.shutdown(socket.SHUT_WR)
        received = int(own.recv(32))
        return {
            "latency": statistics.median(times),
            "bandwidth": received / (time.perf_counter() - began),
        }


def _serve_streams(server: socket.socket) -> None:
    while True:
        with suppress(OSError):
            own, _ = server.accept()
            threading.Thread(target=_serve, args=(own,), daemon=True).start()


def _serve(own: socket.socket) -> None:
    with suppress(OSError), own:
        own.settimeout(_IDLE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if own.recv(1) == _PING:
            while byte := own.recv(1):
                own.sendall(byte)
            return
        received, buffer = 0, bytearray(len(_BLOCK))
        while count := own.recv_into(buffer):
            received += count
        own.sendall(str(received).encode())
