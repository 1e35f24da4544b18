"""Hosts and their slots, from a file, a list, or Slurm.

A driver runs this once a second, so it imports as little as possible.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hvdtrain.errors import UserError

# No leading "-": ssh would parse the name as an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SLOTS = re.compile(r"[0-9]{1,9}")
_SCONTROL_SECONDS = 10
# In a host file, after the name; Open MPI reads all of them.
_LIMIT = re.compile(r"\s+max[_-]slots\s*=\s*\d+")
_COUNT = re.compile(r"\s+(?:slots|count|cpu)\s*=\s*")
_OF_SSH = re.compile(r"@|\b(?:port|user_?name)\s*=")


class Host(NamedTuple):
    """A host and its maximum number of ranks."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


def read_hosts(
    hosts: str | None = None, hostfile: str | None = None, slurm: bool = False
) -> list[Host]:
    """Return the hosts of the given source, in its order, each name once.

    Args:
        hosts: as for `parse_hosts`.
        hostfile: as for `read_hostfile`.
        slurm: use the allocation of this process.

    Raises:
        UserError: the source does not exist or cannot be parsed.
    """
    if hostfile is not None:
        return read_hostfile(hostfile)
    return slurm_hosts() if slurm else parse_hosts(hosts or "")


def parse_hosts(text: str) -> list[Host]:
    """Parse `node1:8,node2:8`; a name without a number is one slot.

    Raises:
        UserError: an entry is wrong; the message names it.
    """
    return _merge(
        _entry(part.strip(), f"--hosts {text}", "node1:8,node2:8") for part in text.split(",")
    )


def read_hostfile(path: str) -> list[Host]:
    """Read one host per line: `node1 slots=8` (Open MPI), `node1:8`, or `node1` for one slot.

    `#` or `//` starts a comment, `count` and `cpu` mean slots as in Open MPI, and max_slots is
    ignored. A repeated name adds slots.

    Raises:
        UserError: a line is wrong (the message names file and line), or there is no host.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file") from None
    found = []
    for number, line in enumerate(lines, start=1):
        text = re.split("#|//", line, maxsplit=1)[0].strip()
        where = f"{path}, line {number}: {text}"
        if _OF_SSH.search(text):
            raise UserError(
                f"{where}: a user or port is not read here: set User and Port of the host in "
                "~/.ssh/config"
            )
        if text.startswith("[") or text.count(":") > 1:
            raise UserError(f"{where}: MPIs do not read IPv6 addresses: give the host's name")
        if text:
            entry = _COUNT.sub(":", _LIMIT.sub("", text), count=1)
            found.append(_entry(entry, where, "node1 slots=8"))
    if not found:
        raise UserError(f"{path}: no host in it; write a line such as 'node1 slots=8'")
    return _merge(found)


def slurm_hosts(env: Mapping[str, str] = os.environ) -> list[Host]:
    """Return the nodes of this process's Slurm job, with the tasks of each.

    SLURM_TASKS_PER_NODE may count more tasks than were asked for (`--ntasks=20
    --ntasks-per-node=8` on 3 nodes): nodes then get as equal shares of SLURM_NTASKS as they can.

    Raises:
        UserError: this is not a Slurm job, or scontrol fails.
    """
    try:
        nodes, tasks = env["SLURM_JOB_NODELIST"], env["SLURM_TASKS_PER_NODE"]
    except KeyError as error:
        raise UserError(
            f"--slurm: {error.args[0]} is not set; call it inside a job (sbatch, salloc)"
        ) from None
    names, slots = _expand(nodes), tasks_per_node(tasks)
    if len(names) != len(slots):
        raise UserError(
            f"--slurm: {len(names)} nodes in SLURM_JOB_NODELIST={nodes}, but {len(slots)} in "
            f"SLURM_TASKS_PER_NODE={tasks}"
        )
    if _SLOTS.fullmatch(asked := env.get("SLURM_NTASKS", "")):
        slots = _at_most(slots, int(asked))
    return [Host(name, count) for name, count in zip(names, slots, strict=True) if count]


def _at_most(slots: list[int], total: int) -> list[int]:
    """Return `slots` lowered as evenly as possible to `total` in all, on the last hosts first."""

    def of_level(level: int) -> int:
        return sum(min(count, level) for count in slots)

    level = bisect_right(range(max(slots) + 1), total, key=of_level) - 1
    lowered, left = [], total - of_level(level)
    for count in slots:
        more = count > level and left > 0
        lowered.append(min(count, level) + more)
        left -= more
    return lowered


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form to one number per node: `8(x2),4` is 8, 8, 4.

    Raises:
        UserError: the text does not have this form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part)
        if match is None:
            raise UserError(f"SLURM_TASKS_PER_NODE={text}: such as 8(x2),4 is expected")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def total_slots(hosts: Iterable[Host]) -> int:
    return sum(host.slots for host in hosts)


def first_slots(hosts: Iterable[Host], most: int) -> list[Host]:
    """Return the first `most` slots: whole hosts in order, then some slots of one host."""
    chosen, left = [], most
    for host in hosts:
        if left > 0:
            chosen.append(Host(host.name, min(host.slots, left)))
            left -= host.slots
    return chosen


def as_text(hosts: Iterable[Host]) -> str:
    """Format hosts for launchers: `node1:8,node2:8`."""
    return ",".join(map(str, hosts))


def _expand(nodes: str) -> list[str]:
    import subprocess

    command = ["scontrol", "show", "hostnames", nodes]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        message = (getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(f"--slurm: `{' '.join(command)}` failed: {message}") from None
    return done.stdout.split()


def _entry(text: str, where: str, example: str) -> Host:
    name, colon, slots = text.partition(":")
    number = slots if colon else "1"
    if not (_NAME.fullmatch(name) and _SLOTS.fullmatch(number)) or int(number) < 1:
        raise UserError(f"{where}: a host and its slots are expected, such as {example}")
    return Host(name, int(number))


def _merge(found: Iterable[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in found:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]
