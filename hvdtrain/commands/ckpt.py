"""`hvdtrain ckpt list | verify | export`. Only export to another format imports torch."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.export import (
    Write,
    averaged_weights,
    dtypes,
    export,
    write_dcp,
    write_export,
    write_files_of,
)
from hvdtrain.checkpoint.layout import DamagedError, best, finished, loss_of, named, verify
from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_yaml, printable, read_regular

NOTHING_TO_MERGE = (
    "--merge is for runs of the task huggingface with LoRA (lora.rank), and --format huggingface"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    line = "a line for each checkpoint of a run: step, state, size, time"
    lister = actions.add_parser("list", help=line, description=f"{line}. No content is read.")
    lister.add_argument("path", type=Path, metavar="RUN")
    line = "compare every file with its checksum"
    verifier = actions.add_parser(
        "verify", help=line, description=f"{line}; the exit code is 2 if one differs."
    )
    verifier.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    line = "model.safetensors and config.json, for other programs"
    exporter = actions.add_parser(
        "export", help=line, description=f"{line}; for a run, the newest checkpoint is exported."
    )
    exporter.add_argument("path", type=Path, metavar="CHECKPOINT_OR_RUN")
    exporter.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory to create"
    )
    exporter.add_argument(
        "--format",
        choices=("hvdtrain", "huggingface", "dcp"),
        default="hvdtrain",
        help="names and layout of hvdtrain, as transformers loads them, or hvdtrain's names in a "
        "directory of torch.distributed.checkpoint (default: %(default)s)",
    )
    exporter.add_argument(
        "--max-shard-size",
        type=_bytes,
        metavar="SIZE",
        help="write several files of at most this size, such as 5GB, and their index",
    )
    exporter.add_argument(
        "--optimizer",
        action="store_true",
        help="with --format dcp: export the optimizer's state, too",
    )
    exporter.add_argument(
        "--ema",
        action="store_true",
        help="export the averaged weights of a run with optim.ema_decay",
    )
    exporter.add_argument(
        "--merge",
        action="store_true",
        help="add LoRA's adapters to the weights, instead of exporting only the adapters",
    )


def _bytes(text: str) -> int:
    """Parse a size such as 5GB or 500MB: powers of 1000, as in transformers."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ")) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MB, not {text!r}")
    return size


def run(args: argparse.Namespace) -> int:
    {"list": _list, "verify": _verify, "export": _export}[args.action](args)
    return 0


def _list(args: argparse.Namespace) -> None:
    directories = sorted((args.path / "checkpoints").glob("*step_*"), key=_by_step)
    if not directories:
        raise UserError(f"{args.path} is not a run with checkpoints (no {args.path}/checkpoints)")
    names = {directory: printable(directory.name) for directory in directories}
    width = max(map(len, names.values()))
    lowest = best(finished(args.path / "checkpoints"))
    print(f"{'checkpoint':{width}}  {'MiB':>9}  {'written':19}  state")
    for directory in directories:
        with suppress(FileNotFoundError):  # the run may continue and delete it
            size = sum(path.stat().st_size for path in directory.iterdir()) / (1 << 20)
            written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(directory.stat().st_mtime))
            mark = (
                f", best: validation loss {loss_of(directory):.4f}" if directory == lowest else ""
            )
            state = printable(_state(directory))
            print(f"{names[directory]:{width}}  {size:9.1f}  {written}  {state}{mark}")


def _by_step(directory: Path) -> tuple[str, str]:
    _, _, step = directory.name.partition("step_")
    return step, directory.name


def _state(directory: Path) -> str:
    if directory.name.startswith("."):
        return "being written, or a leftover of a failed write"
    try:
        verify(directory, contents=False)
    except DamagedError as error:
        return f"damaged: {_reason(error)}"
    return (
        "superseded: the run resumed from before it"
        if directory.name.startswith("left_")
        else "finished"
    )


def _reason(error: DamagedError) -> str:
    """The problem of a checkpoint, without its path."""
    return str(error).partition(": ")[2]


def _verify(args: argparse.Namespace) -> None:
    damaged = []
    for directory in _checkpoints(args.path, named):
        try:
            size = verify(directory)
            print(f"{printable(str(directory))}: intact, {size / 2**20:.1f} MiB")
        except DamagedError as error:
            damaged.append(str(error))
            print(f"{printable(str(directory))}: DAMAGED")
    if damaged:
        raise UserError("; ".join(damaged))


