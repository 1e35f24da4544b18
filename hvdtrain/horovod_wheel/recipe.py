"""The inputs of the Horovod wheel, and the wheel name that encodes them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.launch import mpi as mpis

VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
PATCHES = Path(__file__).with_name("patches")
GPU_CHOICES = ("none", "nccl", "mpi")

_ENVIRONMENT = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    # The bundled Gloo requires an older policy version than CMake 4 accepts.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}
# A cached wheel finds an MPI from PyPI in the environment into which it is installed: from
# lib/pythonX/site-packages/horovod/torch, libmpi is in lib. The shell that links removes the
# backslash.
_RUN_PATH = r"-Wl,-rpath,\$ORIGIN/../../../.."


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the compiled wheel; mpi "": built without MPI."""

    torch: str
    mpi: str
    gpu: str = "none"

    @property
    def version(self) -> str:
        """The wheel's full version (PEP 440), e.g. 0.28.1+torch2.13.0.cpu.openmpi4.1.4..."""
        return f"{VERSION}+{self.local_version}"

    @property
    def local_version(self) -> str:
        mpi = [self.mpi, "gloo", "mpi"] if self.mpi else ["gloo"]
        gpu = [f"gpu{self.gpu}"] if self.gpu != "none" else []
        parts = [f"torch{self.torch}", *mpi, *gpu, f"p{digest()}"]
        return re.sub(r"[^a-z0-9]+", ".", ".".join(parts).lower())

    @property
    def environment(self) -> dict[str, str]:
        """The variables that Horovod's setup.py reads."""
        variables = {**_ENVIRONMENT, "HOROVOD_LOCAL_VERSION": self.local_version}
        variables["LDFLAGS"] = f"{os.environ.get('LDFLAGS', '')} {_RUN_PATH}".strip()
        if not self.mpi:
            del variables["HOROVOD_WITH_MPI"]
            variables["HOROVOD_WITHOUT_MPI"] = "1"
        if self.gpu != "none":
            variables["HOROVOD_GPU_OPERATIONS"] = self.gpu.upper()
        return variables

    def wheel_pattern(self) -> str:
        """A glob for the wheel's file name: only this Python and this platform."""
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
        return f"horovod-{self.version}-{python}-{python}*-{platform}.whl"


def digest() -> str:
    """8 hexadecimal digits that change with the source, the build variables and the patches.

    The headers of the patches are not included: they do not change what is compiled.
    """
    content = hashlib.sha256(f"{SDIST_SHA256} {sorted(_ENVIRONMENT.items())}".encode())
    for patch in patches():
        content.update(patch.read_bytes().partition(b"\n--- ")[2])
    return content.hexdigest()[:8]


def source_version() -> str:
    """The version of the patched source, e.g. 0.28.1+p01234567."""
    return f"{VERSION}+p{digest()}"


def is_ours() -> bool:
    """Whether the installed Horovod has exactly the patches of this hvdtrain."""
    version = installed_version("horovod")
    return version is not None and re.split(r"[+.]", version)[-1] == f"p{digest()}"


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def described(version: str) -> str:
    """Describe a wheel by its version: what it was built for, and the digest of its patches."""
    release, _, local = version.partition("+")
    parts = rf"torch(.+?)(?:\.({mpis.PATTERN}))?\.gloo(?:\.mpi)?(?:\.gpu(\w+))?\.p(\w+)"
    found = re.fullmatch(parts, local)
    if found is None:
        return f"{version}, not built by `hvdtrain horovod build`"
    torch, mpi, gpu, patched = found.groups()
    torch = re.sub(r"\.(?=[a-z])", "+", torch, count=1)
    linked = mpis.find(mpi) if mpi else None
    controllers = "Gloo, MPI" if linked else "Gloo"
    return (
        f"{release} for torch {torch} {f'and {linked.title}' if linked else 'without MPI'} "
        f"({controllers}{', GPU operations ' + gpu.upper() if gpu else ''}), patches {patched}"
    )


def patches() -> list[Path]:
    """The patches in the order in which they are applied, which quilt also reads from `series`."""
    return [PATCHES / name for name in (PATCHES / "series").read_text().split()]


def detect(gpu: str = "none", mpi: bool = True) -> Recipe:
    """Return the recipe for this environment's torch and (unless `mpi` is off) MPI.

    Raises PackageNotFoundError if torch is missing, UserError if the MPI is unknown, or mpirun
    belongs to another one.
    """
    version = importlib.metadata.version("torch")
    return Recipe(torch=version, mpi=str(_detect_mpi()) if mpi else "", gpu=gpu)


def _detect_mpi() -> mpis.MPI:
    # The wheel is linked with the compiler's MPI, so its name states that one.
    words = mpis.compiler()
    compiled = mpis.of_compiler(words) if words else None
    if compiled is None:
        raise UserError(
            f"`{' '.join(words) or 'mpicxx'}` does not find mpi.h of Open MPI, MPICH, MVAPICH, "
            "Cray MPICH or Intel MPI: put the directory of mpicxx first on PATH, or set CXX to a "
            "compiler that finds MPI (on a Cray: CC=cc CXX=CC), or build with --without-mpi"
        )
    # Another launcher of the site, such as srun, may start the ranks.
    if not mpis.problem():
        launcher = mpis.of_launcher()
        if not launcher.starts(compiled):
            raise UserError(
                f"{shutil.which(words[0])} belongs to {compiled.title}, and "
                f"{shutil.which('mpirun')} to {launcher.title}, which would start each rank "
                "alone: put the directory of one of them first on PATH"
            )
    return compiled
