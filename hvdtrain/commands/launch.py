"""`hvdtrain launch`: training that is started again after a failure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvdtrain.commands.discover import add_host_arguments, seconds
from hvdtrain.errors import UserError

HELP = "start training on hosts that answer, and start it again after a failure"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_host_arguments(parser)
    parser.add_argument(
        "--min-np", type=_positive, default=1, metavar="N", help="ranks at least (default: 1)"
    )
    parser.add_argument(
        "--max-np", type=_positive, metavar="N", help="ranks at most (default: all slots)"
    )
    parser.add_argument(
        "--controller",
        choices=("mpi", "gloo"),
        default="mpi",
        help="mpi: mpirun, a failure restarts all ranks; gloo: elastic horovodrun, the other "
        "ranks continue (default: %(default)s)",
    )
    parser.add_argument(
        "--max-restarts",
        type=_not_negative,
        default=10,
        metavar="N",
        help="restarts without progress (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="for hosts with --min-np slots (default: %(default)s)",
    )
    parser.add_argument(
        "arguments", nargs="*", metavar="-- --key value", help="keys of the configuration"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not >= 1")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not >= 0")
    return number


def run(args: argparse.Namespace) -> int:
    from hvdtrain.launch.discovery import parse_probe
    from hvdtrain.launch.hostfile import read_hosts
    from hvdtrain.supervise.supervisor import Plan, Supervisor

    probe = parse_probe(args.probe)
    hosts = read_hosts(args.hosts, args.hostfile, args.slurm)
    slots = sum(host.slots for host in hosts)
    if args.max_np is not None and args.max_np < args.min_np:
        raise UserError(f"--max-np {args.max_np} is less than --min-np {args.min_np}")
    if slots < args.min_np:
        raise UserError(f"--min-np {args.min_np}, but the hosts have {slots} slots together")
    return Supervisor(
        Plan(
            controller=args.controller,
            min_np=args.min_np,
            max_np=args.max_np,
            max_restarts=args.max_restarts,
            wait=args.wait,
            hosts=lambda: read_hosts(args.hosts, args.hostfile, args.slurm),
            discovery=_discovery(args),
            probe=probe,
            train=[sys.executable, "-m", "hvdtrain.train", *args.arguments],
            run=_run_folder(args.arguments),
        )
    ).run()


def _run_folder(arguments: list[str]) -> Path:
    """Where the run's files will lie: a mistake in the arguments ends here."""
    from hvdtrain.config import parse

    run = parse(arguments).config.run
    if run.id is None:
        raise UserError(
            "run.id is missing: a restart, also one on another machine, resumes the run of "
            "that name; add --run.id NAME after the --"
        )
    folder = (Path(run.root) / run.id).absolute()
    resumed = Path(run.resume).absolute()
    if run.resume == "never" or folder in resumed.parents:
        raise UserError(
            f"run.resume {run.resume}: each restart would lose what was done since; auto is "
            "expected, or a checkpoint of another run"
        )
    return folder


def _discovery(args: argparse.Namespace) -> list[str]:
    if args.hostfile is not None:
        source = ["--hostfile", str(Path(args.hostfile).absolute())]
    else:
        source = ["--slurm"] if args.slurm else ["--hosts", args.hosts]
    return [sys.executable, "-m", "hvdtrain.cli", "discover", *source, "--probe", args.probe]
