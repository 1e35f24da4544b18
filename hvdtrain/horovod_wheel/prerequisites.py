"""What has to be on the machine before Horovod can be compiled."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

from hvdtrain.errors import UserError

# program -> Debian/Ubuntu package
PROGRAMS = {
    "patch": "patch",
    "cmake": "cmake",
    "make": "make",
    "g++": "g++",
    "mpicxx": "libopenmpi-dev",
    "mpirun": "openmpi-bin",
}
# module -> what pip calls it
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


def check(gpu: str = "none") -> None:
    """Raise UserError that names everything that is missing, and how to install it."""
    programs = [name for name in PROGRAMS if not _has_program(name)]
    packages = [PROGRAMS[name] for name in programs]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        programs.append("Python.h")
        packages.append("python3-dev")
    modules = [MODULES[name] for name in MODULES if importlib.util.find_spec(name) is None]
    cuda = gpu != "none" and not _has_cuda()
    if not (programs or modules or cuda):
        return
    lines = ["Horovod cannot be compiled here yet."]
    if programs:
        lines.append(f"  missing on this machine: {', '.join(programs)}")
        lines.append(f"    sudo apt-get install -y {' '.join(dict.fromkeys(packages))}")
    if modules:
        python = shlex.quote(sys.executable)
        lines.append(f"  missing in this Python environment: {', '.join(modules)}")
        lines.append(f"    {python} -m pip install {' '.join(modules)}")
    if cuda:
        lines.append(f"  missing for --gpu {gpu}: nvcc")
        lines.append(
            "    install NVIDIA's CUDA toolkit of torch's version, or set HOROVOD_CUDA_HOME"
        )
    raise UserError("\n".join(lines))


def _has_program(name: str) -> bool:
    if name == "g++" and os.environ.get("CXX"):
        name = shlex.split(os.environ["CXX"])[0]
    return shutil.which(name) is not None


def _has_cuda() -> bool:
    homes = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    return shutil.which("nvcc") is not None or any(
        Path(home, "bin", "nvcc").is_file() for home in homes if home
    )
