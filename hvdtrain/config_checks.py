"""Table of refused combinations of keys, which docs/configuration.md lists.

`CHECKS` needs only the configuration: the parser, and therefore every command that reads a
configuration, applies it. `RANK_CHECKS` also needs the ranks of a run: every run applies it at its
start, and `hvdtrain doctor` applies it to the hosts that it examines. Checks of a single key are in
the key's dataclass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from hvdtrain.errors import UserError

# This module is in a lower layer than Config, so annotations use Any.


@dataclass(frozen=True)
class Ranks:
    """Facts about a run's ranks that checks need.

    Args:
        world_size: number of ranks.
        elastic: ranks may join and leave, so `world_size` may change.
        mpi: Horovod's controller is MPI; None: unknown.
        patched: Horovod has hvdtrain's patches; None: unknown.
        torch: version of torch; "": unknown.
    """

    world_size: int
    elastic: bool
    mpi: bool | None = None
    patched: bool | None = None
    torch: str = ""


@dataclass(frozen=True)
class Check:
    """A refused combination.

    Args:
        combination: the combination in Markdown, for the documentation.
        why: the reason, for the documentation.
        find: returns the message if a configuration has the combination, else "".
    """

    combination: str
    why: str
    find: Callable[[Any], str]


@dataclass(frozen=True)
class RankCheck:
    """A combination of keys and ranks that is refused; fields as in `Check`."""

    combination: str
    why: str
    find: Callable[[Any, Ranks], str]


def check_together(config: Any) -> None:
    """Apply `CHECKS` to a Config.

    Raises:
        ValueError: with a message for the user.
    """
    for check in CHECKS:
        if message := check.find(config):
            raise ValueError(message)


def check_ranks(config: Any, ranks: Ranks) -> None:
    """Apply `RANK_CHECKS`.

    Args:
        config: a Config whose global batch is known.

    Raises:
        UserError: the configuration does not fit the ranks.
    """
    for check in RANK_CHECKS:
        if message := check.find(config, ranks):
            raise UserError(message)


# --- terms ------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """A condition on one key: `key`, `key a|b` or `key !a`.

    `key` alone is true if its value is neither 0, false, null nor none.
    """

    text: str

    @property
    def key(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def values(self) -> list[str]:
        return self.text.partition(" ")[2].removeprefix("!").split("|")

    def holds(self, config: Any) -> bool:
        value = self._value(config)
        if " " not in self.text:
            return bool(value) and value != "none"
        return (_text(value) in self.values) != (" !" in self.text)

    def shown(self, config: Any) -> str:
        """The key with its current value, as on the command line."""
        value = self._value(config)
        return self.key if value is True else f"{self.key} {_text(value)}"

    @property
    def markdown(self) -> str:
        if " " not in self.text:
            return f"`{self.key}`"
        first, *more = self.values
        if " !1" in self.text:
            return f"`{self.key}` above 1"
        if " !" in self.text:
            return f"`{self.key}` other than `{first}`"
        *names, last = [f"`{self.key} {first}`", *(f"`{value}`" for value in more)]
        return f"{', '.join(names)} or {last}" if names else last

    def _value(self, config: Any) -> Any:
        return attrgetter(self.key)(config)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


class _Spans:
    """The term that one model spans ranks, along any axis."""

    markdown = "a degree of `parallel` above 1"

    def holds(self, config: Any) -> bool:
        return bool(config.parallel.spans_ranks)

    def shown(self, config: Any) -> str:
        return str(config.parallel.first_degree)


_SPANS = _Spans()


def _excludes(first: str | _Spans, second: str, why: str) -> Check:
    """A check of two terms that exclude each other."""
    one = _Term(first) if isinstance(first, str) else first
    other = _Term(second)

    def find(config: Any) -> str:
        if not one.holds(config) or not other.holds(config):
            return ""
        return f"{one.shown(config)} excludes {other.shown(config)}: {why}"

    return Check(f"{one.markdown} excludes {other.markdown}", why, find)


def _requires(first: str, second: str, why: str) -> Check:
    """A check of a term that requires another one."""
    one, other = _Term(first), _Term(second)

    def find(config: Any) -> str:
        if not one.holds(config) or other.holds(config):
            return ""
        wanted = other.markdown.replace("`", "")
        return f"{one.shown(config)} requires {wanted}: {why}"

    return Check(f"{one.markdown} requires {other.markdown}", why, find)


# --- checks of the configuration --------------------------------------------


def _find_late_profile(config: Any) -> str:
    steps, last = config.profile.range, config.train.steps
    if not steps or not last or steps[0] <= last:
        return ""
    return (
        f"profile.steps {config.profile.steps} begins after the last step (train.duration {last})"
    )


def _find_uneven_shards(config: Any) -> str:
    degree, micro_batches = config.parallel.shard.degree, config.batch.micro_batches
    if micro_batches % degree == 0:
        return ""
    return (
        f"parallel.shard.degree {degree}: its ranks compute the same number of micro-batches, so "
        f"the micro-batches of a step (batch.global_size / batch.micro_size = {micro_batches}) "
        f"must be a multiple of {degree}"
    )


_NO_COPIES = "if each rank holds the whole model, any rank that is left continues without copies"


def _find_needless_copies(config: Any) -> str:
    memory, parallel = config.checkpoint.memory, config.parallel
    if not memory.every or parallel.any:
        return ""
    return (
        f"checkpoint.memory.every {memory.every} requires parallel.tensor, pipeline, context or "
        f"shard.degree above 1: {_NO_COPIES}"
    )


_EXACT_BITS = "results would depend on the machine on which the run began"
_NOT_TESTED = "not tested together"
_ELEMENTWISE = "optim.name adamw|adam|sgd|lion"
_FOR_GRADIENTS = "parameters are exchanged, not the gradients of each step"
_ADASUM_WHOLE = "Adasum combines whole float32 gradients"

CHECKS: tuple[Check, ...] = (
    # the length of a run
    _excludes("train.patience", "eval.every 0", "it needs validation losses"),
    _excludes("checkpoint.keep_best", "eval.every 0", "it needs validation losses"),
    Check(
        "`profile.steps` that begin after the last step of `train.duration`",
        "these steps never run",
        _find_late_profile,
    ),
    # the first state
    _excludes("run.takeover", "run.init_from", "both give a new run its weights: set one"),
    _excludes(
        "run.takeover",
        "precision.name bf16-params",
        "other trainers' checkpoints have no master weights",
    ),
    Check(
        "`run.takeover` with ranks that hold shards (`parallel.*`)",
        "`hvdtrain takeover` writes a checkpoint, which such a run can read",
        lambda config: (
            f"run.takeover {config.run.takeover}: ranks that hold shards of the model or of the "
            "optimizer's state (parallel.*) begin with a checkpoint of hvdtrain: write it with "
            "`hvdtrain takeover DIR --out RUN -- KEYS`"
            if config.run.takeover is not None and config.parallel.any
            else ""
        ),
    ),
    # loss spikes
    Check(
        "`train.spike.action rollback` without checkpoints",
        "the run returns to the newest one",
        lambda config: (
            "train.spike.action rollback requires checkpoints, to which the run returns: set "
            "checkpoint.every, or use train.spike.action skip"
            if config.train.spike.action == "rollback" and not config.checkpoint.enabled
            else ""
        ),
    ),
    _excludes(
        "exchange.sync_every",
        "train.spike.action rollback",
        f"{_NOT_TESTED}: use skip",
    ),
    # the batch
    _excludes(
        "batch.max_tokens",
        "batch.per_rank_size",
        "with batch.max_tokens a step is batch.per_step micro-batches for any number of ranks",
    ),
    _excludes(
        "batch.micro_size auto",
        "batch.max_tokens",
        "batch.max_tokens replaces batch.micro_size: set only one of them",
    ),
    _excludes(
        "batch.max_tokens", "loader.order sequential", "samples are grouped by length over all data"
    ),
    _excludes(
        "batch.max_tokens", "loader.order torch", "samples are grouped by length over all data"
    ),
    _requires(
        "optim.scale_lr",
        "batch.per_rank_size",
        "batch.global_size does not grow with the ranks",
    ),
    _excludes(
        "batch.deal speed",
        "telemetry.exchange_every 0",
        "speeds come from the comparisons of the ranks",
    ),
    _excludes(
        "batch.deal speed", "exchange.reduce adasum", "Adasum gives all ranks the same weight"
    ),
    _excludes("batch.interleave !1", "batch.micro_size auto", "auto measures one pass at a time"),
    _excludes("batch.interleave !1", "compile", _NOT_TESTED),
    # the optimizer
    _requires("optim.fused", "optim.name adamw|adam", "the other optimizers have no such kernel"),
    # gradient synchronization
    _requires(
        "exchange.name exact",
        "runtime.threads",
        "results of matrix products depend on the number of threads, so give all runs that must "
        "be identical the same number, such as the cores of a host divided by the most ranks it "
        "will have",
    ),
    _excludes("compile", "exchange.name exact", _EXACT_BITS),
    _excludes("batch.micro_size auto", "exchange.name exact", _EXACT_BITS),
    _excludes("precision.cudnn_benchmark", "exchange.name exact", _EXACT_BITS),
    _excludes("exchange.wire !float32", "exchange.name exact", "exact sends integers"),
    _excludes(
        "exchange.compression",
        "exchange.name exact",
        "compression omits values that exact must add",
    ),
    _excludes(
        "exchange.compression", "exchange.wire !float32", "compressed gradients are sent as float32"
    ),
    _excludes("exchange.reduce adasum", "exchange.name exact", _ADASUM_WHOLE),
    _excludes("exchange.reduce adasum", "exchange.wire !float32", _ADASUM_WHOLE),
    _excludes("exchange.reduce adasum", "exchange.compression", _ADASUM_WHOLE),
    _excludes(
        "exchange.sync_every",
        "exchange.name exact",
        "ranks that step independently have different models",
    ),
    _excludes("exchange.sync_every", "exchange.compression", _FOR_GRADIENTS),
    _excludes("exchange.sync_every", "exchange.wire !float32", _FOR_GRADIENTS),
    _excludes("exchange.sync_every", "exchange.reduce adasum", _FOR_GRADIENTS),
    _excludes(
        "exchange.sync_every",
        "precision.name bf16-params",
        "bf16-params would round the averaged parameters: use precision.name bf16",
    ),
    _excludes(
        "optim.ema_decay",
        "exchange.sync_every",
        "ranks that step independently have different averages",
    ),
    _excludes("optim.name adamw8bit", "exchange.sync_every", "its moments cannot be averaged"),
    _requires(
        "exchange.outer", "exchange.sync_every", "the outer optimizer steps once in that many steps"
    ),
    # replays
    _excludes(
        "integrity.replay_every",
        "exchange.sync_every",
        "ranks that step independently have different models",
    ),
    _excludes(
        "integrity.replay_every",
        "batch.interleave !1",
        "passes that run together have no gradients of their own",
    ),
    _excludes(
        _SPANS, "integrity.replay_every", "a rank can only replay a model that it holds whole"
    ),
    # a model that spans ranks
    _excludes(_SPANS, "exchange.name exact", "exact adds whole gradients"),
    _excludes(_SPANS, "exchange.compression", "compression needs whole gradients"),
    _excludes(_SPANS, "exchange.wire !float32", "shards are sent in their own precision"),
    _excludes(_SPANS, "exchange.reduce adasum", "Adasum compares whole gradients"),
    _excludes(
        _SPANS, "exchange.sync_every", "ranks would step independently with shards of a model"
    ),
    _excludes(
        _SPANS,
        "optim.name muon|adafactor|adamw8bit",
        "the update of a matrix needs the whole matrix: use adamw, adam, sgd or lion",
    ),
    _excludes(_SPANS, "batch.deal speed", "a replica is as fast as its slowest rank"),
    _excludes(
        _SPANS,
        "batch.per_rank_size",
        "ranks of a replica share their samples: set batch.global_size",
    ),
    _excludes(
        _SPANS, "batch.interleave !1", "batch.interleave is for models that each rank holds whole"
    ),
    _excludes(_SPANS, "batch.micro_size auto", "auto measures a whole model on one rank"),
    _excludes(_SPANS, "compile", _NOT_TESTED),
    _excludes(
        _SPANS,
        "precision.name fp16|bf16-params",
        "use bf16, which needs neither a loss scale nor master weights",
    ),
    *(
        Check(
            f"`parallel.{axis}` and `parallel.pipeline` exclude `parallel.schedule zero-bubble`",
            "torch then computes the gradients of weights separately: use interleaved1f1b",
            lambda config, axis=axis: (  # type: ignore[misc]
                f"parallel.{axis} {attrgetter(axis)(config.parallel)} excludes parallel.schedule "
                "zero-bubble, in which torch computes the gradients of weights separately: use "
                "interleaved1f1b"
                if config.parallel.schedule == "zero-bubble"
                and 1 not in (attrgetter(axis)(config.parallel), config.parallel.pipeline)
                else ""
            ),
        )
        for axis in ("tensor", "shard.degree")
    ),
    _requires(
        "parallel.shard.stage 2",
        "parallel.shard.degree !1",
        "the stage is about gradients and parameters that ranks hold in shards",
    ),
    _requires(
        "parallel.shard.offload",
        "parallel.shard.degree !1",
        "the key is about parameters that ranks hold in shards",
    ),
    Check(
        "`parallel.shard.degree` that does not divide the micro-batches of a step",
        "its ranks compute the same number of micro-batches",
        _find_uneven_shards,
    ),
    # a sharded optimizer
    _excludes(
        _SPANS,
        "parallel.shard.stage 1",
        "stage 1 is for models that each rank holds whole: use parallel.shard.degree with stage 3, "
        "which also shards the optimizer state",
    ),
    _requires(
        "parallel.shard.stage 1",
        _ELEMENTWISE,
        "ranks update slices of parameters, and the other optimizers need whole parameters",
    ),
    _excludes(
        "parallel.shard.stage 1",
        "optim.fused",
        "the fused kernel rounds an element depending on its position in the slice",
    ),
    _excludes(
        "parallel.shard.stage 1",
        "exchange.sync_every",
        "ranks that step independently need the whole optimizer state",
    ),
    _excludes("parallel.shard.stage 1", "exchange.reduce adasum", "not implemented together"),
    _excludes(
        "parallel.shard.stage 1",
        "optim.ema_decay",
        "averaged weights would be whole on every rank",
    ),
    # copies in memory
    _excludes(
        "checkpoint.memory.every",
        "parallel.shard.stage 1",
        "parallel.shard.copies keeps each shard on several hosts, whose loss then costs no step",
    ),
    Check(
        "`checkpoint.memory.every` requires a degree of `parallel` above 1",
        _NO_COPIES,
        _find_needless_copies,
    ),
    # the exporter
    _requires("telemetry.tls_cert_file", "telemetry.tls_key_file", "HTTPS needs both"),
    _requires("telemetry.tls_key_file", "telemetry.tls_cert_file", "HTTPS needs both"),
)


# --- checks of the configuration and the ranks -------------------------------


def _find_missing_patches(config: Any, ranks: Ranks) -> str:
    terms = [_Term("exchange.wire bfloat16"), _Term("precision.name bf16-params")]
    needs = next((term.text for term in terms if term.holds(config)), "")
    if not needs or ranks.patched is not False:
        return ""
    return (
        f"this Horovod was not built by hvdtrain, and {needs} requires its patches: "
        "`hvdtrain horovod build --install`"
    )


def _find_old_torch(config: Any, ranks: Ranks) -> str:
    axes = ("tensor", "pipeline", "shard.degree")
    axis = next((axis for axis in axes if attrgetter(axis)(config.parallel) > 1), "")
    if not axis or not ranks.torch or _numbers(ranks.torch) >= (2, 9):
        return ""
    degree = attrgetter(axis)(config.parallel)
    return (
        f"parallel.{axis} {degree} requires torch 2.9 or newer, and this is {ranks.torch}: install "
        "a newer one, then `hvdtrain horovod build --install`"
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _find_adasum_without_mpi(config: Any, ranks: Ranks) -> str:
    if config.exchange.reduce != "adasum":
        return ""
    if not ranks.elastic and (ranks.world_size == 1 or ranks.mpi is not False):
        return ""
    return (
        "exchange.reduce adasum requires MPI, and cannot be elastic: start with mpirun, or with "
        "horovodrun --mpi"
    )


def _find_adasum_ranks(config: Any, ranks: Ranks) -> str:
    size = ranks.world_size
    if config.exchange.reduce != "adasum" or ranks.elastic or not size & (size - 1):
        return ""
    return (
        "exchange.reduce adasum combines pairs of ranks, then pairs of pairs: it requires 2, 4, "
        f"8, ... ranks, not {size}"
    )


def _find_adasum_batch(config: Any, ranks: Ranks) -> str:
    micro_batches = config.batch.micro_batches
    if config.exchange.reduce != "adasum" or micro_batches % ranks.world_size == 0:
        return ""
    return (
        "exchange.reduce adasum gives all ranks the same weight: the micro-batches of a step "
        f"(batch.global_size / batch.micro_size = {micro_batches}) must be a multiple of the "
        f"{ranks.world_size} ranks"
    )


def _find_too_many_copies(config: Any, ranks: Ranks) -> str:
    copies, size = config.parallel.shard.copies, ranks.world_size
    if not config.parallel.shard.of_optimizer or ranks.elastic or not copies > size > 1:
        return ""
    return (
        f"parallel.shard.copies {copies} exceeds the {size} ranks: set it to at most {size}, at "
        "which each rank holds the whole optimizer state"
    )


def _find_copies_without_elasticity(config: Any, ranks: Ranks) -> str:
    every = config.checkpoint.memory.every
    if not every or ranks.elastic:
        return ""
    return (
        f"checkpoint.memory.every {every} requires an elastic run: in any other run the loss of a "
        "rank ends all ranks, and their memory is gone; use checkpoint.every, or start an elastic "
        "run (docs/elasticity.md)"
    )


def _find_elastic_fit(config: Any, ranks: Ranks) -> str:
    if not (config.batch.micro_size == "auto" and ranks.elastic):
        return ""
    return (
        "batch.micro_size auto derives the size of micro-batches from the memory of the ranks, "
        "which join and leave an elastic run: set a number, which a run with a fixed number of "
        "ranks can find"
    )


def _find_elastic_batch(config: Any, ranks: Ranks) -> str:
    if not (config.batch.per_rank_size and ranks.elastic):
        return ""
    return (
        "batch.per_rank_size derives the global batch from the number of ranks, which changes in "
        "an elastic run: set batch.global_size, or start without --host-discovery-script"
    )


def _find_missing_profiled_rank(config: Any, ranks: Ranks) -> str:
    named = config.profile.named_ranks or ()
    missing = sorted(rank for rank in named if rank >= ranks.world_size)
    if ranks.elastic or not missing:
        return ""
    return f"profile.ranks {missing[0]}: the run's ranks are 0 to {ranks.world_size - 1}"


RANK_CHECKS: tuple[RankCheck, ...] = (
    RankCheck(
        "`exchange.wire bfloat16` or `precision.name bf16-params` without hvdtrain's Horovod",
        "Horovod 0.28.1 needs patches for it",
        _find_missing_patches,
    ),
    RankCheck(
        "`parallel.tensor`, `pipeline` or `shard.degree` above 1 with a torch older than 2.9",
        "they use newer interfaces",
        _find_old_torch,
    ),
    RankCheck(
        "`exchange.reduce adasum` without MPI, or in an elastic run",
        "Horovod implements it for MPI only",
        _find_adasum_without_mpi,
    ),
    RankCheck(
        "`exchange.reduce adasum` on a number of ranks that is not a power of 2",
        "it combines pairs of ranks, then pairs of pairs",
        _find_adasum_ranks,
    ),
    RankCheck(
        "`exchange.reduce adasum` with ranks that do not divide the micro-batches of a step",
        "it gives all ranks the same weight",
        _find_adasum_batch,
    ),
    RankCheck(
        "`parallel.shard.copies` above the number of ranks, except in an elastic run",
        "at most all ranks hold a shard",
        _find_too_many_copies,
    ),
    RankCheck(
        "`checkpoint.memory.every`, except in an elastic run",
        "the loss of a rank ends all ranks",
        _find_copies_without_elasticity,
    ),
    RankCheck(
        "`batch.micro_size auto` in an elastic run",
        "the size of micro-batches would change with the ranks",
        _find_elastic_fit,
    ),
    RankCheck(
        "`batch.per_rank_size` in an elastic run",
        "the global batch would change with the ranks",
        _find_elastic_batch,
    ),
    RankCheck(
        "`profile.ranks` that do not exist, except in an elastic run",
        "they would write no trace",
        _find_missing_profiled_rank,
    ),
)
