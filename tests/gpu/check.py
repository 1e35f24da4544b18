"""Check hvdtrain on this machine's GPUs: `make gpu-check`, or `python3 -m tests.gpu.check`.

Requires only a Python with torch and pip. The parts, in the order in which they are named:

    prepare   facts about the machine; an environment on top of that Python's packages, from the kit
              of `make gpu-kit` if it exists, with a Horovod with NCCL (compiled, or the kit's)
    ops       single operations in one process, tests/gpu/ops.py
    table     hvdtrain's own commands, tests/gpu/checks.py
    speed     tokens per second of hvdtrain and of a plain loop in turns, tests/gpu/speed.py

A part that fails does not stop the others, and none begins after --seconds. The results so far are
always in --out, in case the machine is lost. Without a GPU everything runs on the CPU as
far as possible, with tiny models, and the exit code is 2, never 0.
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
from hvdtrain.horovod_wheel.process import TimedOutError, run_logged
from tests.gpu.kit import COMPILER_FLAGS, KIT, PROGRAMS, REPOSITORY, WHEELS, WORK, requirements

VENV = WORK / "venv"
PYTHON = VENV / "bin" / "python"
PARTS = ("prepare", "ops", "table", "speed")
INSTALL_SECONDS = 120
COMPILE_SECONDS = 1200
LEAST_SECONDS = 20  # a part does not begin with less
END_SECONDS = 10  # for a part to end its processes
# Shell commands that describe the machine; each may fail.
FACTS = """
date; uname -r; nproc; free -g | head -2; df -h . /tmp /dev/shm; python3 -V
nvidia-smi
q() { nvidia-smi --query-gpu=$1 --format=csv; }
q name,driver_version,compute_mode,ecc.mode.current,mig.mode.current
q clocks_event_reasons.hw_slowdown,clocks_event_reasons.hw_thermal_slowdown
for p in g++ make patch cmake ninja nvcc mpirun strip taskset; do echo "$p: $(command -v $p)"; done
nvcc --version | tail -2; g++ --version | head -1; cmake --version | head -1
ldconfig -p | grep -E 'libcuda\\.|libnccl|libmpi|libnvidia-ml'
python3 -c "import ctypes; ctypes.CDLL('libcuda.so'); print('libcuda.so loads')" 2>&1 | tail -1
grep -E 'VmHWM|VmRSS' /proc/self/status
python3 -c "
import torch, importlib.metadata as m
print(torch.__version__, m.version('torch'), torch.version.cuda, torch.cuda.nccl.version())
print(torch.cuda.get_device_properties(0), torch.cuda.mem_get_info())" 2>&1 | tail -2
"""


class Steps:
    """Commands with a time limit; their output is in one file.

    Args:
        log: the file.
        seconds: limit of all commands together.
    """

    def __init__(self, log: Path, seconds: float) -> None:
        self._log = log
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left."""
        return self._until - time.monotonic()

    def run(
        self, what: str, command: list[str], seconds: float, env: dict[str, str] | None = None
    ) -> str:
        """Return its output.

        Raises:
            UserError: it failed, or exceeded the limit.
        """
        began = time.monotonic()
        own = WORK / "step.log"
        try:
            code = run_logged(command, own, min(seconds, self.left), env or environment())
        finally:
            output = own.read_text(errors="replace")
            with self._log.open("a") as log:
                log.write(f"+ {' '.join(command)}\n{output}\n")
        if code:
            end = "\n".join(output.splitlines()[-25:])
            raise UserError(f"{what} failed; the complete output is in {self._log}:\n{end}")
        print(f"gpu-check: {what}: {time.monotonic() - began:.0f} s", flush=True)
        return output


def environment() -> dict[str, str]:
    """Variables of all commands: programs of the environment, the kit, and this Python (CMake may
    be a package)."""
    env = dict(os.environ)
    paths = [str(VENV / "bin"), env.get("PATH", os.defpath)]
    paths += [str(PROGRAMS), os.path.dirname(sys.executable)]
    env["PATH"] = os.pathsep.join(paths)
    if KIT.is_dir():
        env |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(KIT)}
    return env


