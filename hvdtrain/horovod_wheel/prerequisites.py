"""Requirements for compiling Horovod on this machine."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel.cuda import Toolkit

# program -> Debian/Ubuntu package
PROGRAMS = {
    "patch": "patch",
    "cmake": "cmake",
    "make": "make",
    "g++": "g++",
}
MPI_PROGRAMS = {"mpicxx": "libopenmpi-dev", "mpirun": "openmpi-bin"}
# module -> pip package
MODULES = {
    "torch": "torch",
    "pip": "pip",
    "setuptools": "setuptools",
    "wheel": "wheel",
    "packaging": "packaging",
    "cffi": "cffi",
    "cloudpickle": "cloudpickle",
    "yaml": "pyyaml",
    "psutil": "psutil",
}


def check(mpi: bool = True, toolkit: Toolkit | None = None) -> None:
    """Raise UserError that lists everything that is missing, and how to install it.

    Args:
        mpi: whether Horovod is built with MPI.
        toolkit: CUDA for a build with GPU operations.
    """
    needed = PROGRAMS | (MPI_PROGRAMS if mpi else {})
    programs = [name for name in needed if not _has_program(name)]
    packages = [needed[name] for name in programs]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        programs.append("Python.h")
        packages.append("python3-dev")
    modules = [MODULES[name] for name in MODULES if importlib.util.find_spec(name) is None]
    no_cuda = toolkit.missing if toolkit else ""
    if not (programs or modules or no_cuda):
        return
    lines = ["Horovod cannot be compiled here yet."]
    if programs:
        lines.append(f"  missing on this machine: {', '.join(programs)}")
        lines.append(f"    sudo apt-get install -y {' '.join(dict.fromkeys(packages))}")
        if any(name in MPI_PROGRAMS for name in programs):
            lines.append("    or, where Gloo alone is enough: --without-mpi")
    if modules:
        python = shlex.quote(sys.executable)
        lines.append(f"  missing in this Python environment: {', '.join(modules)}")
        lines.append(f"    {python} -m pip install {' '.join(modules)}")
    if no_cuda:
        lines.append(f"  missing for GPUs: {no_cuda}")
    raise UserError("\n".join(lines))


def _has_program(name: str) -> bool:
    if name == "g++" and os.environ.get("CXX"):
        name = shlex.split(os.environ["CXX"])[0]
    return shutil.which(name) is not None
