"""What this process may use of its machine: the least of the machine and its control groups.

https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max, memory.max),
https://docs.kernel.org/scheduler/sched-bwc.html and
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (version 1). Imports neither torch nor
Horovod.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def cores(root: Path = Path("/")) -> int:
    """Processor cores that this process may use, at least 1.

    The cores of the processors that it is bound to (two threads of one core count once: they
    share the units that do arithmetic), and no more than the quotas of its control groups allow.

    Args:
        root: where /proc and /sys are looked for.
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
    """Bytes that this process and others of its control groups may still take."""
    left = [left for group in _groups("memory", root) for left in _memory_left(group)]
    return max(0, min([psutil.virtual_memory().available, *left]))


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether this host has a network that moves memory: InfiniBand, RoCE, Omni-Path or Slingshot.

    Args:
        root: where /sys is looked for.
    """
    return any(any((root / "sys/class" / kind).glob("*")) for kind in ("infiniband", "cxi"))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The control groups around this process that a controller has, from the innermost on."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, group = line.split(":", 2)
            if number != "0" and controller not in controllers.split(","):
                continue
            top = root / "sys/fs/cgroup" / ("" if number == "0" else controllers)
            folder = top / group.lstrip("/")
            for inner in (folder, *folder.parents):
                yield inner
                if inner == top:
                    break


def _quota(group: Path) -> list[float]:
    """[processors that it may keep busy], or [] where there is no limit."""
    with suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return [int(quota) / int(period)]  # "max": ValueError
    with suppress(OSError, ValueError):
        quota = (group / "cpu.cfs_quota_us").read_text()
        period = (group / "cpu.cfs_period_us").read_text()
        return [int(quota) / int(period)] if int(quota) > 0 else []
    return []


def _memory_left(group: Path) -> list[int]:
    """[bytes], or [] where there is no limit; what the page cache holds can be taken back."""
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
