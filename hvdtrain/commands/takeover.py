"""`hvdtrain takeover DIR`: continue the run of another trainer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError
from hvdtrain.text import plural
from hvdtrain.untrusted import printable_lines

if TYPE_CHECKING:
    from hvdtrain.checkpoint.interchange.other_run import OtherRun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what another trainer's checkpoint contains; with --out, write it as the first "
        "checkpoint of a run, which then starts as any run does. A script with its own loop needs "
        "no --out: hvdtrain.training(..., takeover=DIR). Nothing in the checkpoint is executed."
    )
    parser.add_argument("path", type=Path, metavar="DIR", help="checkpoint of another trainer")
    parser.add_argument(
        "--out", type=Path, metavar="RUN", help="run directory to make, which is run.root/run.id"
    )
    parser.add_argument(
        "flags", nargs="*", metavar="-- --key value", help="keys of the run, with --out"
    )


def run(args: argparse.Namespace) -> int:
    if args.out is None:
        if args.flags:
            raise UserError("keys of the configuration require --out RUN")
        from hvdtrain.checkpoint.interchange.readers import read_other_run

        print(printable_lines("\n".join(_lines(read_other_run(args.path, values=False)))))
        return 0
    from hvdtrain.config import parse

    out = args.out.absolute()
    settings = parse([*args.flags, f"--run.root={out.parent}", f"--run.id={out.name}"])
    if settings.config.run.takeover or settings.config.run.init_from:
        raise UserError("run.takeover and run.init_from are not for `hvdtrain takeover`: DIR is")
    from hvdtrain.log import to_screen
    from hvdtrain.process.takeover import write_checkpoint

    to_screen(None)
    checkpoint = write_checkpoint(settings, str(args.path), out)
    place = f"--run.root {out.parent} --run.id {out.name}"
    print(f"{checkpoint}: written; start the run with the same keys and {place}")
    return 0


# Options of an optimizer's groups.
_SHOWN = ("lr", "betas", "eps", "weight_decay", "momentum")


def _lines(run: OtherRun) -> list[str]:
    tensors = run.weights.tensors
    values = sum(tensor.numel() for tensor in tensors.values())
    lines = [
        f"{run.path}: step {run.step} of {run.trainer}",
        f"model: {plural(len(tensors), 'tensor')} of {values:,} values",
        f"optimizer: {', '.join(_options(run)) or 'no options'}",
        f"schedulers: {len(run.schedulers)}",
    ]
    if run.global_size is not None:
        lines.append(f"batch: {run.global_size} samples in a step (batch.global_size)")
    if run.clip_norm is not None:
        lines.append(f"gradients: clipped to {run.clip_norm:g} (optim.clip_norm; 0: not)")
    if run.shuffle_seed is not None:
        lines.append(f"order of samples: --loader.order torch --seed {run.shuffle_seed}")
    else:
        lines.append(f"order of samples: not known: {run.order}")
    return lines + [f"not kept: {phrase}" for phrase in run.left]


def _options(run: OtherRun) -> list[str]:
    """Options of the optimizer's groups, such as "weight_decay 0.1 and 0.0"."""
    found: dict[str, list[Any]] = {}
    for group in run.groups():
        for name, value in group.items():
            if name in _SHOWN and value not in found.get(name, []):
                found.setdefault(name, []).append(value)
    return [f"{name} {' and '.join(map(str, values))}" for name, values in found.items()]
