"""Configuration of token data, of loading and of the batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.errors import require

# The proportions of a mixture hold exactly over this number of samples.
PERIOD = 1000
MOST_BUFFER = 1 << 24
AHEAD = 2  # micro-batches that each data worker loads ahead
MOST_COUNTS = 10_000  # sources x changes of weights
SOURCE_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass
class SourceConfig:
    """A source of a mixture.

    Args:
        path: files, directories or globs to train on
        weight: share of the samples, relative to the other sources' weights
        validation: files, directories or globs for validation; empty = a fraction of `path`
        source: kind of the files, see `data.source`; null = `data.source`
        text_key: see `data.text_key`; null = `data.text_key`
    """

    path: list[str] | str = field(default_factory=list)
    weight: float = 0.0
    validation: list[str] | str = field(default_factory=list)
    source: Literal["text", "jsonl", "parquet", "arrow", "tokens"] | None = None
    text_key: str | None = None


def apportion(weights: Mapping[str, float], name: str) -> list[int]:
    """Number of samples of each source in PERIOD samples, by the method of largest remainders.

    Args:
        name: of the weights, for messages.

    Returns:
        Counts that differ from the exact shares by less than 1.

    Raises:
        ValueError: a weight is negative or not finite, all are 0, or one is too small.
    """
    for source, weight in weights.items():
        require(
            math.isfinite(weight) and weight >= 0,
            f"{name}: the weight of {source} must be a number >= 0, not {weight}",
        )
    shares = [Fraction(float(weight)) for weight in weights.values()]
    require(any(shares), f"{name}: the weights of {', '.join(weights) or 'no source'} are all 0")
    exact = [PERIOD * share / sum(shares) for share in shares]
    counts = [int(share) for share in exact]
    largest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in largest[: PERIOD - sum(counts)]:
        counts[i] += 1
    for (source, weight), count in zip(weights.items(), counts, strict=True):
        require(
            count > 0 or weight == 0,
            f"{name}: the weight {weight:g} of {source} is less than 1 in {PERIOD} samples: "
            "increase it, or omit the source",
        )
    return counts


def phases_of(
    weights: Mapping[str, float], changes: Mapping[int, Mapping[str, float]], names: tuple[str, str]
) -> list[tuple[int, list[int]]]:
    """(first step, samples of each source in PERIOD samples), ascending, from step 0 on.

    Args:
        weights: weight of each source at the beginning.
        changes: step -> weight of each source from this step on.
        names: of both, for messages.

    Raises:
        ValueError: a weight or step cannot be used, or a source never has a weight.
    """
    for name in weights:
        require(
            bool(SOURCE_NAME.fullmatch(name)) and name != "scale",  # loss_scale is a metric
            f"{names[0]}: {name!r} cannot name a source: use letters, digits, - and _, and not "
            "'scale'",
        )
    phases = [(0, apportion(weights, names[0]))]
    for step, changed in sorted(changes.items()):
        where = f"{names[1]}, step {step}"
        require(step >= 1, f"{where}: weights change at a step >= 1")
        require(
            changed.keys() == weights.keys(),
            f"{where}: give a weight for each source of the mixture ({', '.join(weights)}) and no "
            f"other, not for {', '.join(changed) or 'none'}",
        )
        phases.append((step, apportion({name: changed[name] for name in weights}, where)))
    require(len(phases) * len(weights) <= MOST_COUNTS, f"{names[1]}: too many sources and steps")
    for number, name in enumerate(weights):
        require(
            any(counts[number] for _, counts in phases),
            f"{names[0]}: the weight of {name} is 0: increase it, or omit the source",
        )
    return phases


@dataclass
class DataConfig:
    """Text or tokens to train on.

    Args:
        source: `text` (files of any kind, each a document), `jsonl`, `parquet` or `arrow` (each
            line or row a document), or `tokens` (of `hvdtrain data tokenize`, Megatron-LM and other
            programs)
        train: files, directories, globs or URLs; empty = the source files of Python's standard
            library
        validation: the same for validation; empty = a fraction of `data.train`
        validation_fraction: fraction of `data.train` for validation, split by file (for a single
            file: its end)
        tokenizer: a tokenizer.json of the `tokenizers` library: for text (null = bytes), or that
            of token files without a tokens.json
        cache: directory that stores the tokens of text, for later starts and for all ranks of a
            host; null = each rank tokenizes for itself, in memory
        text_key: key of a JSON line, or column of a Parquet or Arrow file, that holds its text
        document_mask: attention and learned positions restart at each document of a sample: after
            an end-of-document token, or as the index of a token file says
        mixture: name -> source, instead of `data.train` and `data.validation`: `path`, `weight`
            and, if necessary, `validation`, `source`, `text_key`
        mixture_weights: step -> {name: weight}: weights of all sources of `data.mixture` from this
            step on
    """

    source: Literal["text", "jsonl", "parquet", "arrow", "tokens"] = "text"
    train: list[str] | str = basic(factory=list)
    validation: list[str] | str = field(default_factory=list)
    validation_fraction: float = 0.05
    tokenizer: str | None = None
    cache: str | None = None
    text_key: str = "text"
    document_mask: bool = False
    mixture: dict[str, SourceConfig] = field(default_factory=dict)
    mixture_weights: dict[int, dict[str, float]] = field(default_factory=dict)
    of_source: str = field(init=False, default="", repr=False)  # set by `sources`

    def __post_init__(self) -> None:
        if isinstance(self.train, str):
            self.train = [self.train]
        if isinstance(self.validation, str):
            self.validation = [self.validation]
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must lie in (0, 1), not {self.validation_fraction}",
        )
        if self.mixture or self.mixture_weights:
            self._check_mixture()
            return
        require(
            self.source == "text" or bool(self.train),
            f"data.source {self.source} needs data.train: files, directories or globs",
        )

    def _check_mixture(self) -> None:
        require(bool(self.mixture), "data.mixture_weights changes the weights of data.mixture")
        require(
            not (self.train or self.validation),
            "data.mixture replaces data.train and data.validation: set only one of them",
        )
        self.phases()
        for name, source in self.mixture.items():
            require(bool(source.path), f"data.mixture.{name}.path: set files or directories")

    def phases(self) -> list[tuple[int, list[int]]]:
        """See `phases_of`, for `mixture`."""
        weights = {name: source.weight for name, source in self.mixture.items()}
        return phases_of(weights, self.mixture_weights, ("data.mixture", "data.mixture_weights"))

    def sources(self) -> dict[str, DataConfig]:
        """Configuration of each source of `mixture`; of all data, named "", without a mixture."""
        if not self.mixture:
            return {"": self}
        found = {}
        for name, source in self.mixture.items():
            kind = source.source or self.source
            found[name] = replace(
                self,
                source=kind,
                train=source.path,
                validation=source.validation,
                text_key=self.text_key if source.text_key is None else source.text_key,
                mixture={},
                mixture_weights={},
            )
            found[name].of_source = name
        return found

    def key(self, split: str) -> str:
        """Key that sets the files for "train" or "validation", for messages."""
        if not self.of_source:
            return f"data.{split}"
        return f"data.mixture.{self.of_source}.{'path' if split == 'train' else split}"


@dataclass
class LoaderConfig:
    """Loading of training and validation data.

    Args:
        workers: processes that load a rank's micro-batches ahead; 0 = the rank loads them itself.
            An iterable dataset with a state is read by one process, however many are set, and one
            without a state requires 0
        order: `shuffled`, or `sequential`: shard after shard, shuffled within
            `loader.shuffle_buffer`, for data that is slow to read at random positions; or `torch`:
            as torch's DistributedSampler and the Trainer of transformers shuffle with this `seed`,
            to continue their runs
        shuffle_buffer: consecutive samples that `sequential` shuffles together, over all ranks; it
            needs no memory for them
    """

    workers: int = 0
    order: Literal["shuffled", "sequential", "torch"] = "shuffled"
    shuffle_buffer: int = expert(16384)

    def __post_init__(self) -> None:
        require(self.workers >= 0, f"loader.workers must be >= 0, not {self.workers}")
        require(
            1 <= self.shuffle_buffer <= MOST_BUFFER,
            f"loader.shuffle_buffer must lie in [1, {MOST_BUFFER}], not {self.shuffle_buffer}",
        )


@dataclass
class BatchConfig:
    """The global batch, independent of the world size unless `batch.per_rank_size` is set.

    Args:
        global_size: samples in one optimizer step, over all ranks
        micro_size: samples in one forward pass; divides `batch.global_size`. `auto`: as many as
            memory allows, found by trials before training
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

    global_size: int = basic(32)
    micro_size: int | Literal["auto"] = basic(4)
    max_tokens: int = 0
    per_step: int = 8
    per_rank_size: int = 0
    deal: Literal["even", "speed"] = "even"
    interleave: int = expert(1)

    def __post_init__(self) -> None:
        require(
            self.micro_samples >= 1, f"batch.micro_size must be >= 1 or auto, not {self.micro_size}"
        )
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
            size % self.micro_samples == 0,
            f"batch.{key} {size} is not a multiple of batch.micro_size {self.micro_size}; a "
            f"micro_size that fits: {_divisors_near(size, self.micro_samples)}",
        )

    @property
    def micro_samples(self) -> int:
        """Samples of a micro-batch; 1, which always fits, while `auto` is not resolved."""
        return 1 if self.micro_size == "auto" else self.micro_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches in one step, over all ranks."""
        return self.per_step if self.max_tokens else self.global_size // self.micro_samples


def _divisors_near(number: int, wanted: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)
