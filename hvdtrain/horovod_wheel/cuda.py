"""Where CUDA's compiler and NCCL are, for a Horovod that is built for GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

_NCCL_IS_NAMED = ("HOROVOD_NCCL_HOME", "HOROVOD_NCCL_INCLUDE", "HOROVOD_NCCL_LIB")


def toolkit() -> Path | None:
    """The folder of CUDA's toolkit, which holds bin/nvcc; None where there is none."""
    homes = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    homes += [_toolkit_on_path(), "/usr/local/cuda"]
    folders = [Path(home) for home in homes if home]
    return next((folder for folder in folders if (folder / "bin" / "nvcc").is_file()), None)


def environment(scratch: Path) -> dict[str, str]:
    """What Horovod's CMake files and torch read, for a build with NCCL.

    torch's own NCCL is taken where it is a wheel, unless the environment names another: a
    process that has loaded torch has that library already, and needs no second one.

    Args:
        scratch: a folder that lives as long as the build.
    """
    home = toolkit()
    # torch looks above the nvcc on PATH, which may be a link or a script in another folder.
    variables = {"CUDA_HOME": str(home), "HOROVOD_CUDA_HOME": str(home)} if home else {}
    nccl = _nccl_of_torch()
    if nccl is None or any(name in os.environ for name in _NCCL_IS_NAMED):
        return variables
    library = next((nccl / "lib").glob("libnccl.so.*"))
    links = scratch / "nccl"
    links.mkdir()
    (links / "libnccl.so").symlink_to(library)  # the name that linkers look for
    return variables | {
        "HOROVOD_NCCL_INCLUDE": str(nccl / "include"),
        "HOROVOD_NCCL_LIB": str(links),
        "HOROVOD_NCCL_LINK": "SHARED",
    }


def _toolkit_on_path() -> str | None:
    """As nvcc itself says it: /usr/local/bin/nvcc may be a script that starts another one."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    command = [nvcc, "--dryrun", "-x", "cu", os.devnull]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"^#\$ TOP=(.+)$", said.stderr, re.MULTILINE)
    return os.path.realpath(found.group(1).strip()) if found else None


def _nccl_of_torch() -> Path | None:
    """The folder of the package nvidia-nccl-cu13 (or 12): include/nccl.h, lib/libnccl.so.2."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        nccl = Path(folder, "nccl")
        if (nccl / "include" / "nccl.h").is_file() and list((nccl / "lib").glob("libnccl.so.*")):
            return nccl
    return None
