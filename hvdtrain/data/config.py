"""Configuration of token data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.errors import require


@dataclass
class DataConfig:
    """Text or tokens to train on.

    Args:
        source: `text` (files of any kind, each a document), `jsonl` or `parquet` (each line or row
            a document), or `tokens` (made by `hvdtrain data tokenize`)
        train: files, directories, globs or URLs; empty = the source files of Python's standard
            library
        validation: the same for validation; empty = a fraction of `data.train`
        validation_fraction: fraction of `data.train` for validation, split by file (for a single
            file: its end)
        tokenizer: a tokenizer.json of the `tokenizers` library, for text; null = bytes
        cache: directory that stores the tokens of text, for later starts and for all ranks of a
            host; null = each rank tokenizes for itself, in memory
        text_key: key of a JSON line, or column of a Parquet file, that holds its text
        document_mask: attention and learned positions restart at each document of a sample; an
            end-of-document token follows each document
    """

    source: Literal["text", "jsonl", "parquet", "tokens"] = "text"
    train: list[str] | str = field(default_factory=list)
    validation: list[str] | str = field(default_factory=list)
    validation_fraction: float = 0.05
    tokenizer: str | None = None
    cache: str | None = None
    text_key: str = "text"
    document_mask: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.train, str):
            self.train = [self.train]
        if isinstance(self.validation, str):
            self.validation = [self.validation]
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must lie in (0, 1), not {self.validation_fraction}",
        )
        files = "the token files made by `hvdtrain data tokenize`"
        require(
            self.source == "text" or bool(self.train),
            f"data.source {self.source} needs data.train: "
            + (files if self.source == "tokens" else "files, directories or globs"),
        )
        require(
            self.source != "tokens" or self.tokenizer is None,
            "data.tokenizer is for text; token files are tokenized already",
        )


@dataclass
class LoaderConfig:
    """Loading of training and validation data.

    Args:
        workers: processes that load a rank's micro-batches ahead; 0 = the rank loads them itself.
            An iterable dataset with a state is read by one process, however many are set, and one
            without a state requires 0
        prefetch: micro-batches that each of these processes loads ahead
    """

    workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        require(self.workers >= 0, f"loader.workers must be >= 0, not {self.workers}")
        require(self.prefetch >= 1, f"loader.prefetch must be >= 1, not {self.prefetch}")


@dataclass
class BatchConfig:
    """The global batch, independent of the world size unless `batch.per_rank_size` is set.

    Args:
        global_size: samples in one optimizer step, over all ranks
        micro_size: samples in one forward pass; divides `batch.global_size`
        max_tokens: group samples of similar length into micro-batches of variable size, at most
            this many tokens when padded to the longest; replaces `batch.global_size` and
            `batch.micro_size`; 0 = off
        per_step: micro-batches in one optimizer step, with `batch.max_tokens`
        per_rank_size: samples of a step on each rank, instead of `batch.global_size`: the global
            batch grows with the world size, so the loss curve depends on it; 0 = off
        deal: assignment of micro-batches to ranks: `even`, or by `speed`, so that slow ranks get
            fewer and all ranks finish at the same time; the gradient is the same. Speeds come from
            the periodic comparison of ranks (`telemetry.exchange_every`)
        interleave: run the backward passes of a rank's last N micro-batches of a step in turns,
            block by block: gradients are sent earlier, at the memory cost of N passes at once.
            Intended for slow networks; CPU only; results are bitwise identical
    """

    global_size: int = 32
    micro_size: int = 4
    max_tokens: int = 0
    per_step: int = 8
    per_rank_size: int = 0
    deal: Literal["even", "speed"] = "even"
    interleave: int = 1

    def __post_init__(self) -> None:
        require(self.micro_size >= 1, f"batch.micro_size must be >= 1, not {self.micro_size}")
        require(self.global_size >= 1, f"batch.global_size must be >= 1, not {self.global_size}")
        require(
            self.per_rank_size >= 0,
            f"batch.per_rank_size must be >= 0 (0 = off), not {self.per_rank_size}",
        )
        require(
            self.max_tokens >= 0, f"batch.max_tokens must be >= 0 (0 = off), not {self.max_tokens}"
        )
        require(self.interleave >= 1, f"batch.interleave must be >= 1, not {self.interleave}")
        require(self.per_step >= 1, f"batch.per_step must be >= 1, not {self.per_step}")
        key = "per_rank_size" if self.per_rank_size else "global_size"
        size = self.per_rank_size or self.global_size
        require(
            size % self.micro_size == 0,
            f"batch.{key} {size} is not a multiple of batch.micro_size {self.micro_size}; a "
            f"micro_size that fits: {_divisors_near(size, self.micro_size)}",
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step, over all ranks."""
        return self.per_step if self.max_tokens else self.global_size // self.micro_size


def _divisors_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)
