"""Cores and memory available to this process, and the network addresses of this host.

Cores and memory are limited by the machine and its control groups:

https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max, memory.max),
https://docs.kernel.org/scheduler/sched-bwc.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (version 1). Imports neither torch nor
Horovod.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def cores(root: Path = Path("/")) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    These are the cores of the processors that it is bound to, limited by the quotas of its control
    groups. Two hardware threads of a core count once: they share its arithmetic units.

    Args:
        root: directory that contains /proc and /sys.
    """
    siblings = set()
    for processor in os.sched_getaffinity(0):
        path = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        try:
            siblings.add(path.read_text())
        except OSError:
            siblings.add(str(processor))
    quotas = [quota for group in _groups("cpu", root) for quota in _quota(group)]
    return max(1, min([len(siblings), *(int(quota) for quota in quotas)]))


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process and others in its control groups may still allocate."""
    left = [left for group in _groups("memory", root) for left in _memory_left(group)]
    return max(0, min([psutil.virtual_memory().available, *left]))


def processor(root: Path = Path("/")) -> str:
    """Return the model of this host's processors; "": unknown."""
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return ""


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether this host has an RDMA network: InfiniBand, RoCE, Omni-Path or Slingshot.

    Args:
        root: directory that contains /sys.
    """
    return any(any((root / "sys/class" / kind).glob("*")) for kind in ("infiniband", "cxi"))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the control groups of this process for a controller, innermost first."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("" if number == "0" else controllers)
            directory = top / group.lstrip("/")
            for inner in (directory, *directory.parents):
                yield inner
                if inner == top:
                    break


def _quota(group: Path) -> list[float]:
    """Return [limit in processors], or [] without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return [int(quota) / int(period)]  # "max": ValueError
    with suppress(OSError, ValueError):
        quota = (group / "cpu.cfs_quota_us").read_text()
        period = (group / "cpu.cfs_period_us").read_text()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    return []


def _memory_left(group: Path) -> list[int]:
    """Return [bytes left], or [] without a limit; inactive page cache counts as free."""
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit, usage, cached in names:
        with suppress(OSError, ValueError):
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return [most - used + int(stat.get(cached, 0))]  # "max": ValueError
    return []


# --- network addresses --------------------------------------------------------


LOOPBACK = "127.0.0.1"
# Documentation address (RFC 5737): its route is the default route.
_ELSEWHERE = "192.0.2.1"


def address_towards(hosts: Iterable[str]) -> str:
    """Return this host's address on the route to the first other host in `hosts`.

    If all of them are this host, a host that joins later must also reach the address: it is not a
    loopback address unless this host has no other. A host's own name often resolves to loopback
    (Debian's /etc/hosts: 127.0.1.1).
    """
    own = [a for all_ in addresses_by_interface().values() for a in all_ if not is_loopback(a)]
    for address in (resolve(host) for host in hosts):
        if address is not None and address not in own and not is_loopback(address):
            source = source_towards(address)
            if source in own:
                return str(source)
    likely = (resolve(socket.gethostname()), source_towards(_ELSEWHERE), *own)
    return next((a for a in likely if a is not None and a in own), LOOPBACK)


def addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses of each interface of this host that is up and has any."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = {
        name: [a.address for a in all_ if a.family == socket.AF_INET]
        for name, all_ in psutil.net_if_addrs().items()
        if name in up
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def is_loopback(address: str) -> bool:
    """Whether an IP address is this host's own address on its loopback interface."""
    return ipaddress.ip_address(address).is_loopback


def resolve(host: str) -> str | None:
    """Return the IPv4 address of a name, as this host resolves it; None if it cannot."""
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):
        return None


def source_towards(address: str) -> str | None:
    """Return this host's own address on the route to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])
