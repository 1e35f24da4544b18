"""Checks of one host, this or another one, based on its facts (host_facts.py).

Each check is a function that returns findings; `CHECKS` lists all of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.doctor.findings import ERROR, WARNING, Diagnosis
from hvdtrain.launch import mpi
from hvdtrain.text import plural

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


def check_host(host: str, facts: Facts, need: Need) -> list[Diagnosis]:
    """Return all findings of one host, independent of the other hosts."""
    return [finding for check in CHECKS for finding in check(host, facts, need)]


def _own_name(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    name, address = facts["hostname"], facts["own_address"]
    if address is None:
        yield Diagnosis(
            "own name",
            host,
            f"the host cannot resolve its own name, {name}",
            "Gloo looks up this name when a rank starts, and ends with a segmentation fault",
            f"echo '127.0.1.1 {name}' >> /etc/hosts   # on {host}; its real address is better",
        )


def _libraries(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    """Compare Horovod's build with the installed torch and MPI."""
    loaded, versions = facts["libraries"], facts["versions"]
    if versions["horovod"] is None:
        yield Diagnosis("horovod", host, "Horovod is not installed", "no rank starts", _BUILD)
        return
    if "failed" in loaded:
        yield Diagnosis(
            "horovod",
            host,
            f"torch and Horovod cannot be loaded: {loaded['failed']}",
            "no rank starts; a wheel fits one torch, one Python and one MPI",
            _BUILD,
        )
    if "slow" in loaded:
        yield Diagnosis(
            "horovod",
            host,
            f"importing torch and Horovod takes more than {loaded['slow']} s",
            "each start and restart of ranks takes as long",
            "put the environment on a local disk, or run fewer programs on the host: "
            f"time {sys.executable} -c 'import torch'",
            WARNING,
        )
    if (built := _torch_of(versions["horovod"])) and built != _plain(versions["torch"] or ""):
        yield Diagnosis(
            "horovod",
            host,
            f"Horovod was built for torch {built}, and torch {versions['torch']} is installed",
            "its library is linked against torch's: symbols are missing, or memory is misread",
            _BUILD,
        )
    yield from _mpi(host, facts)


def _mpi(host: str, facts: Facts) -> Iterable[Diagnosis]:
    wheel, loaded = facts["versions"]["horovod"], facts["libraries"]
    found = re.search(rf"\.({mpi.PATTERN})\.gloo\.mpi\b", wheel)
    built = mpi.find(found[1]) if found else None
    with_mpi = loaded.get("built", {}).get("mpi", built is not None)
    if not with_mpi:
        return
    if facts["mpi"] is None:
        yield Diagnosis(
            "mpi",
            host,
            "Horovod was built with MPI, and no mpirun is on PATH (or an unknown one) for a "
            "command over ssh",
            "mpirun starts a daemon on each host, and cannot find it there",
            f"sudo apt-get install -y openmpi-bin   # on {host}; or add its directory to PATH",
        )
    elif built and (launcher := mpi.find(facts["mpi"])) and not launcher.starts(built):
        yield Diagnosis(
            "mpi",
            host,
            f"Horovod was built for {built.title}, and mpirun belongs to {launcher.title}",
            "each rank may form a separate world, or not start",
            _BUILD,
        )


def _torch_of(wheel: str) -> str:
    """The torch version that hvdtrain's wheel names; "" for another wheel."""
    found = re.search(rf"\+torch(.+?)(?:\.{mpi.PATTERN}|\.gloo)", wheel)
    return found[1] if found else ""


def _plain(version: str) -> str:
    return re.sub(r"[^a-z0-9]+", ".", version.lower())


