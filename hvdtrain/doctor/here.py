"""Checks of one host, this or another one, based on its facts (host_facts.py).

Each check is a function that returns findings; `CHECKS` lists all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.doctor.finding import ERROR, WARNING, Finding
from hvdtrain.doctor.gpus import check_gpus

Facts = Mapping[str, Any]

_MIB, _GIB = 1 << 20, 1 << 30
_BUILD = "hvdtrain horovod build --install"
# Memory for importing torch and Horovod, with a small model.
_RANK_BYTES = _GIB // 2
_RANK_SHM = 64 * _MIB  # Docker's default for all; data workers pass batches through it
_DISK_LEAST, _DISK_FEW = 256 * _MIB, 2 * _GIB


@dataclass(frozen=True)
class Need:
    """Requirements of a run for one host.

    Args:
        slots: ranks on the host; 0: none, it only launches.
        ranks: world size.
        root: run.root, absolute.
    """

    slots: int
    ranks: int
    root: str


def check_host(host: str, facts: Facts, need: Need) -> list[Finding]:
    """Return all findings of one host, independent of the other hosts."""
    return [finding for check in CHECKS for finding in check(host, facts, need)]


def _own_name(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    name, address = facts["hostname"], facts["own_address"]
    if address is None:
        yield Finding(
            "own name",
            host,
            f"it cannot resolve its own name, {name}",
            "Gloo looks its own name up when a rank starts, and ends with a segmentation fault",
            f"echo '127.0.1.1 {name}' >> /etc/hosts   # on {host}; better its real address",
        )


def _libraries(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    """Compare Horovod's build with the installed torch and MPI."""
    loaded, versions = facts["libraries"], facts["versions"]
    if versions["horovod"] is None:
        yield Finding("horovod", host, "Horovod is not installed", "no rank starts", _BUILD)
        return
    if "failed" in loaded:
        yield Finding(
            "horovod",
            host,
            f"torch and Horovod cannot be loaded: {loaded['failed']}",
            "no rank starts; a wheel fits one torch, one Python and one MPI",
            _BUILD,
        )
    if "slow" in loaded:
        yield Finding(
            "horovod",
            host,
            f"importing torch and Horovod takes more than {loaded['slow']} s",
            "every start and restart of ranks takes as long",
            "the environment on a local disk, or fewer programs on the host: "
            f"time {sys.executable} -c 'import torch'",
            WARNING,
        )
    if (built := _torch_of(versions["horovod"])) and built != _plain(versions["torch"] or ""):
        yield Finding(
            "horovod",
            host,
            f"Horovod was built for torch {built}, and torch {versions['torch']} is installed",
            "its library is linked with torch's: symbols are missing, or memory is misread",
            _BUILD,
        )
    yield from _mpi(host, facts)


def _mpi(host: str, facts: Facts) -> Iterable[Finding]:
    wheel, loaded = facts["versions"]["horovod"], facts["libraries"]
    built = re.search(r"\.(openmpi|mpich|intelmpi)((?:\d+)(?:\.\d+)*?)\.gloo\.mpi\b", wheel)
    with_mpi = loaded.get("built", {}).get("mpi", built is not None)
    if not with_mpi:
        return
    if facts["mpi"] is None:
        yield Finding(
            "mpi",
            host,
            "Horovod was built with MPI, and no mpirun is on PATH for a command over ssh",
            "mpirun starts a daemon on each host, which is not found there",
            f"sudo apt-get install -y openmpi-bin   # on {host}; or add its folder to PATH",
        )
    elif built is not None and facts["mpi"] != built[1] + built[2]:
        yield Finding(
            "mpi",
            host,
            f"Horovod was built for {built[1]} {built[2]}, and mpirun is of {facts['mpi']}",
            "each rank may be a world of its own, or not start",
            _BUILD,
        )


def _torch_of(wheel: str) -> str:
    """The torch version that hvdtrain's wheel names; "" for another wheel."""
    found = re.search(r"\+torch(.+?)(?:\.(?:openmpi|mpich|intelmpi)\d|\.gloo)", wheel)
    return found[1] if found else ""


def _plain(version: str) -> str:
    return re.sub(r"[^a-z0-9]+", ".", version.lower())


