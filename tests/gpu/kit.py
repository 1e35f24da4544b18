"""Collect files for `make gpu-check` on a machine without network: `make gpu-kit`.

Horovod's source, and wheels of the packages that a Python with torch may lack. torch, NumPy and
CUDA's libraries must be on that machine. Requires only the standard library.
"""

from __future__ import annotations

import argparse
import configparser
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from hvdtrain.errors import UserError
from hvdtrain.horovod_wheel import build

REPOSITORY = Path(__file__).resolve().parents[2]
WORK = REPOSITORY / "build" / "gpu-check"
KIT = WORK / "kit"
DOWNLOAD_SECONDS = 600
# Large, and specific to the machine: torch fits its driver, and NumPy fits torch.
_LEFT_OUT = ("torch", "numpy")
# Platforms of extensions on PyPI; pip accepts each by its exact name.
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")


def gather(python: str, machine: str) -> None:
    """Fill `KIT` for a Python ("3.12") and a processor ("x86_64").

    Raises:
        UserError: something cannot be downloaded.
    """
    shutil.rmtree(KIT, ignore_errors=True)
    KIT.mkdir(parents=True)
    archive = build.download(KIT)
    for path in KIT.iterdir():
        if path != archive:
            path.unlink()
    command = [sys.executable, "-m", "pip", "download", "--no-input", "-q", "-d", str(KIT)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for name in _PLATFORMS:
        command += ["--platform", f"{name}_{machine}"]
    # torch's extensions do not build with newer versions.
    wanted = [*requirements(), "setuptools<82"]
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


def main() -> int:
    """Print the location and size of the kit."""
    parser = argparse.ArgumentParser(description=__doc__)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=version, help="of the GPU machine (here: %(default)s)")
    parser.add_argument("--machine", default=platform.machine(), help="its processor (%(default)s)")
    args = parser.parse_args()
    try:
        gather(args.python, args.machine)
    except (UserError, subprocess.TimeoutExpired) as error:
        print(f"gpu-kit: error: {error}", file=sys.stderr)
        return 1
    files = list(KIT.iterdir())
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"gpu-kit: {len(files)} files, {size:.0f} MB, for Python {args.python}: {KIT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