def _cores(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    if need.slots > facts["cores"]:
        quota = ""
        if facts["processors"] > facts["cores"]:
            quota = f" (of {facts['processors']} processors; limited by a quota or a binding)"
        yield Diagnosis(
            "cores",
            host,
            f"{plural(need.slots, 'rank')} for {plural(facts['cores'], 'core')}{quota}",
            "ranks share cores, so every step takes longer",
            f"--hosts {host}:{facts['cores']}, or a larger quota for the container",
            WARNING,
        )


def _memory(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    if facts["free_memory"] < need.slots * _RANK_BYTES:
        yield Diagnosis(
            "memory",
            host,
            f"{facts['free_memory'] / _GIB:.1f} GiB are free for {plural(need.slots, 'rank')}",
            "a rank requires 0.5 GiB before its model; the kernel kills a rank when memory runs "
            "out",
            f"use fewer slots on {host}, or end other programs: ps --sort=-rss -eo rss,pid,comm "
            "| head",
        )


def _shm(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    shm, wanted = facts["shm"], max(1, need.slots) * _RANK_SHM
    if shm is None or shm["free"] < wanted:
        has = "is missing" if shm is None else f"has {shm['free'] // _MIB} MiB free"
        yield Diagnosis(
            "shm",
            host,
            f"/dev/shm {has}; {wanted // _MIB} MiB are required",
            "ranks of one host and data workers pass tensors through it, and end with a bus error",
            "mount -o remount,size=2g /dev/shm   # containers: docker run --shm-size=2g",
        )


def _open_files(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    soft, hard = facts["open_files"]
    # Gloo connects all pairs of ranks in several contexts; a launcher has pipes for each rank.
    wanted = 256 + 8 * need.ranks
    if 0 <= soft < wanted:
        lines = f"printf '* soft nofile {4 * wanted}\\n* hard nofile {4 * wanted}\\n'"
        yield Diagnosis(
            "open files",
            host,
            f"a process may open {soft} files (ulimit -n; at most {hard})",
            f"{need.ranks} ranks require about {wanted}; the rendezvous fails without them",
            f"{lines} > /etc/security/limits.d/hvdtrain.conf   # then log in again",
        )


def _disk(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    disk, root = facts["disk"], need.root
    if disk["failed"]:
        yield Diagnosis(
            "disk",
            host,
            f"{root} is not writable: {disk['failed']}",
            "checkpoints, metrics and logs of the run cannot be written",
            f"df -h {root}; quota -s; or choose another directory with --run.root",
        )
    elif disk["free"] < _DISK_FEW:
        yield Diagnosis(
            "disk",
            host,
            f"{disk['free'] / _MIB:.0f} MiB are free in {root}",
            "each checkpoint requires about 3 times the memory of the model's parameters",
            f"make room (du -xh {root} | sort -h | tail), or choose another --run.root",
            ERROR if disk["free"] < _DISK_LEAST else WARNING,
        )
    if not disk["locks"]:
        yield Diagnosis(
            "locks",
            host,
            f"the file system of {root} has no locks (flock)",
            "only the owner token then prevents two processes from writing a run, and it takes "
            "12 s",
            "mount it with locks (NFS: without nolock; Lustre: -o flock)",
            WARNING,
        )


def _locale(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    problem, encoding = facts["locale"]["problem"], facts["locale"]["encoding"]
    if problem or encoding.lower().replace("-", "") != "utf8":
        what = f"its locale {problem} is missing" if problem else f"its encoding is {encoding}"
        yield Diagnosis(
            "locale",
            host,
            what,
            "non-ASCII text is misread there, and tools print a warning at each start",
            "export LC_ALL=C.UTF-8   # first line of ~/.bashrc on " + host,
            WARNING,
        )


def _gpus(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    return check_gpus(host, facts, need.slots)


def _python(host: str, facts: Facts, need: Need) -> Iterable[Diagnosis]:
    if tuple(map(int, facts["python"].split("."))) < (3, 10):
        fix = f"an environment of Python 3.10 or newer at {sys.prefix}"
        yield Diagnosis(
            "python", host, f"Python {facts['python']}", "3.10 or newer is required", fix
        )


CHECKS: tuple[Callable[[str, Facts, Need], Iterable[Diagnosis]], ...] = (
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


# --- GPUs --------------------------------------------------------------------


def check_gpus(host: str, facts: Mapping[str, Any], slots: int) -> Iterable[Diagnosis]:
    """Check the driver's report on each GPU, and whether torch can use the GPUs.

    Args:
        facts: facts of the host, see host_facts.py.
        slots: ranks on the host.
    """
    for number, gpu in enumerate(facts["gpus"]):
        yield from _gpu(host, number, gpu)
    loaded = facts["libraries"]
    if loaded.get("warning"):
        yield Diagnosis(
            "gpu",
            host,
            f"torch finds no GPU that it can use: {loaded['warning']}",
            "ranks would train on the CPU",
            f"install a driver for CUDA {loaded['cuda']} or newer, or a torch build for an "
            "older CUDA",
        )
    found = loaded.get("gpus", 0)
    working = [gpu for gpu in facts["gpus"] if "failed" not in gpu]
    if working and found and slots > found:
        yield Diagnosis(
            "gpu",
            host,
            f"{plural(slots, 'rank')} for {plural(found, 'GPU')}",
            "several ranks share the memory and time of one GPU",
            f"--hosts {host}:{found}",
            WARNING,
        )


def _gpu(host: str, number: int, gpu: Mapping[str, str]) -> Iterable[Diagnosis]:
    where = f"{host}, GPU {number}"
    if "failed" in gpu:
        why = "the driver or the GPU failed; ranks there do not start"
        fix = f"dmesg | grep -i xid   # on {host}; then reboot it"
        yield Diagnosis("gpu", host, f"nvidia-smi: {gpu['failed']}", why, fix)
        return
    if errors := uncorrected_errors(gpu):
        yield Diagnosis(
            "gpu",
            where,
            f"{errors} memory errors that were not corrected",
            "results may be wrong, and kernels fail",
            f"drain {host}; nvidia-smi -i {number} -r, or reboot; if errors return, replace the "
            "GPU",
        )
    if slow := throttle_reasons(gpu):
        yield Diagnosis(
            "gpu",
            where,
            f"its clock is throttled ({', '.join(slow)})",
            "all ranks wait for the slowest one",
            f"nvidia-smi -i {number} -q -d TEMPERATURE,POWER   # cooling and power of {host}",
            WARNING,
        )
    width, most = gpu.get("pcie.link.width.current", ""), gpu.get("pcie.link.width.max", "")
    if width.isdigit() and most.isdigit() and int(width) < int(most):
        yield Diagnosis(
            "gpu",
            where,
            f"its PCIe link has {width} of {most} lanes",
            "copies to and from the GPU take correspondingly longer",
            f"reseat the board of {host}; lspci -vv | grep LnkSta",
            WARNING,
        )


def uncorrected_errors(gpu: Mapping[str, str]) -> int:
    """Memory errors of a GPU that were not corrected; 0 if unknown."""
    errors = gpu.get("ecc.errors.uncorrected.volatile.total", "")
    return int(errors) if errors.isdigit() else 0


def throttle_reasons(gpu: Mapping[str, str]) -> list[str]:
    """Why the hardware throttles a GPU's clock; empty: it does not."""
    reasons = ("hw_slowdown", "hw_thermal_slowdown")
    return [name for name in reasons if gpu.get(f"clocks_throttle_reasons.{name}") == "Active"]
