"""On a host: its properties and its installed software, as numbers and names, without verdicts.

The agent runs this and answers within a second. Only `libraries` imports torch, in a process of
its own, because an import may end the process.
"""

from __future__ import annotations

import hashlib
import json
import locale
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.errors import UserError
from hvdtrain.files import FileLock
from hvdtrain.horovod_wheel.recipe import installed_version
from hvdtrain.launch import mpi
from hvdtrain.runtime import machine
from hvdtrain.runtime.machine import addresses_by_interface, resolve, source_towards
from hvdtrain.version import __version__

_PACKAGES = ("torch", "horovod", "numpy", "mpi4py")
_FIREWALLS = ("firewall-cmd", "ufw", "nft", "iptables")
_GPU_FIELDS = (
    "name,driver_version,ecc.errors.uncorrected.volatile.total,"
    "pcie.link.width.current,pcie.link.width.max"
)
# Omitted for drivers that know these fields only by another name.
_GPU_CLOCK_FIELDS = (
    "clocks_throttle_reasons.hw_slowdown,clocks_throttle_reasons.hw_thermal_slowdown"
)
_IMPORT_SECONDS = 40
_LIBRARIES = """\
import json
found = {}
import torch
found["cuda"] = torch.version.cuda
found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None
import warnings
with warnings.catch_warnings(record=True) as output:
    warnings.simplefilter("always")
    found["gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found["warning"] = str(output[0].message) if output else ""
import horovod.torch as hvd
found["built"] = {name: bool(getattr(hvd, name + "_built")()) for name in ("mpi", "gloo", "nccl")}
print("found", json.dumps(found))
"""


def gather(hosts: list[str]) -> dict[str, Any]:
    """Return all facts that are available without torch.

    Args:
        hosts: names that launchers and ranks on this host will look up.
    """
    own = socket.gethostname()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    addresses = {name: resolve(name) for name in hosts}
    memory = psutil.virtual_memory()
    return {
        "hostname": own,
        "own_address": resolve(own),
        "addresses": addresses,
        "interfaces": _interfaces(),
        "chosen": _chosen([a for a in addresses.values() if a]),
        "ports": _ephemeral_ports(),
        "firewalls": [name for name in _FIREWALLS if shutil.which(name, path=_with_sbin())],
        "python": ".".join(map(str, sys.version_info[:3])),
        "code": _digest(),
        "versions": {"hvdtrain": __version__} | {n: installed_version(n) for n in _PACKAGES},
        "mpi": _mpi(),
        "cores": machine.cores(),
        "processors": os.cpu_count(),
        "memory": memory.total,
        "free_memory": machine.free_memory(),
        "shm": _shared_memory(),
        "open_files": [soft, hard],
        "locale": _locale(),
        "gpus": _gpus(),
    }


def libraries() -> dict[str, Any]:
    """Versions of torch and Horovod as loaded on this host, and how Horovod was built.

    {"failed": the last line of the output} if they cannot be loaded, {"slow": seconds} if loading
    takes longer.
    """
    command = [sys.executable, "-c", _LIBRARIES]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"slow": _IMPORT_SECONDS}
    for line in done.stdout.splitlines():
        if line.startswith("found "):
            return dict(json.loads(line.removeprefix("found ")))
    output = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    ended = f"the process ended with {done.returncode}"
    errors = [line for line in output if "Error" in line or "undefined symbol" in line]
    return {"failed": (errors or output or [ended])[-1]}


def _interfaces() -> dict[str, Any]:
    """Interfaces that ranks could use: up, with an IPv4 address, and not loopback."""
    state = psutil.net_if_stats()
    return {
        name: {
            "addresses": addresses,
            "mtu": state[name].mtu,
            "mbit": state[name].speed,  # 0: unknown
        }
        for name, addresses in addresses_by_interface().items()
        if not all(address.startswith("127.") for address in addresses)
    }


def _chosen(others: list[str]) -> str:
    """The interface that leads to the first reachable address of `others`; "" if there is none."""
    for address in others:
        source = source_towards(address)
        for name, own in addresses_by_interface().items():
            if source in own and source != address and not address.startswith("127."):
                return name
    return ""


def _ephemeral_ports() -> list[int]:
    with suppress(OSError, ValueError):
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        return [int(word) for word in text.split()]
    return [32768, 60999]


def _with_sbin() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _digest() -> str:
    """Digest of hvdtrain's own source files."""
    package, content = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return content.hexdigest()[:12]


def _mpi() -> str | None:
    """MPI and its version, such as openmpi4.1.4; None if mpirun is missing or unknown."""
    try:
        return str(mpi.of_launcher())
    except UserError:
        return None


def _shared_memory() -> dict[str, int] | None:
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"total": state.f_blocks * state.f_frsize, "free": state.f_bavail * state.f_frsize}


