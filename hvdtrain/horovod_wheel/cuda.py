"""CUDA's compiler and NCCL for a Horovod that is built for GPUs.

A toolkit of this machine is used if programs compile and link with it and it has the major version
of torch's CUDA. Otherwise pip installs the compiler that matches torch's own CUDA libraries for
the duration of the build.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.horovod_wheel.diagnose import diagnose
from hvdtrain.horovod_wheel.process import BuildError, pip, run_logged, say

DEFAULT_HOME = "/usr/local/cuda"
PROBE_TIMEOUT_S = 120.0
INSTALL_TIMEOUT_S = 900.0
_PROBE = "#include <cuda_runtime.h>\nint main() { return cudaFree(nullptr); }\n"
_NCCL_IS_NAMED = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")


@dataclass(frozen=True)
class Toolkit:
    """Source of CUDA: a directory of this machine, or a pip requirement; possibly neither."""

    cuda: str  # torch's CUDA version; empty if torch was built without CUDA
    home: Path | None = None
    requirement: str = ""
    rejected: tuple[str, ...] = ()  # one sentence per toolkit that cannot be used

    @property
    def missing(self) -> str:
        """Packages to install before Horovod can be compiled for GPUs; empty: none."""
        if not self.cuda:
            return "a build of torch with CUDA"
        if self.home or self.requirement:
            return ""
        wanted = f"NVIDIA's CUDA toolkit {self.cuda} (CUDA_HOME names its directory)"
        return "; ".join([wanted, *self.rejected])


def find() -> Toolkit:
    """Choose the toolkit for the torch of this environment."""
    cuda = _cuda_of_torch()
    if not cuda:
        return Toolkit(cuda)
    rejected: list[str] = []
    for home in _homes():
        fault = _fault(home, cuda)
        if not fault:
            return Toolkit(cuda, home, rejected=tuple(rejected))
        rejected.append(f"{home} {fault}")
    return Toolkit(cuda, None, _requirement(), tuple(rejected))


def environment(toolkit: Toolkit, scratch: Path) -> dict[str, str]:
    """Return the variables for Horovod's CMake files and torch, for a build with GPU operations.

    NCCL is torch's own if torch is a wheel, unless the environment names another one: a process
    that has loaded torch has already loaded that library, and needs no second one.

    Args:
        toolkit: what `find` returned; pip installs its requirement if it has one.
        scratch: a directory that exists for the duration of the build.
    """
    for line in toolkit.rejected:
        say(f"not used: {line}")
    say(f"CUDA's compiler: {toolkit.home or f'{toolkit.requirement} (pip)'}")
    home = toolkit.home or _install(toolkit.requirement, scratch)
    # torch looks above the nvcc on PATH, which may be a link or a script in another directory.
    # Horovod asks the nvcc on PATH for the GPUs to compile for.
    variables = {
        "CUDA_HOME": str(home),
        "HOROVOD_CUDA_HOME": str(home),
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    nccl = _nccl_of_torch()
    if nccl is None or any(name in os.environ for name in _NCCL_IS_NAMED):
        return variables
    links = scratch / "nccl"
    links.mkdir()
    _link(links / "libnccl.so", next((nccl / "lib").glob("libnccl.so.*")))
    return variables | {
        "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def _cuda_of_torch() -> str:
    """CUDA version such as `13.0`; empty if torch is not installed or has no CUDA."""
    try:
        import torch
    except ModuleNotFoundError:
        return ""
    return torch.version.cuda or ""


def _homes() -> list[Path]:
    """Directories that contain bin/nvcc, the one named by the user first."""
    names = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    names += [_home_on_path(), DEFAULT_HOME]
    unique: dict[Path, Path] = {}
    for home in (Path(name) for name in names if name):
        if (home / "bin" / "nvcc").is_file():
            unique.setdefault(home.resolve(), home)
    return list(unique.values())


def _fault(home: Path, cuda: str) -> str:
    """Why the toolkit in `home` cannot be used with a torch for `cuda`; empty if it can."""
    nvcc = str(home / "bin" / "nvcc")
    found = re.search(r"release (\d+)\.", _output([nvcc, "--version"])[1])
    major = cuda.partition(".")[0]
    if found is None or found.group(1) != major:
        has = f"is CUDA {found.group(1)}" if found else "does not report its version"
        return f"{has}, torch has CUDA {cuda}"
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch, "probe.cu")
        program.write_text(_PROBE)
        # CMake links the static runtime, torch's extensions the shared one.
        for runtime in ("static", "shared"):
            command = [nvcc, str(program), "-cudart", runtime, "-o", str(Path(scratch, "probe"))]
            code, output = _output(command)
            if code:
                return f"does not compile and link a program: {diagnose(output)[0]}"
    return ""


def _requirement() -> str:
    """pip requirement for a compiler of the same release as torch's CUDA libraries."""
    try:
        version = importlib.metadata.version("cuda-toolkit")
    except importlib.metadata.PackageNotFoundError:
        return ""  # PyPI's builds of torch for CUDA 12 have other packages
    return f"cuda-toolkit[cccl,nvcc,nvtx]=={version}"


def _install(requirement: str, scratch: Path) -> Path:
    """Let pip install CUDA into `scratch`; return the directory that contains bin/nvcc."""
    site, log = scratch / "cuda", scratch / "cuda.log"
    command = [*pip("install", dependencies=True), "--target", str(site), requirement]
    code = run_logged(command, log, INSTALL_TIMEOUT_S)
    nvcc = next(site.glob("nvidia/*/bin/nvcc"), None)
    if code or nvcc is None:
        line, _ = diagnose(log.read_text(errors="replace"))
        raise BuildError(
            f"cannot install CUDA's compiler ({requirement}): {line}\n"
            "  check the network, and pip's index and proxy settings (pip config list), or "
            "install NVIDIA's CUDA toolkit of torch's version"
        )
    home = nvcc.parent.parent
    # The wheels are made to run programs, not to link them.
    for library in (home / "lib").glob("lib*.so.*"):
        _link(library.with_name(f"{library.name.partition('.so.')[0]}.so"), library)
    _link(home / "lib64", home / "lib")
    return home


def _link(name: Path, target: Path) -> None:
    if not name.exists():
        name.symlink_to(target)


def _home_on_path() -> str | None:
    """CUDA's home as nvcc reports it: nvcc on PATH may be a script that starts another one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    output = _output([nvcc, "--dryrun", "-x", "cu", os.devnull])[1]
    found = re.search(r"^#\$ TOP=(.+)$", output, re.MULTILINE)
    return os.path.realpath(found.group(1).strip()) if found else None


def _output(command: list[str]) -> tuple[int, str]:
    """The exit code of `command` and its output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout


def _nccl_of_torch() -> Path | None:
    """The directory of the package nvidia-nccl-cu13 (or 12): include/nccl.h, lib/libnccl.so.2."""
    found = importlib.util.find_spec("nvidia")
    for directory in (found.submodule_search_locations or []) if found else []:
        nccl = Path(directory, "nccl")
        if (nccl / "include" / "nccl.h").is_file() and list((nccl / "lib").glob("libnccl.so.*")):
            return nccl
    return None
