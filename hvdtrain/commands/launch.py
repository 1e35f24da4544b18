"""`hvdtrain launch`: training with automatic restarts after failures."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.commands.agent import add_slots
from hvdtrain.commands.arguments import at_least, seconds
from hvdtrain.commands.discover import add_host_arguments
from hvdtrain.elastic.command import horovod_script, script_command, training_command
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.config import Config

_FIRST_TASK_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Start training on hosts that respond, and continue it after a failure. Without hosts, "
        "this process starts the ranks of its own host through an agent (hvdtrain agent). Start it "
        "once per host, with `srun --ntasks-per-node=1 --no-kill`, `mpiexec -ppn 1`, pbsdsh or by "
        "hand, as in containers: together the processes form one elastic run, without ssh. The "
        "first of them runs the driver; if it dies, another host replaces it."
    )
    add_host_arguments(parser, required=False)
    add_slots(parser)
    parser.add_argument(
        "--min-np",
        type=at_least(1),
        default=1,
        metavar="N",
        help="minimum number of ranks (default: 1)",
    )
    parser.add_argument(
        "--max-np",
        type=at_least(1),
        metavar="N",
        help="maximum number of ranks (default: all slots)",
    )
    parser.add_argument(
        "--controller",
        choices=("mpi", "gloo"),
        help="mpi: mpirun, a failure restarts all ranks (default); gloo: elastic horovodrun, the "
        "other ranks continue (always without hosts)",
    )
    parser.add_argument(
        "--max-restarts",
        type=at_least(0),
        default=10,
        metavar="N",
        help="maximum number of restarts without progress (default: %(default)s)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds to wait for hosts with --min-np slots (default: %(default)s)",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="encrypt the connections of agents; only without --hosts, --hostfile or --slurm",
    )
    parser.add_argument(
        "training",
        nargs=argparse.REMAINDER,
        metavar="-- --key value",
        help="keys of the configuration; a command that starts training may precede them, as for "
        "horovodrun: python -m hvdtrain.train, or python SCRIPT. The script uses "
        "hvdtrain.training, or hvd.elastic with --controller gloo or without hosts; any other "
        "script is restarted and must resume from its own files",
    )
    parser.usage = (
        f"{parser.prog} [--hosts LIST | --hostfile FILE | --slurm] [options] "
        "-- [python -m hvdtrain.train | python SCRIPT] --key value ..."
    )


def run(args: argparse.Namespace) -> int:
    from hvdtrain.runtime.queued_output import queued

    with queued():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from hvdtrain.launch.discovery import parse_probe
    from hvdtrain.launch.hostfile import read_hosts, total_slots
    from hvdtrain.supervise.supervisor import SupervisedRun, Supervisor

    words = args.training[1:] if args.training[:1] == ["--"] else args.training
    command = rank_command(words)
    if args.max_np is not None and args.max_np < args.min_np:
        raise UserError(f"--max-np {args.max_np} is less than --min-np {args.min_np}")
    if not (args.hosts or args.hostfile or args.slurm):
        return _run_in_allocation(args, command)
    if args.slots is not None:
        raise UserError("--slots is for a launch without hosts; write slots as in node1:8")
    if args.tls:
        raise UserError("--tls is for a launch without hosts: ssh encrypts the others")
    probe = parse_probe(args.probe)
    hosts = read_hosts(args.hosts, args.hostfile, args.slurm)
    slots = total_slots(hosts)
    if slots < args.min_np:
        raise UserError(f"--min-np {args.min_np}, but the hosts have {slots} slots together")
    return Supervisor(
        SupervisedRun(
            controller=args.controller or "mpi",
            min_np=args.min_np,
            max_np=args.max_np,
            max_restarts=args.max_restarts,
            wait=args.wait,
            hosts=lambda: read_hosts(args.hosts, args.hostfile, args.slurm),
            discovery=_discovery(args),
            probe=probe,
            train=command.train,
            run=_run_directory(command),
            steps_known=command.ours,
        )
    ).run()


class RankCommand(NamedTuple):
    """The command after the `--`.

    Args:
        train: argv of a rank.
        flags: its keys of the configuration.
        ours: it trains with hvdtrain.
    """

    train: list[str]
    flags: list[str]
    ours: bool = True


def _run_in_allocation(args: argparse.Namespace, command: RankCommand) -> int:
    """Be the agent of this host; a child of the first task is the driver."""
    from hvdtrain.supervise.allocation import (
        AllocationRun,
        become_agent,
        joins,
        run_first_task,
        this_task,
    )

    if args.controller == "mpi":
        raise UserError(
            "--controller mpi requires hosts (--hosts, --hostfile or --slurm): without hosts the "
            "ranks run under gloo"
        )
    task = this_task()
    try:
        elastic = None if command.ours else horovod_script(command.train)
        if not command.ours and elastic is None:
            raise UserError(
                "neither the script nor a module that it imports uses hvdtrain.training (set "
                "HVDTRAIN_ELASTIC=1 if it trains with hvdtrain) or hvd.elastic, and agents start "
                "only elastic ranks: give hosts (--hosts, --hostfile or --slurm)"
            )
        plan = AllocationRun(
            min_np=args.min_np,
            max_np=args.max_np,
            slots=args.slots,
            wait=args.wait,
            driver_timeout=_configuration(command.flags).elastic.driver_timeout,
            train=elastic or command.train,
            run=_launch_directory(command) if elastic else _run_directory(command),
            tls=args.tls,
            horovod_script=elastic is not None,
        )
    except UserError:
        if task.number > 0:
            time.sleep(_FIRST_TASK_SECONDS)  # the first task reports the error, which ends all
        raise
    if task.number > 0 or joins(plan):
        become_agent(plan)
    return run_first_task(plan, task.hosts)


def rank_command(words: list[str]) -> RankCommand:
    """Return the command of a rank from the words after the `--`.

    A named Python must belong to this environment. Ranks get this Python's path, because a bare
    name may be another program on each host.
    """
    if not words or words[0].startswith("-"):
        return RankCommand([sys.executable, "-m", "hvdtrain.train", *words], words)
    training = training_command(words)
    script = None if training is not None else script_command(words)
    command = training or script
    if command is None:
        missing = [word for word in words if word.endswith(".py") and not Path(word).exists()]
        if missing:
            raise UserError(f"{missing[0]} does not exist here ({Path.cwd()})")
        raise UserError(
            f"`{shlex.join(words)}` does not start training: keys of the configuration are "
            "expected after the --, alone or as `python -m hvdtrain.train --key value ...`, "
            "`hvdtrain train --key value ...`, or `python SCRIPT ...`"
        )
    before, program = words[: command.program], words[command.program]
    if Path(program).name == "hvdtrain":
        if program != "hvdtrain" and Path(program).parent != Path(sys.executable).parent:
            raise UserError(_other(program))
        train = [*before, sys.executable, "-m", "hvdtrain.train", *command.flags]
        return RankCommand(train, command.flags)
    if _environment(program) != _environment(sys.executable):
        raise UserError(_other(program))
    train = [*before, sys.executable, *words[command.program + 1 :]]
    if script is None:
        return RankCommand(train, command.flags)
    if not (script.own_loop or os.environ.get("HVDTRAIN_ELASTIC") == "1"):
        return RankCommand(train, [], ours=False)
    from hvdtrain.api.flags import configuration_words

    return RankCommand(train, [*configuration_words(command.flags)])


def _environment(python: str) -> str:
    """The installation an interpreter belongs to; "" if it cannot be started."""
    show = "import sys; print(sys.prefix, sys.version)"
    try:
        done = subprocess.run([python, "-c", show], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _other(program: str) -> str:
    found = shutil.which(program) or "not on PATH"
    return (
        f"`{program}` ({found}) is not of the environment that hvdtrain launch runs in "
        f"({sys.executable}), whose Python the ranks get: leave the command out and give its keys "
        "alone, or start hvdtrain launch from the other environment"
    )


def _configuration(flags: list[str]) -> Config:
    """Return the configuration; wrong flags raise here."""
    from hvdtrain.config import parse

    return parse(flags).config


def _run_directory(command: RankCommand) -> Path:
    """Return RUN/; for a script that does not train with hvdtrain, a directory of the launcher."""
    if not command.ours:
        directory = _launch_directory(command)
        print(
            "hvdtrain launch: neither the script nor a module that it imports uses "
            "hvdtrain.training (set HVDTRAIN_ELASTIC=1 if it trains with hvdtrain), so its steps "
            "are not known: after a failure it is restarted, and must resume from its own files; "
            "records of its hosts are in "
            f"{directory}",
            file=sys.stderr,
        )
        return directory
    run = _configuration(command.flags).run
    if run.id is None:
        raise UserError(
            "run.id is missing: a restart, also one on another machine, resumes the run of "
            "that name; add --run.id NAME after the --"
        )
    directory = (Path(run.root) / run.id).absolute()
    resumed = Path(run.resume).absolute()
    if run.resume == "never" or directory in resumed.parents:
        raise UserError(
            f"run.resume {run.resume}: each restart would lose what was done since; auto is "
            "expected, or a checkpoint of another run"
        )
    return directory


def _launch_directory(command: RankCommand) -> Path:
    name = hashlib.sha256("\0".join(command.train).encode()).hexdigest()[:8]
    return Path("runs").absolute() / f"launch-{name}"


def _discovery(args: argparse.Namespace) -> list[str]:
    if args.hostfile is not None:
        source = ["--hostfile", str(Path(args.hostfile).absolute())]
    else:
        source = ["--slurm"] if args.slurm else ["--hosts", args.hosts]
    return [sys.executable, "-m", "hvdtrain.cli", "discover", *source, "--probe", args.probe]