def _cores(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    if need.slots > facts["cores"]:
        quota = ""
        if facts["processors"] > facts["cores"]:
            quota = f" (of {facts['processors']} processors; a quota or a binding takes the rest)"
        yield Finding(
            "cores",
            host,
            f"{need.slots} ranks for {facts['cores']} cores{quota}",
            "ranks wait for each other's turns: the step of all takes longer",
            f"--hosts {host}:{facts['cores']}, or a larger quota for the container",
            WARNING,
        )


def _memory(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    if facts["free_memory"] < need.slots * _RANK_BYTES:
        yield Finding(
            "memory",
            host,
            f"{facts['free_memory'] / _GIB:.1f} GiB are free for {need.slots} ranks",
            "a rank takes 0.5 GiB before its model; the kernel kills one where memory ends",
            f"fewer slots for {host}, or end what uses it: ps --sort=-rss -eo rss,pid,comm | head",
        )


def _shm(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    shm, wanted = facts["shm"], max(1, need.slots) * _RANK_SHM
    if shm is None or shm["free"] < wanted:
        has = "is not there" if shm is None else f"has {shm['free'] // _MIB} MiB free"
        yield Finding(
            "shm",
            host,
            f"/dev/shm {has}; {wanted // _MIB} MiB are wanted",
            "ranks of one host and data workers pass tensors through it: they end with a bus error",
            "mount -o remount,size=2g /dev/shm   # containers: docker run --shm-size=2g",
        )


def _open_files(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    soft, hard = facts["open_files"]
    # Gloo connects all pairs of ranks in several contexts; a launcher has pipes for each rank.
    wanted = 256 + 8 * need.ranks
    if 0 <= soft < wanted:
        lines = f"printf '* soft nofile {4 * wanted}\\n* hard nofile {4 * wanted}\\n'"
        yield Finding(
            "open files",
            host,
            f"a process may open {soft} files (ulimit -n; at most {hard})",
            f"{need.ranks} ranks take about {wanted}; the rendezvous fails beyond",
            f"{lines} > /etc/security/limits.d/hvdtrain.conf   # then log in again",
        )


def _disk(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    disk, root = facts["disk"], need.root
    if disk["failed"]:
        yield Finding(
            "disk",
            host,
            f"{root} cannot be written: {disk['failed']}",
            "no checkpoint, no metrics and no log of the run is kept",
            f"df -h {root}; quota -s; or choose another folder with --run.root",
        )
    elif disk["free"] < _DISK_FEW:
        yield Finding(
            "disk",
            host,
            f"{disk['free'] / _MIB:.0f} MiB are free in {root}",
            "checkpoints of a run take 3 times its model's parameters each",
            f"make room (du -xh {root} | sort -h | tail), or choose another --run.root",
            ERROR if disk["free"] < _DISK_LEAST else WARNING,
        )
    if not disk["locks"]:
        yield Finding(
            "locks",
            host,
            f"the file system of {root} has no locks (flock)",
            "that one process alone writes a run is then known by its token, 12 s later",
            "mount it with locks (NFS: without nolock; Lustre: -o flock)",
            WARNING,
        )


def _locale(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    problem, encoding = facts["locale"]["problem"], facts["locale"]["encoding"]
    if problem or encoding.lower().replace("-", "") != "utf8":
        what = f"its locale {problem} is not there" if problem else f"its encoding is {encoding}"
        yield Finding(
            "locale",
            host,
            what,
            "text that is not ASCII is read wrongly there, and tools complain on each start",
            "export LC_ALL=C.UTF-8   # first line of ~/.bashrc on " + host,
            WARNING,
        )


def _gpus(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    return check_gpus(host, facts, need.slots)


def _python(host: str, facts: Facts, need: Need) -> Iterable[Finding]:
    if tuple(map(int, facts["python"].split("."))) < (3, 10):
        mend = f"an environment of Python 3.10 or newer at {sys.prefix}"
        yield Finding("python", host, f"Python {facts['python']}", "3.10 is needed", mend)


CHECKS: tuple[Callable[[str, Facts, Need], Iterable[Finding]], ...] = (
    _python,
    _own_name,
    _libraries,
    _cores,
    _memory,
    _shm,
    _open_files,
    _disk,
    _locale,
    _gpus,
)
