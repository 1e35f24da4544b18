"""`hvdtrain fill RUN`: lend idle nodes of a Slurm to a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.commands.arguments import at_least, number_at_least, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Submit jobs that lend idle nodes of a Slurm to an elastic run, while the run gains from "
        "them, until it ends; exit with its exit code. `hvdtrain deploy malleable` writes the "
        "scripts of the run and of these jobs. Start it in the directory in which the run was "
        "submitted, on a host that may submit jobs."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--most",
        type=at_least(1),
        required=True,
        metavar="N",
        help="maximum number of lent nodes",
    )
    parser.add_argument(
        "--donor",
        type=Path,
        default=Path("malleable/donor.sbatch"),
        metavar="FILE",
        help="script of a job that lends a node (default: %(default)s)",
    )
    parser.add_argument(
        "--every",
        type=number_at_least(1.0),
        default=10.0,
        metavar="S",
        help="seconds between two looks at the queue (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds to wait for a driver of the run (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    from hvdtrain.deploy.fill import Fill
    from hvdtrain.runtime.signals import leave_on_sigterm

    leave_on_sigterm()
    fill = Fill(args.run.absolute(), args.donor, args.most, args.every, args.wait)
    return fill.until_the_end()