def _locale() -> dict[str, str]:
    """The encoding of files and output, and why the locale cannot be set ("" if it can)."""
    problem = ""
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error:
        names = ("LC_ALL", "LC_CTYPE", "LANG")
        problem = next((f"{n}={os.environ[n]}" for n in names if os.environ.get(n)), "LANG")
    return {"problem": problem, "encoding": locale.getpreferredencoding(False)}


def _gpus() -> list[dict[str, str]]:
    """Output of nvidia-smi for each GPU, with the names of `nvidia-smi --help-query-gpu`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    output = "nvidia-smi does not respond"
    for fields in (f"{_GPU_FIELDS},{_GPU_CLOCK_FIELDS}", _GPU_FIELDS):
        command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            break
        if done.returncode == 0:
            rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
            return [dict(zip(fields.split(","), row, strict=False)) for row in rows]
        lines = (done.stdout + done.stderr).strip().splitlines()
        output = lines[-1] if lines else f"exit code {done.returncode}"
    return [{"failed": output}]


# --- the directory of runs: free space and locks -----------------------------


_TRIAL_BYTES = 1 << 20
# Held until the agent ends; meanwhile another host tries to take the lock.
_held: list[FileLock] = []


def directory(path: str) -> dict[str, Any]:
    """Check free space, locks and a trial write in a directory; report failures as error messages.

    A missing directory is created, as a run would do, and removed again.

    Returns:
        free: bytes; inodes: free ones; failed: "" if 1 MiB could be written; locks: flock works.
    """
    root = Path(path)
    made: list[Path] = []
    trial = root / f".doctor-{os.uname().nodename}-{secrets.token_hex(8)}"
    found: dict[str, Any] = {"free": 0, "inodes": 0, "failed": "", "locks": True}
    try:
        made = missing(root)
        root.mkdir(parents=True, exist_ok=True)
        state = os.statvfs(root)
        found |= {"free": state.f_bavail * state.f_frsize, "inodes": state.f_favail}
        with open(trial, "xb") as file:  # do not follow a link in its place
            file.write(bytes(_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
        lock = FileLock(trial)
        lock.open()
        found["locks"] = lock.attempt()
        lock.close()
    except OSError as error:
        found["failed"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
        for one in made:
            with suppress(OSError):
                one.rmdir()
    return found


def missing(root: Path) -> list[Path]:
    """The missing directories among `root` and its parents, innermost first.

    Raises:
        OSError: a parent directory cannot be searched.
    """
    return [one for one in (root, *root.parents) if not one.exists()]


def hold_lock(path: str) -> bool:
    """Take a lock on a file in a directory that hosts may share; return whether it worked."""
    lock = FileLock(Path(path))
    try:
        lock.open()
        lock.attempt()
    except OSError:
        return False
    _held.append(lock)
    return lock.held


def attempt_lock(path: str) -> str:
    """Try a lock that another host holds: "absent" (no such file), "refused" or "taken"."""
    if not os.path.exists(path):  # or not visible
        return "absent"
    lock = FileLock(Path(path))
    try:
        lock.open()
        lock.attempt()
        return "taken" if lock.held else "refused"
    except OSError:
        return "absent"
    finally:
        lock.close()


# --- compute and memory speed, with no other host involved -------------------


_SECONDS = 0.5
_SIDE, _GPU_SIDE = 512, 4096
_COPY_BYTES, _GPU_COPY_BYTES = 32 << 20, 256 << 20


def import_torch() -> bool:
    """Import torch, which takes seconds, so that all hosts then measure at the same time."""
    import torch

    return bool(torch.cuda.is_available())


def measure_speed() -> dict[str, float]:
    """Measure about a second of work on all cores and on each GPU; mean speeds, not the best.

    Returns:
        "processor": FLOP/s of float32 matrix products; "memory": bytes per second of a copy (each
        byte is read once and written once); for each GPU "gpu N" (bfloat16) and "gpu N memory".
    """
    import torch

    torch.set_num_threads(machine.cores())
    found = {
        "processor": _products(torch.device("cpu"), _SIDE, torch.float32),
        "memory": _copies(torch.device("cpu"), _COPY_BYTES),
    }
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", number)
        found[f"gpu {number}"] = _products(device, _GPU_SIDE, torch.bfloat16)
        found[f"gpu {number} memory"] = _copies(device, _GPU_COPY_BYTES)
    return found


def _products(device: Any, side: int, dtype: Any) -> float:
    import torch

    a = torch.randn(side, side, device=device).to(dtype)
    b, out = a.clone(), torch.empty_like(a)
    return 2 * side**3 * _rate(lambda: torch.mm(a, b, out=out), device)


def _copies(device: Any, size: int) -> float:
    import torch

    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size * _rate(lambda: target.copy_(source), device)


def _rate(work: Callable[[], object], device: Any) -> float:
    """Calls of `work` per second."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < _SECONDS:
        for _ in range(4):
            work()
        wait()
        done += 4
    return done / (time.perf_counter() - began)
