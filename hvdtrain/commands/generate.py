"""`hvdtrain generate RUN --prompt TEXT`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.commands.arguments import at_least, number_at_least
from hvdtrain.errors import UserError
from hvdtrain.text import encodable

if TYPE_CHECKING:
    from hvdtrain.config import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="beginning of the text")
    parser.add_argument(
        "--length", type=at_least(1), default=200, metavar="N", help="tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=number_at_least(0),
        default=0.8,
        metavar="T",
        help="0: always the most likely token; above 1: more random (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the random choice of tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="tokenizer.json, for a run on token files"
    )


def run(args: argparse.Namespace) -> int:
    settings = _settings(args.run)

    import torch

    from hvdtrain.checkpoint.manager import CheckpointManager
    from hvdtrain.checkpoint.spread import read_part
    from hvdtrain.models.sampling import Sampling
    from hvdtrain.tasks.huggingface import HuggingFace
    from hvdtrain.tasks.language_model import LanguageModel

    if not issubclass(settings.task_class, (LanguageModel, HuggingFace)):
        raise UserError(
            f"{args.run} has the task {settings.config.task}; text is written by runs of "
            "language_model and huggingface"
        )
    checkpoint = CheckpointManager(args.run / "checkpoints", keep=1).newest()
    if checkpoint is None:
        raise UserError(f"{args.run} has no checkpoint yet (no {args.run}/checkpoints/step_...)")
    task = settings.task_class(settings.task_config)
    assert checkpoint.directory is not None
    model = task.trained_model(read_part(checkpoint.directory, "model"), args.tokenizer)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    sampling = Sampling(args.length, args.temperature, args.seed)
    if isinstance(task, HuggingFace):
        text = task.generate(model, args.prompt, sampling, _data_format(args.run))
    else:
        text = task.generate(model, args.prompt, sampling)
    print(encodable(text))
    return 0


def _data_format(run: Path) -> str | None:
    """Format of the run's data; None if it has none, or if an older version made the run."""
    from hvdtrain.run_files.run_directory import RunDirectory
    from hvdtrain.untrusted import read_json

    try:
        return read_json(RunDirectory(run).manifest).get("data_format")
    except (OSError, ValueError) as error:
        raise UserError(f"{run}/manifest.json cannot be read: {error}") from None


def _settings(run: Path) -> Settings:
    from hvdtrain.config import parse

    path = run / "config.yaml"
    if not path.is_file():
        raise UserError(f"{run} is not a run directory: it has no config.yaml")
    return parse(["--config", str(path)])
