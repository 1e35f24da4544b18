"""`hvdtrain horovod build`, `check` and `source`."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.horovod_wheel import build, check, recipe
from hvdtrain.runtime.signals import leave_on_sigterm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    builder = actions.add_parser("build", help="compile the wheel, or reuse the cached one")
    builder.add_argument(
        "--gpu",
        choices=recipe.GPU_CHOICES,
        default="none",
        help="library for GPU tensors: nccl, mpi (CUDA-aware), or none (default: %(default)s)",
    )
    builder.add_argument(
        "--without-mpi",
        action="store_true",
        help="for a machine without MPI: ranks can be started with horovodrun --gloo or hvdtrain "
        "launch (with hosts: --controller gloo), not with mpirun",
    )
    builder.add_argument(
        "--wheel-dir",
        type=Path,
        default=None,
        help="cache of wheels (default: ~/.cache/hvdtrain/wheels, or under XDG_CACHE_HOME)",
    )
    builder.add_argument("--install", action="store_true", help="install the wheel here as well")
    builder.add_argument("--verbose", action="store_true", help="show the compiler's output")
    actions.add_parser("check", help="all-reduce on 2 ranks of this machine, on each controller")
    source = actions.add_parser("source", help="write the patched source, to build it otherwise")
    source.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")


def run(args: argparse.Namespace) -> int:
    if args.action == "check":
        return check.run()
    leave_on_sigterm()
    if args.action == "source":
        build.write_source(args.directory)
        print(args.directory)
        return 0
    wheel = build.build(args.gpu, not args.without_mpi, args.wheel_dir, args.verbose)
    if args.install:
        build.install(wheel)
    # Print only the path on stdout, so that scripts and Dockerfiles can use it.
    print(wheel)
    return 0