def compiler_environment(capabilities: list[str]) -> dict[str, str]:
    """Variables of the compilation: all cores, and only the given GPUs' code."""
    env = environment() | COMPILER_FLAGS
    # Below make, the build would ignore MAKEFLAGS as those of the outer make.
    env.pop("MAKELEVEL", None)
    env["MAKEFLAGS"] = f"-j{len(os.sched_getaffinity(0))}"
    if capabilities:
        env["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(capabilities)
    return env


def prepare(steps: Steps, capabilities: list[str]) -> None:
    """Create an environment with hvdtrain and Horovod on top of this one's packages.

    Args:
        capabilities: of this machine's GPUs, such as ["90"]; empty: torch has no CUDA.

    Raises:
        UserError: a step failed.
    """
    shutil.rmtree(VENV, ignore_errors=True)
    # Without pip, because ensurepip is missing on many machines. --system-site-packages would use
    # the packages of the base Python if this one is an environment itself.
    steps.run("venv", [sys.executable, "-m", "venv", "--without-pip", str(VENV)], INSTALL_SECONDS)
    parents = [*site.getsitepackages(), site.getusersitepackages()]
    lines = [f"import site; site.addsitedir({parent!r})" for parent in parents]
    (here,) = VENV.glob("lib/python*/site-packages")
    (here / "parents.pth").write_text("\n".join(lines) + "\n")
    pip = [str(PYTHON), "-m", "pip", "install", "--no-build-isolation"]
    if KIT.is_dir():
        # Install only missing or old packages, so that pip does not change that Python's packages.
        carried = [path.name.split("-")[0] for path in KIT.glob("*.whl")]
        steps.run("packages", [*pip, "--no-deps", *requirements(), *carried], INSTALL_SECONDS)
        steps.run("hvdtrain", [*pip, "--no-deps", "-e", "."], INSTALL_SECONDS)
    else:
        steps.run("hvdtrain", [*pip, "-e", ".[horovod]"], INSTALL_SECONDS)
    options = ["--gpu", "nccl"] if capabilities else []
    path = environment()["PATH"]
    if shutil.which("mpicxx", path=path) is None or shutil.which("mpirun", path=path) is None:
        options.append("--without-mpi")
    if WHEELS.is_dir():
        options += ["--wheel-dir", str(WHEELS)]
    build = [str(PYTHON), "-m", "hvdtrain.cli", "horovod", "build", "--verbose", *options]
    env = compiler_environment(capabilities)
    wheel = steps.run("Horovod", build, COMPILE_SECONDS, env).splitlines()[-1]
    # --ignore-installed: the base Python may have another Horovod.
    steps.run("wheel", [*pip, "--no-deps", "--ignore-installed", wheel], INSTALL_SECONDS)


def describe(out: Path) -> None:
    """Write facts about this machine into facts.txt."""
    with (out / "facts.txt").open("w") as file:
        try:
            subprocess.run(["bash", "-c", FACTS], stdout=file, stderr=subprocess.STDOUT, timeout=90)
        except subprocess.TimeoutExpired:
            file.write("\nnot complete after 90 s\n")


def gpus_of_torch() -> tuple[int, list[str]]:
    """Return the number of GPUs that torch can use, and the compute capabilities to compile for.

    If torch has CUDA but there is no GPU, Horovod is still compiled with NCCL, for one capability.

    Raises:
        UserError: torch is missing.
    """
    try:
        import torch
    except ImportError:
        raise UserError(f"{sys.executable} has no torch; PYTHON=... names another") from None
    if not torch.version.cuda:
        return 0, []
    if not torch.cuda.is_available():
        return 0, ["90"]
    count = torch.cuda.device_count()
    found = {torch.cuda.get_device_capability(gpu) for gpu in range(count)}
    return count, [f"{major}{minor}" for major, minor in sorted(found)]


def command_of(part: str, gpus: int, out: Path, seconds: float) -> list[str]:
    """Return the command of a part other than `prepare`."""
    modules = {
        "ops": ["tests.gpu.ops"],
        "table": ["tests.gpu.checks", "--work", str(WORK / "runs")],
        "speed": ["tests.gpu.speed"],
    }
    common = ["--gpus", str(gpus), "--out", str(out), "--seconds", f"{seconds:.0f}"]
    return [str(PYTHON), "-m", *modules[part], *common]


def run_part(command: list[str], log: Path, seconds: float) -> int:
    """Run a command that prints its own results; return its exit code, 1 if it is ended.

    All its processes are ended with it.
    """
    env = environment() | {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}
    try:
        return run_logged(command, log, seconds, env, verbose=True)
    except TimedOutError as error:
        print(f"gpu-check: {log.stem}: {error}", flush=True)
        return 1


def main() -> int:
    """Return 0: all checks passed; 1: a check failed; 2: none failed, but there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=WORK / "results", help="default: %(default)s")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--seconds", type=float, default=3600, help="of all parts (%(default)s)")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(REPOSITORY)
    log = out / "log.txt"
    log.touch()
    steps = Steps(log, args.seconds)
    codes = []
    try:
        gpus, capabilities = gpus_of_torch()
        if "prepare" in args.parts:
            describe(out)
            prepare(steps, capabilities)
        elif not PYTHON.exists():
            raise UserError("there is no environment yet: begin with --parts prepare")
    except UserError as error:
        print(f"gpu-check: error: {error}", file=sys.stderr)
        return 1
    for part in (part for part in args.parts if part != "prepare"):
        if steps.left < LEAST_SECONDS:
            print(f"gpu-check: {part}: no time left", flush=True)
            codes.append(1)
            continue
        print(f"gpu-check: {part} ({steps.left:.0f} s left)", flush=True)
        command = command_of(part, gpus, out, steps.left - END_SECONDS)
        codes.append(run_part(command, out / f"{part}.log", steps.left))
    if any(codes):
        print(f"gpu-check: something failed; the results are in {out}")
        return 1
    if not gpus:
        print("gpu-check: no GPU here: nothing is proven but the script itself")
        return 2
    print("gpu-check: all passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
