"""Configuration of the run, the batch, the loop and the evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.errors import require
from hvdtrain.runtime.notices import parse_source


@dataclass
class RunConfig:
    """The run directory.

    Args:
        root: folder that holds the runs
        id: name of the run, a folder under `run.root`; null = date-time-task
        resume: `auto` (newest valid checkpoint of this run id), `never`, or a checkpoint's path:
            of this run to return to it at every start, of another run to begin there
        init_from: weights that a new run begins with: a run, a checkpoint, a folder or file of
            safetensors, or a Hugging Face folder of GPT-2's or Llama's layout; one that resumes has
            its own
        init_strict: names and shapes of these must be the model's; false takes over those that are
    """

    root: str = "runs"
    id: str | None = None
    resume: str = "auto"
    init_from: str | None = None
    init_strict: bool = True

    def __post_init__(self) -> None:
        require(bool(self.root), "run.root must not be empty; the default is runs")
        require(
            self.id is None or (self.id not in ("", ".", "..") and "/" not in self.id),
            f"run.id is the name of one folder under run.root, not {self.id!r}",
        )


@dataclass
class TrainConfig:
    """The loop.

    Args:
        steps: optimizer steps; 0 = as many as `train.epochs` takes. Of the two, a flag wins over a
            file, and a file over the task's default
        epochs: passes over the training data, such as 3 or 0.5, instead of `train.steps`; 0 = not
            given
        patience: evaluations in a row without a lower validation loss after which the run ends; 0 =
            never
        log_every: steps between lines of metrics.jsonl; without a terminal the screen gets a line
            every 2 seconds at most
        max_nonfinite: skipped steps in a row (gradient not finite, even with the smallest loss
            scale) before the run ends with exit code 3
        replica_check_every: steps between comparisons of the ranks' states, which are also
            compared before each checkpoint; 0 = never
    """

    steps: int = 1000
    epochs: float = 0.0
    patience: int = 0
    log_every: int = 1
    max_nonfinite: int = 10
    replica_check_every: int = 100

    def __post_init__(self) -> None:
        require(
            self.epochs >= 0 and math.isfinite(self.epochs),
            f"train.epochs must be > 0 (0 = not given), not {self.epochs}",
        )
        require(
            self.steps >= (0 if self.epochs else 1), f"train.steps must be >= 1, not {self.steps}"
        )
        require(
            not (self.steps and self.epochs),
            f"train.steps {self.steps} and train.epochs {self.epochs:g} exclude each other: give "
            "one of them",
        )
        require(self.patience >= 0, f"train.patience must be >= 0 (0 = never), not {self.patience}")
        require(self.log_every >= 1, f"train.log_every must be >= 1, not {self.log_every}")
        require(
            self.max_nonfinite >= 1, f"train.max_nonfinite must be >= 1, not {self.max_nonfinite}"
        )
        require(
            self.replica_check_every >= 0,
            f"train.replica_check_every must be >= 0 (0 = never), not {self.replica_check_every}",
        )


@dataclass
class CompileConfig:
    """Compilation by torch.compile.

    Args:
        enabled: each of the model's blocks is compiled in its first pass; takes a C++ compiler on
            each host, and on GPUs Triton
    """

    enabled: bool = False


@dataclass
class MemoryConfig:
    """What backward needs of a forward pass, where it lies, and how much of it fits.

    Args:
        checkpoint_activations: backward computes again what lies within the model's blocks: of all
            (`blocks`), of one block in N (`every:N`), or of all but the results of matrix products
            and attention (`selective`); `none` keeps everything
        offload_activations: what backward needs of the blocks waits in the host's memory; for GPUs
        fit: micro-batches are as large as fits into memory, instead of `batch.micro_size`; tried
            before training
    """

    checkpoint_activations: str = "none"
    offload_activations: bool = False
    fit: bool = False

    def __post_init__(self) -> None:
        require(
            self.checkpoint_activations in ("none", "blocks", "selective") or self.every > 0,
            "memory.checkpoint_activations must be none, blocks, every:N (N >= 1) or selective, "
            f"not {self.checkpoint_activations}",
        )

    @property
    def every(self) -> int:
        """One block in so many is computed again; 0: none is."""
        if self.checkpoint_activations in ("blocks", "selective"):
            return 1
        word, _, number = self.checkpoint_activations.partition(":")
        return int(number) if word == "every" and number.isdecimal() else 0


@dataclass
class EvalConfig:
    """Evaluation on the validation data.

    Args:
        every: steps between evaluations; the last step is always evaluated; 0 = never
        batches: global batches in one evaluation, at most
    """

    every: int = 100
    batches: int = 16

    def __post_init__(self) -> None:
        require(self.every >= 0, f"eval.every must be >= 0 (0 = never), not {self.every}")
        require(self.batches >= 1, f"eval.batches must be >= 1, not {self.batches}")


@dataclass
class PreemptConfig:
    """Preemption.

    Args:
        grace_seconds: seconds from SIGTERM or SIGUSR1 until the ranks are killed; 0 = not known
        notice: where a host learns that it is about to be taken away: `aws`, `gcp` or `azure`
            (their metadata), `file:PATH` (it appears), `command:COMMAND` (it exits with 0), or an
            http address (it answers 200). Of an elastic run that host leaves, any other run stops
            with a checkpoint; null = nowhere
    """

    grace_seconds: float = 0.0
    notice: str | None = None

    def __post_init__(self) -> None:
        require(
            self.grace_seconds >= 0,
            f"preempt.grace_seconds must be >= 0 (0 = not known), not {self.grace_seconds}",
        )
        if self.notice is not None:
            parse_source(self.notice)
