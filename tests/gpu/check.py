"""Check hvdtrain on this machine's GPUs: `make gpu-check`, or `python3 -m tests.gpu.check`.

Requires only a Python with torch. Creates an environment on top of that Python's packages, from the
kit of `make gpu-kit` if it exists, compiles Horovod there with NCCL, and runs the table of
`tests/gpu/checks.py` in it. Without a GPU the checks run on the CPU as far as possible, and the
exit code is 2, never 0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel.process import run_logged
from tests.gpu.kit import KIT, REPOSITORY, WORK, requirements

INSTALL_SECONDS = 120
COMPILE_SECONDS = 420
CHECK_SECONDS = 1200


class Steps:
    """Commands with a time limit; their output is in one file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        # CMake may be a package of this Python.
        own = os.path.dirname(sys.executable)
        self._env = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:{own}"}
        if KIT.is_dir():
            self._env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(KIT)}

    def run(self, what: str, command: list[str], seconds: float) -> str:
        """Return its output.

        Raises:
            UserError: it failed, or exceeded the limit.
        """
        began = time.monotonic()
        own = WORK / "step.log"
        try:
            code = run_logged(command, own, seconds, self._env)
        finally:
            output = own.read_text(errors="replace")
            with self._log.open("a") as log:
                log.write(f"+ {' '.join(command)}\n{output}\n")
        if code:
            end = "\n".join(output.splitlines()[-25:])
            raise UserError(f"{what} failed; the complete output is in {self._log}:\n{end}")
        print(f"gpu-check: {what}: {time.monotonic() - began:.0f} s", flush=True)
        return output


def prepare(steps: Steps, gpu: bool) -> str:
    """Return the interpreter of an environment with hvdtrain and Horovod on top of this one's
    packages."""
    directory = WORK / "venv"
    shutil.rmtree(directory, ignore_errors=True)
    # Without pip, because ensurepip is missing on many machines. --system-site-packages would use
    # the packages of the base Python if this one is an environment itself.
    steps.run(
        "venv", [sys.executable, "-m", "venv", "--without-pip", str(directory)], INSTALL_SECONDS
    )
    python = str(directory / "bin" / "python")
    parents = [*site.getsitepackages(), site.getusersitepackages()]
    lines = [f"import site; site.addsitedir({parent!r})" for parent in parents]
    (here,) = directory.glob("lib/python*/site-packages")
    (here / "parents.pth").write_text("\n".join(lines) + "\n")
    pip = [python, "-m", "pip", "install", "--no-build-isolation"]
    if KIT.is_dir():
        # Install only missing or old packages, so that pip does not change that Python's packages.
        carried = [path.name.split("-")[0] for path in KIT.glob("*.whl")]
        steps.run("packages", [*pip, "--no-deps", *requirements(), *carried], INSTALL_SECONDS)
        steps.run("hvdtrain", [*pip, "--no-deps", "-e", "."], INSTALL_SECONDS)
    else:
        steps.run("hvdtrain", [*pip, "-e", ".[horovod]"], INSTALL_SECONDS)
    options = ["--gpu", "nccl"] if gpu else []
    if shutil.which("mpicxx") is None or shutil.which("mpirun") is None:
        options.append("--without-mpi")
    build = [python, "-m", "hvdtrain.cli", "horovod", "build", "--verbose", *options]
    wheel = steps.run("Horovod", build, COMPILE_SECONDS).splitlines()[-1]
    # --ignore-installed: the base Python may have another Horovod.
    steps.run("wheel", [*pip, "--no-deps", "--ignore-installed", wheel], INSTALL_SECONDS)
    return python


def count_gpus() -> int:
    """Return the number of GPUs that torch can use.

    Raises:
        UserError: torch is missing.
    """
    try:
        import torch
    except ImportError:
        raise UserError(f"{sys.executable} has no torch; PYTHON=... names another") from None
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def main() -> int:
    """Return 0: all checks passed; 1: a check failed; 2: there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=WORK / "results", help="default: %(default)s")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(REPOSITORY)
    log = out / "log.txt"
    log.write_text("")
    try:
        gpus = count_gpus()
        python = prepare(Steps(log), gpu=gpus > 0)
    except UserError as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
        return 1
    command = [python, "-m", "tests.gpu.checks", "--gpus", str(gpus)]
    command += ["--work", str(WORK / "runs"), "--out", str(out)]
    return subprocess.run(command, timeout=CHECK_SECONDS).returncode


if __name__ == "__main__":
    sys.exit(main())
