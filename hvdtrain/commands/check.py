"""`hvdtrain check -- python SCRIPT ...`: whether a script is the same on any ranks."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.commands.arguments import at_least, positive_number
from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.untrusted import printable_lines

if TYPE_CHECKING:
    from hvdtrain.check.certificate import Certificate

_LEAST_STEPS = 8  # half of them after a failure, of which some on the ranks that are left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run a script or a task for a few steps on 1 rank, on 2 ranks, from a checkpoint, and with "
        "a killed rank, on this machine. Compare losses, parameters, optimizer state, script state "
        "and samples bitwise, and name what differs and the likely cause."
    )
    parser.add_argument(
        "--steps",
        type=at_least(_LEAST_STEPS),
        default=20,
        metavar="N",
        help="steps of a run (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=600.0,
        metavar="S",
        help="maximum number of seconds of each run (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="new directory that keeps the files of all runs (default: they are removed)",
    )
    parser.add_argument(
        "training",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="python SCRIPT ... with hvdtrain.training, python -m hvdtrain.train ..., or keys of "
        "the configuration alone",
    )
    parser.usage = (
        f"{parser.prog} [--steps N] [--timeout S] [--out DIR] "
        "-- [python SCRIPT | python -m hvdtrain.train] ..."
    )


def run(args: argparse.Namespace) -> int:
    from hvdtrain.commands.launch import rank_command

    words = args.training[1:] if args.training[:1] == ["--"] else args.training
    if not words:
        raise UserError("no command: hvdtrain check -- python SCRIPT ...")
    command = rank_command(words)
    if not command.ours:
        raise UserError(
            "neither the script nor a module that it imports uses hvdtrain.training, so its steps "
            "are not known; if it trains with hvdtrain, set HVDTRAIN_ELASTIC=1"
        )
    if args.out is None:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-check-") as directory:
            certificate = _check(command.train, args, Path(directory))
    else:
        try:
            args.out.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"--out {args.out} cannot be created ({error.strerror}); choose a new directory"
            ) from None
        certificate = _check(command.train, args, args.out.absolute())
    print(printable_lines(certificate.to_text()))
    return 0 if certificate.same else EXIT_CRASH


def _check(command: list[str], args: argparse.Namespace, directory: Path) -> Certificate:
    from hvdtrain.check.certificate import check
    from hvdtrain.check.runs import RunStarter
    from hvdtrain.runtime.environment import launched_size

    if launched_size() not in (None, 1):
        raise UserError("hvdtrain check starts its own ranks: start it without a launcher")

    def say(title: str) -> None:
        print(f"hvdtrain check: {title} ...", file=sys.stderr, flush=True)

    # The runs end with this process.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return check(RunStarter(command, args.steps, directory, args.timeout, say))
    finally:
        signal.signal(signal.SIGTERM, before)
