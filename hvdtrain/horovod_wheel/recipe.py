"""The inputs of the Horovod wheel, and the wheel name that encodes them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UserError

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
_MPI_BANNERS = (
    ("openmpi", r"Open MPI\)? v?(\d+(?:\.\d+)*)"),
    ("intelmpi", r"Intel\(R\) MPI Library.*?Version (\d+(?:\.\d+)*)"),
    ("mpich", r"HYDRA.*?Version:\s*(\d+(?:\.\d+)*)"),
    ("mpich", r"MPICH.*?[Vv]ersion:?\s*(\d+(?:\.\d+)*)"),
)


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
        parts = [f"torch{self.torch}", *mpi, *gpu, f"p{self._digest()}"]
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

    def _digest(self) -> str:
        content = hashlib.sha256(f"{SDIST_SHA256} {sorted(_ENVIRONMENT.items())}".encode())
        for patch in patches():
            content.update(patch.name.encode() + patch.read_bytes())
        return content.hexdigest()[:8]


def is_ours() -> bool:
    """Whether the installed Horovod was built by this recipe, with these patches."""
    version = installed_version("horovod")
    return version is not None and version.endswith(f".p{Recipe('', '')._digest()}")


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def patches() -> list[Path]:
    """The patches in the order in which they are applied."""
    return sorted(PATCHES.glob("*.patch"))


def detect(gpu: str = "none", mpi: bool = True) -> Recipe:
    """Return the recipe for this environment's torch and (unless `mpi` is off) MPI.

    Raises PackageNotFoundError if torch is missing, UserError if MPI's version is unknown.
    """
    version = importlib.metadata.version("torch")
    return Recipe(torch=version, mpi=_detect_mpi() if mpi else "", gpu=gpu)


def parse_mpi(banner: str) -> str | None:
    """Return e.g. `openmpi4.1.4` from the version output of an MPI program."""
    for name, pattern in _MPI_BANNERS:
        found = re.search(pattern, banner, re.DOTALL)
        if found:
            return name + found.group(1)
    return None


def _detect_mpi() -> str:
    # Try the compiler wrapper first, because the wheel is linked with it.
    for command in (["mpicxx", "--showme:version"], ["mpirun", "--version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        found = parse_mpi(done.stdout + done.stderr)
        if found:
            return found
    raise UserError(
        "cannot tell which MPI this is: neither `mpicxx --showme:version` nor "
        "`mpirun --version` names Open MPI, MPICH or Intel MPI"
    )