def _checkpoints(path: Path, of_run: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the path itself if it is a checkpoint, or the checkpoints of a run, oldest first.

    Args:
        of_run: selects the checkpoints: layout.named or layout.finished.
    """
    if (path / "checkpoints").is_dir():
        found = of_run(path / "checkpoints")
        if not found:
            raise UserError(f"{path}: this run has no finished checkpoint")
        return found
    if "step_" not in path.name or not path.is_dir():
        raise UserError(f"{path} is neither a run nor a checkpoint (RUN/checkpoints/step_...)")
    return [path]


def _export(args: argparse.Namespace) -> None:
    checkpoint = _checkpoints(args.path, finished)[-1]
    if args.merge and args.format != "huggingface":
        raise UserError(NOTHING_TO_MERGE)
    if args.optimizer and args.format != "dcp":
        raise UserError("--optimizer is for --format dcp")
    if args.max_shard_size is not None and args.format == "dcp":
        raise UserError("--max-shard-size is for files of safetensors, not for --format dcp")
    if args.format == "huggingface":
        _export_to_huggingface(checkpoint, args)
    else:
        export(checkpoint, _model_config(checkpoint), args.out, args.ema, _write(checkpoint, args))
    which = "averaged weights" if args.ema else "weights"
    more = " and the optimizer's state" if args.optimizer else ""
    form = "" if args.format == "dcp" else f", in {' and '.join(dtypes(args.out))}"
    print(printable(f"{args.out}: the {which}{more} of {checkpoint}{form}"))


def _write(checkpoint: Path, args: argparse.Namespace) -> Write | None:
    """How to write the weights; None: into one file."""
    if args.max_shard_size is not None:
        return write_files_of(args.max_shard_size)
    if args.format != "dcp":
        return None
    from hvdtrain.checkpoint.spread import read_part
    from hvdtrain.optim.state_dicts import REST

    tensors = read_part(checkpoint, "optimizer") if args.optimizer else {}
    # Without the entries that are not tensors of a parameter, which have hvdtrain's own form.
    return write_dcp({name: t for name, t in tensors.items() if not name.startswith(REST)})


def _export_to_huggingface(checkpoint: Path, args: argparse.Namespace) -> None:
    from hvdtrain.checkpoint.spread import read_part
    from hvdtrain.models.gpt_config import GPTConfig
    from hvdtrain.models.huggingface import to_huggingface

    config = _model_config(checkpoint)
    if config["task"] not in ("language_model", "huggingface"):
        raise UserError(
            f"{checkpoint} is of the task {config['task']}; only models of "
            "language_model and huggingface exist in transformers"
        )
    weights = averaged_weights(checkpoint) if args.ema else read_part(checkpoint, "model")
    if config["task"] == "huggingface":
        from hvdtrain.config import parse
        from hvdtrain.tasks.huggingface import export_trained

        of_run = parse(["--config", str(_config_file(checkpoint))])
        if args.merge and not of_run.task_config.lora.rank:
            raise UserError(NOTHING_TO_MERGE)
        export_trained(of_run.task_config, weights, args.out, args.merge, args.max_shard_size)
        return
    if args.merge:
        raise UserError(NOTHING_TO_MERGE)
    sizes = config["model"] | {"vocab_size": weights["embedding.weight"].shape[0]}
    exported = to_huggingface(GPTConfig(**sizes), weights)
    write_export(args.out, *exported, _write(checkpoint, args))


def _config_file(checkpoint: Path) -> Path:
    """config.yaml of the run that the checkpoint belongs to."""
    return checkpoint.resolve().parent.parent / "config.yaml"


def _model_config(checkpoint: Path) -> dict[str, Any]:
    """The task's name and its own keys, from the configuration of the checkpoint's run."""
    from hvdtrain.config import Config

    path = _config_file(checkpoint)
    try:
        config = parse_yaml(read_regular(path))
        if not isinstance(config, dict) or not isinstance(config.get("task"), str):
            raise ValueError("it names no task")
    except ValueError as error:
        raise UserError(f"{path} is not the configuration of a run ({error})") from None
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; it is exported with the weights, so name a checkpoint "
            "inside its run directory"
        ) from None
    of_every_task = {f.name for f in fields(Config)} - {"task"}
    return {key: value for key, value in config.items() if key not in of_every_task}
