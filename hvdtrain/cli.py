"""The `hvdtrain` command: a table of subcommands, each imported on demand."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from errno import EDQUOT, EIO, ENOSPC
from typing import Any, NoReturn

from hvdtrain.errors import EXIT_CRASH, EXIT_USER, UserError, of_import
from hvdtrain.launch.commands import forget_singleton
from hvdtrain.runtime.environment import process_start
from hvdtrain.streams import flush, open_missing, say
from hvdtrain.text import styled
from hvdtrain.untrusted import printable_lines

# Group in --help -> name -> help line. The module is hvdtrain.commands.NAME with
# add_arguments(parser) and run(args) -> exit code.
GROUPS = {
    "training": {
        "train": "train a model; with launchers use python -m hvdtrain.train",
        "launch": "train on the hosts that respond, and restart after a failure",
        "agent": "start and end this host's ranks for the driver of a run",
        "fill": "lend idle nodes of a Slurm to a run",
        "discover": "print the hosts that respond, as host:slots",
        "tasks": "list the installed tasks, and the keys of each",
    },
    "before a run": {
        "check": "find what differs on more ranks, after a resume or a failure",
        "doctor": "find problems of hosts before a run, or why a run failed",
        "plan": "predict step time, scaling, memory and price on a cluster",
        "deploy": "write files that start a job on Slurm, PBS, LSF, Flux, Kubernetes",
        "horovod": "build Horovod's wheel for this environment, or check it",
        "data": "tokenize text, index large files, compute column statistics",
        "bench": "measure a training step and its scaling",
    },
    "runs": {
        "ls": "list the runs of a directory: state, step, loss, ranks, age",
        "top": "show the ranks of a running job in the terminal",
        "report": "show one or two runs as HTML, or all runs live in a browser",
        "audit": "prove from a run's files that each step was applied exactly once",
        "profile": "show where profiled steps spent time, and which rank was late",
    },
    "trained models": {
        "ckpt": "list, verify or export the checkpoints of a run",
        "takeover": "continue the run of another trainer, with its optimizer",
        "generate": "generate text with the model of a run's newest checkpoint",
    },
    "shell": {"completion": "print a script that completes commands and keys: bash, zsh"},
}
KEYS = "flags"  # argument for the words after `--`: keys of the configuration
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}


class _Parser(argparse.ArgumentParser):
    """Parser that suggests corrections; also used for subcommands, where the innermost suggests."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        option = "/".join(action.option_strings)
        what = f"{option}: unknown value" if option else f"unknown {action.metavar}".lower()
        self._end(f"{what} {value!r}", str(value), choices, f"choose from {', '.join(choices)}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else [*args]
        # argparse takes `*` as empty, if options are between the other arguments and `--`.
        keys: list[str] = []
        if any(action.dest == KEYS for action in self._actions) and "--" in words:
            at = words.index("--")
            words, keys = words[:at], words[at + 1 :]
        namespace, unknown = super().parse_known_args(words, namespace)
        if keys:
            unknown += getattr(namespace, KEYS)
            setattr(namespace, KEYS, keys)
        if unknown:
            name = unknown[0].partition("=")[0]
            options = self._option_string_actions if name.startswith("-") else ()
            see = f"see {self.prog} --help"
            if "." in name and name.startswith("--"):
                see = "configuration keys follow `--`, for commands that accept them"
            self._end(f"unknown argument {name}", name, options, see)
        return namespace, unknown

    def _end(self, problem: str, given: str, known: Iterable[str], otherwise: str) -> NoReturn:
        near = difflib.get_close_matches(given, known, n=1)
        hint = f"did you mean {near[0]}?" if near else otherwise
        self.exit(EXIT_USER, f"{self.prog}: error: {problem}; {hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code of the process."""
    open_missing()
    arguments = list(sys.argv[1:] if argv is None else argv)
    forget_singleton(os.environ)
    code = EXIT_CRASH
    try:
        code = _dispatch(arguments, is_process=argv is None)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        flush()  # the reader of the output, such as `head`, has ended
        return code
    except OSError as error:
        if error.filename is not None or error.errno not in (ENOSPC, EDQUOT, EIO):
            raise
        flush()
        _report(f"the output could not be written ({error.strerror})")
        return EXIT_CRASH
    except ImportError as error:
        reported = of_import(error)
        if reported is None:
            raise
        _report(str(reported))
        return reported.exit_code
    except UserError as error:
        _report(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _report(message: str) -> None:
    # The message may contain names of other users' files.
    mark = styled("error:", "bold red", sys.stderr)
    say(f"hvdtrain: {mark} {printable_lines(message)}")


def _dispatch(arguments: list[str], is_process: bool) -> int:
    parser = _Parser(
        prog="hvdtrain",
        usage="hvdtrain COMMAND ...",
        description="Training for PyTorch on clusters that run Horovod and MPI.",
        epilog=_listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="print versions: hvdtrain, torch, Horovod's build, MPI, Python",
    )
    if arguments == ["--version"]:
        print(_versions())
        return 0
    if not arguments:
        parser.print_help(sys.stderr)
        return EXIT_USER
    subparsers = parser.add_subparsers(
        prog="hvdtrain", dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS
    )
    named = arguments[0] if arguments else ""
    if named == "train":
        # `train` builds its own command line from the configuration.
        train = importlib.import_module("hvdtrain.train")
        if is_process:
            train.end_process(train.main(arguments[1:], process_start()))
        return int(train.main(arguments[1:]))
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, description=f"{line[0].upper()}{line[1:]}.")
        if name == named or (named == "completion" and name != "train"):
            module = importlib.import_module(f"hvdtrain.commands.{name}")
            module.add_arguments(subparser)
    args = parser.parse_args(arguments)
    args.parser = parser  # for `completion`, which lists all commands and options
    return int(importlib.import_module(f"hvdtrain.commands.{args.command}").run(args))


def _versions() -> str:
    """Return one line for each part, without importing torch or Horovod."""
    from hvdtrain.horovod_wheel.recipe import described, installed_version
    from hvdtrain.launch import mpi
    from hvdtrain.version import __version__

    torch, horovod = installed_version("torch"), installed_version("horovod")
    try:
        launcher = mpi.of_launcher().title
    except UserError as error:
        launcher = f"MPI: {error}"
    lines = [
        f"hvdtrain {__version__}",
        f"torch {torch}" if torch else "torch: not installed",
        f"Horovod {described(horovod)}" if horovod else "Horovod: not installed",
        launcher,
        f"Python {sys.version.split()[0]} ({sys.executable})",
    ]
    return "\n".join(lines)


def _listed() -> str:
    """Format the table of subcommands by group."""
    width = max(map(len, COMMANDS))
    parts = [
        "\n".join([f"{title}:", *(f"  {name:{width}}  {line}" for name, line in group.items())])
        for title, group in GROUPS.items()
    ]
    return "\n\n".join([*parts, "hvdtrain COMMAND --help describes one command."])


if __name__ == "__main__":
    sys.exit(main())
