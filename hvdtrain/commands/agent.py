"""`hvdtrain agent`: the process on each host that starts and ends its ranks."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hvdtrain.commands.arguments import at_least, seconds

_NVIDIA = "proc/driver/nvidia/gpus"
_AMD = "sys/class/kfd/kfd/topology/nodes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start and end the ranks of this host for the driver of a run, until the run ends. "
        "`hvdtrain launch` without hosts starts an agent on each host; start one by hand to add a "
        "host to a run. The agent finds the driver through the run directory, starts another one "
        "on its host if the driver dies, and exits with the exit code of the run."
    )
    parser.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="run directory, shared by all hosts"
    )
    add_slots(parser)
    parser.add_argument(
        "--host",
        default=socket.gethostname(),
        metavar="NAME",
        help="name of this host in the run (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds to wait for the driver (default: %(default)s)",
    )
    parser.add_argument("--driver", type=int, help=argparse.SUPPRESS)


def add_slots(parser: argparse.ArgumentParser) -> None:
    """Add the argument that both `agent` and `launch` have."""
    parser.add_argument(
        "--slots",
        type=at_least(1),
        metavar="N",
        help="maximum number of ranks on this host (default: its GPUs, or cores without GPUs)",
    )


def run(args: argparse.Namespace) -> int:
    from hvdtrain.agent.agent import AgentSettings, environment_of_ranks, keep

    slots = args.slots or default_slots()
    environment = environment_of_ranks()
    settings = AgentSettings(args.run.absolute(), args.host, slots, args.wait, environment)
    return keep(settings, args.driver)


def default_slots(env: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks: one per GPU; without GPUs, one per core of the Slurm job."""
    from hvdtrain.runtime.machine import cores

    if found := gpus(env):
        return found
    allocated = env.get("SLURM_CPUS_ON_NODE", "")
    return min(cores(), int(allocated)) if allocated.isdecimal() and int(allocated) else cores()


def gpus(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Return the number of GPUs that a process with this environment may use.

    Args:
        root: directory that contains /proc and /sys.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in env:
            return len([one for one in env[name].split(",") if one.strip() not in ("", "-1")])
    nvidia = len(list((root / _NVIDIA).glob("*")))
    return nvidia or sum(_is_gpu(node) for node in (root / _AMD).glob("*"))


def _is_gpu(node: Path) -> bool:
    with suppress(OSError):
        return any(
            line.startswith("simd_count ") and line.split()[1] != "0"
            for line in (node / "properties").read_text().splitlines()
        )
    return False
