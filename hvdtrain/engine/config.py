"""Configuration of the run, the loop and the evaluation."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require
from hvdtrain.runtime.notices import parse_source


@dataclass
class RunConfig:
    """The run directory.

    Args:
        root: directory that holds the runs
        id: name of the run, a directory under `run.root`; null = date-time-task
        resume: `auto` (newest valid checkpoint of this run id), `never`, or the path of a
            checkpoint: with one of this run, every start returns to it; with one of another run,
            this run begins there
        init_from: initial weights of a new run: a run, a checkpoint, a safetensors file or
            directory, a Hugging Face directory with the layout of GPT-2 or Llama, or a directory of
            torch.distributed.checkpoint, torchtitan or Megatron-LM; a resumed run keeps its own
            weights
        takeover: checkpoint of another trainer, with its optimizer, from which a new run continues;
            a resumed run has its own
        init_strict: names and shapes of the initial weights must match the model; false loads only
            those that match
    """

    root: str = basic("runs")
    id: str | None = basic(None)
    resume: str = basic("auto")
    init_from: str | None = basic(None)
    takeover: str | None = None
    init_strict: bool = True

    def __post_init__(self) -> None:
        require(bool(self.root), "run.root must not be empty; the default is runs")
        require(
            self.id is None or (self.id not in ("", ".", "..") and "/" not in self.id),
            f"run.id is the name of one directory under run.root, not {self.id!r}",
        )


@dataclass
class SpikeConfig:
    """Loss spikes, see engine/spikes.py.

    Args:
        action: what happens if the loss of a step is a spike: the update is skipped (`skip`), the
            run returns to its newest checkpoint and continues with the samples after the step
            (`rollback`), or nothing (`none`)
        window: number of the last losses with which a loss is compared; detection begins when the
            window is full. After a tenth as many consecutive spikes a step is applied anyway
        factor: a loss is a spike if it exceeds the median of the window by more than this many
            standard deviations, estimated by the median absolute deviation; > 1
    """

    action: Literal["none", "skip", "rollback"] = "none"
    window: int = expert(100)
    factor: float = expert(4.0)

    def __post_init__(self) -> None:
        require(self.window >= 2, f"train.spike.window must be >= 2, not {self.window}")
        require(
            self.factor > 1 and math.isfinite(self.factor),
            f"train.spike.factor must be > 1, not {self.factor}",
        )

    @property
    def enabled(self) -> bool:
        """Whether spikes are detected."""
        return self.action != "none"

    @property
    def most_in_a_row(self) -> int:
        """Consecutive spikes after which a step is applied whatever its loss."""
        return max(1, self.window // 10)


@dataclass
class TrainConfig:
    """The training loop.

    Args:
        duration: optimizer steps, such as 400, or passes over the training data, such as `3 epochs`
            or `0.5epochs`
        patience: consecutive evaluations without a lower validation loss after which the run ends;
            0 = never
        log_every: steps between lines of metrics.jsonl; without a terminal the screen shows a line
            every 2 seconds at most
        max_nonfinite: consecutive skipped steps (gradient not finite, even with the smallest loss
            scale) before the run ends with exit code 3
        replica_check_every: steps between comparisons of the ranks' states, which are also compared
            before each checkpoint; 0 = never
        spike: loss spikes
    """

    duration: int | str = basic(1000)
    patience: int = 0
    log_every: int = 1
    max_nonfinite: int = expert(10)
    replica_check_every: int = expert(100)
    spike: SpikeConfig = field(default_factory=SpikeConfig)

    def __post_init__(self) -> None:
        require(
            self.steps >= 1 or self.epochs > 0,
            "train.duration must be a number of steps >= 1, such as 400, or of epochs > 0, such as "
            f"3epochs, not {self.duration}",
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

    @property
    def steps(self) -> int:
        """Optimizer steps; 0 if the duration is given in epochs."""
        return steps_of(str(self.duration))

    @property
    def epochs(self) -> Fraction:
        """Passes over the training data, exact as written; 0 if the duration is given in steps."""
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?|\.\d{1,15}) *epochs?", str(self.duration))
        return Fraction(match[1] if match else 0)


@lru_cache
def steps_of(duration: str) -> int:
    """Return the optimizer steps of a `train.duration`; 0 if it is in epochs, or invalid."""
    match = re.fullmatch(r"(\d{1,15}) *(steps?)?", duration)
    return int(match[1]) if match else 0


# One additional micro-batch per rank in this many steps costs at most 0.5% of a run; hashing adds
# less.
DEFAULT_REPLAY_EVERY = 200


@dataclass
class IntegrityConfig:
    """Detection of hosts that compute wrongly.

    Args:
        replay_every: steps between replays: each rank computes the gradient of another rank's
            micro-batch again, and both are compared; 0 = never; null = 200 if the run allows
            replays, else 0
    """

    replay_every: int | None = expert(None)

    def __post_init__(self) -> None:
        require(
            self.replay_every is None or self.replay_every >= 0,
            f"integrity.replay_every must be >= 0 (0 = never), not {self.replay_every}",
        )


@dataclass
class MemoryConfig:
    """Activation memory: what is kept for backward, and where it is stored.

    Args:
        checkpoint_activations: backward recomputes activations within the model's blocks: in all
            blocks (`blocks`), in one block in N (`every:N`), or everything but the results of
            matrix products and attention (`selective`); `none` keeps everything
        offload_activations: activations of the blocks are kept in host memory until backward; for
            GPUs
    """

    checkpoint_activations: str = "none"
    offload_activations: bool = False

    def __post_init__(self) -> None:
        require(
            self.checkpoint_activations in ("none", "blocks", "selective") or self.every > 0,
            "memory.checkpoint_activations must be none, blocks, every:N (N >= 1) or selective, "
            f"not {self.checkpoint_activations}",
        )

    @property
    def every(self) -> int:
        """One block in this many is recomputed; 0: no block."""
        if self.checkpoint_activations in ("blocks", "selective"):
            return 1
        word, _, number = self.checkpoint_activations.partition(":")
        return int(number) if word == "every" and number.isdecimal() else 0


@dataclass
class EvalConfig:
    """Evaluation on the validation data.

    Args:
        every: steps between evaluations; the last step is always evaluated; 0 = never
        batches: maximum number of global batches in one evaluation
    """

    every: int = basic(100)
    batches: int = 16

    def __post_init__(self) -> None:
        require(self.every >= 0, f"eval.every must be >= 0 (0 = never), not {self.every}")
        require(self.batches >= 1, f"eval.batches must be >= 1, not {self.batches}")


@dataclass
class PreemptConfig:
    """Preemption.

    Args:
        grace_seconds: seconds from a signal until the ranks are killed; 0 = not known
        notice: source of a host's preemption notice: `aws`, `gcp` or `azure` (their metadata),
            `file:PATH` (it appears), `command:COMMAND` (it exits with 0), or an http address (it
            answers 200). In an elastic run that host leaves; any other run stops with a checkpoint;
            null = none
    """

    grace_seconds: float = expert(0.0)
    notice: str | None = None

    def __post_init__(self) -> None:
        require(
            self.grace_seconds >= 0,
            f"preempt.grace_seconds must be >= 0 (0 = not known), not {self.grace_seconds}",
        )
        if self.notice is not None:
            parse_source(self.notice)
