"""`hvdtrain agent`: the process on each host that starts and ends its ranks."""

from __future__ import annotations

import argparse
import socket
import time
from pathlib import Path

from hvdtrain.commands.arguments import at_least, seconds


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
    # Of `hvdtrain launch`, one of whose tasks becomes this agent.
    parser.add_argument("--task", action="store_true", help=argparse.SUPPRESS)
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
    from hvdtrain.agent.host import default_slots
    from hvdtrain.runtime.allocation import BORROWED, slurm_job
    from hvdtrain.runtime.queued_output import queued

    slots = args.slots or default_slots()
    environment, job = environment_of_ranks(), None if args.task else slurm_job()
    if job is not None:
        environment[BORROWED] = str(time.time())
    settings = AgentSettings(
        args.run.absolute(),
        args.host,
        slots,
        args.wait,
        environment,
        guest=not args.task,
        job=job,
    )
    with queued():
        return keep(settings, args.driver)
