"""`hvdtrain data tokenize`, alone or as `mpirun -np N hvdtrain data tokenize`."""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.runtime.mpi import Alone, Ranks, start_ranks

HELP = "prepare data: tokenize text into flat files"

# Every rank has the same error and rank 0 prints it; a launcher may end all with the first.
_LET_RANK_0_SPEAK = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    tokenize = actions.add_parser(
        "tokenize",
        help="text to train.u16, validation.u16 and tokens.json",
        description="Text to token files for --data.source tokens. Started by mpirun, the ranks "
        "share the work; the result does not depend on their number.",
    )
    tokenize.add_argument("--out", type=Path, required=True, metavar="DIR")
    tokenize.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB",
        help="files, folders or globs (default: the Python standard library's own source files)",
    )
    tokenize.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json (default: bytes, vocabulary 256)"
    )
    tokenize.add_argument(
        "--separate",
        action="store_true",
        help="put the token that ends a document after each file, for data.document_mask",
    )
    tokenize.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the text for validation, taken by file (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    ranks: Ranks = Alone()
    try:
        ranks = start_ranks()
        _tokenize(args, ranks)
    except UserError as error:
        if launched_rank() == 0:
            raise
        time.sleep(_LET_RANK_0_SPEAK)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        ranks.abort()  # the others may wait for this rank
        return EXIT_CRASH
    return 0


def _tokenize(args: argparse.Namespace, ranks: Ranks) -> None:
    from hvdtrain.data.tokenize import Source, tokenize  # imports torch

    source = Source(args.input, args.tokenizer, args.validation_fraction, args.separate)
    written = tokenize(source, args.out, ranks)
    if ranks.rank == 0:
        for path, tokens in written.items():
            print(f"{path}: {tokens} tokens")
