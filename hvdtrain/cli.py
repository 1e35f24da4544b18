"""The `hvdtrain` command: a table of subcommands, each imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hvdtrain.errors import UserError

# name -> the line of --help. The module is hvdtrain.commands.NAME with HELP,
# add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "train": "train a model (the same as `python -m hvdtrain.train`)",
    "launch": "start training on hosts that answer, and start it again after a failure",
    "discover": "print the hosts that answer, as host:slots",
    "horovod": "build Horovod's wheel for this environment, or check the one installed",
    "data": "prepare data: tokenize text into flat files",
    "audit": "prove from a run's files that each step was applied exactly once",
    "report": "show a run, or two side by side, as an HTML file",
    "top": "show the ranks of a running job in the terminal",
    "ckpt": "list, verify or export the checkpoints of a run",
    "profile": "say where the time of the profiled steps went, and which rank was late",
    "bench": "measure a training step and its scaling",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"hvdtrain: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hvdtrain", description="Training for PyTorch on clusters that run Horovod and MPI."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = arguments[0] if arguments else ""
    if named == "train":
        # It has a command line of its own, made from the configuration.
        train = importlib.import_module("hvdtrain.train")
        return int(train.main(arguments[1:]) or 0)
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, description=line)
        if name == named:
            module = importlib.import_module(f"hvdtrain.commands.{name}")
            module.add_arguments(subparser)
    args = parser.parse_args(arguments)
    return int(importlib.import_module(f"hvdtrain.commands.{args.command}").run(args))


if __name__ == "__main__":
    sys.exit(main())
