"""Find the relevant line of a long compiler log, and the fix."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

HEADER_PACKAGES = {
    "mpi.h": "sudo apt-get install libopenmpi-dev",
    "Python.h": "sudo apt-get install python3-dev",
    "ffi.h": "sudo apt-get install libffi-dev",
    "nccl.h": "libnccl-dev (from NVIDIA's repository), or set HOROVOD_NCCL_HOME",
    "cuda.h": "NVIDIA's CUDA toolkit of torch's version, or set HOROVOD_CUDA_HOME",
    "cuda_runtime.h": "NVIDIA's CUDA toolkit of torch's version, or set HOROVOD_CUDA_HOME",
    "cuda_runtime_api.h": "NVIDIA's CUDA toolkit of torch's version, or set HOROVOD_CUDA_HOME",
}

_CUDA_ADVICE = (
    "install NVIDIA's CUDA toolkit of torch's version, or set HOROVOD_CUDA_HOME, "
    "or build with --gpu none"
)
_STANDARD_ADVICE = (
    "the compiler or its flags stop at an older C++: use g++ {gcc} or newer "
    "(sudo apt-get install g++; CXX chooses another), and leave -std out of CXXFLAGS"
)
# Lines are matched without indentation. CMake reports optional packages as "-- Could NOT
# find", so those patterns start at the line's first word.
# Causes come before symptoms: the first pattern that occurs in the log wins.
_CAUSES = (
    (r"fatal error: (?P<header>\S+): No such file", "install what has it: {package}"),
    (r"No space left on device", "make room on the disk of the wheel directory"),
    (
        r"(Killed signal terminated program|internal compiler error: Killed|fatal error: Killed)",
        "the machine ran out of memory: add memory or swap, or set MAKEFLAGS=-j1",
    ),
    # __cplusplus of g++ 9 and 10 is below C++20's, which torch requires.
    (
        r"C\+\+20 or later|CXX_STANDARD.*20.*not|CXX20|unrecognized.*-std=(c|gnu)\+\+2[0a]",
        _STANDARD_ADVICE.format(gcc="11"),
    ),
    (
        r"C\+\+17 or later|CXX_STANDARD.*17.*not|CXX17|unrecognized.*-std=(c|gnu)\+\+17",
        _STANDARD_ADVICE.format(gcc="9"),
    ),
    # Any other compiler error outranks packages that CMake searched for without success.
    (r"^\S+:\d+:(\d+:)? error: ", ""),
    (
        r"RuntimeError: Failed to install temporary CMake|cmake: (command )?not found"
        r"|directory: 'cmake'",
        "install CMake: sudo apt-get install cmake",
    ),
    (
        r"No CMAKE_CXX_COMPILER could be found|CMAKE_CXX_COMPILER.*not set"
        r"|CMAKE_CXX_COMPILER:|g\+\+: (command )?not found",
        "install a C++ compiler: sudo apt-get install g++ make",
    ),
    (
        r"CMake was unable to find a build program|CMAKE_MAKE_PROGRAM is not set",
        "install make: sudo apt-get install make",
    ),
    (
        r"^Could NOT find MPI\b",
        "install MPI: sudo apt-get install openmpi-bin libopenmpi-dev",
    ),
    (
        r"^Could NOT find NCCL|^\S*NCCL.*not found",
        "install libnccl-dev (from NVIDIA's repository), or set HOROVOD_NCCL_HOME, "
        "or build with --gpu mpi or none",
    ),
    (
        r"this PyTorch installation does not support (CUDA|ROCm)",
        "install the build of torch that has it, or build with --gpu none",
    ),
    (
        r"^(Could NOT find|Failed to find|Could not find).*(CUDA|nvcc)"
        r"|^CUDA_TOOLKIT_ROOT_DIR not|^No CMAKE_CUDA_COMPILER",
        _CUDA_ADVICE,
    ),
    (
        r"^Could NOT find Python",
        "install Python's headers: sudo apt-get install python3-dev",
    ),
    (
        r"No module named 'torch'|^Could NOT find Pytorch",
        "install torch into this Python environment first",
    ),
    (r"No module named '(?P<module>[\w.]+)'", "install it here: python -m pip install {module}"),
)
_ANY_ERROR = re.compile(r": error: |^CMake Error|\berror: |Error \d+$|^\w*Error: ")


def diagnose(log: str) -> tuple[str, str]:
    """Return the relevant line of a build log and what to install or change.

    The advice is empty if the line is self-explanatory. The line is the last one of the log if no
    line looks like an error.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern, advice in _CAUSES:
        for line in lines:
            found = re.search(pattern, line)
            if found:
                return line, _for_this_machine(advice.format(**_names(found.groupdict())))
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if _ANY_ERROR.search(line):
            # CMake prints the location in one line and the error in the next.
            return following if line.startswith("CMake Error at") else line, ""
    return (lines[-1] if lines else "(the log is empty)"), ""


# Debian/Ubuntu package -> name of a module on clusters.
_MODULES = {
    "g++": "gcc",
    "libopenmpi-dev": "openmpi",
    "openmpi-bin": "openmpi",
    "python3-dev": "python",
}


_APT = re.compile(r"sudo apt-get install ([a-z][a-z0-9+-]*(?: [a-z][a-z0-9+-]*)*)")


def how_to_install(packages: Sequence[str], env: Mapping[str, str] = os.environ) -> str:
    """Return the command that installs these Debian/Ubuntu packages.

    On a cluster with environment modules (Lmod or Environment Modules), which users load instead,
    return the command that loads them.
    """
    if "LMOD_CMD" in env or "MODULESHOME" in env:
        modules = dict.fromkeys(_MODULES.get(package, package) for package in packages)
        return f"module load {' '.join(modules)} (`module avail` lists the names of your site)"
    return f"sudo apt-get install {' '.join(dict.fromkeys(packages))}"


def _for_this_machine(advice: str) -> str:
    return _APT.sub(lambda found: how_to_install(found[1].split()), advice)


def _names(found: dict[str, str]) -> dict[str, str]:
    header = found.get("header", "")
    name = header.rsplit("/", 1)[-1]
    package = HEADER_PACKAGES.get(
        header, HEADER_PACKAGES.get(name, f"the package that holds {header} (apt-file find {name})")
    )
    return {"package": package, **found}
