"""Checks of keys in different groups that exclude or require each other."""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import require


def check_together(config: Any) -> None:
    """Check keys of different groups; `config`: a Config, whose module imports this one.

    Raises:
        ValueError: with a message for the user.
    """
    require(config.seed >= 0, f"seed must be >= 0, not {config.seed}")
    require(
        not config.exchange.exact or config.runtime.threads > 0,
        "exchange.name exact needs runtime.threads: results of matrix products depend on the "
        "number of threads, so give all runs that are to be the same one number, such as the "
        "cores of a host divided by the most ranks it will have",
    )
    require(
        config.batch.deal == "even" or config.telemetry.exchange_every > 0,
        "batch.deal speed needs the ranks' comparisons: telemetry.exchange_every must not be 0",
    )
    require(
        config.batch.deal == "even" or config.exchange.reduce == "average",
        "batch.deal speed excludes exchange.reduce adasum, which weighs ranks alike",
    )
    require(
        not (config.memory.fit and config.batch.max_tokens),
        "memory.fit finds batch.micro_size, which batch.max_tokens replaces: give one of them",
    )
    interleaved = config.batch.interleave > 1
    for key, on, why in (
        ("memory.fit", config.memory.fit, "it measures one pass at a time"),
        ("compile.enabled", config.compile.enabled, "not tried together"),
    ):
        both = f"batch.interleave {config.batch.interleave} excludes {key}"
        require(not (interleaved and on), f"{both}: {why}")
    for key, on in (
        ("compile.enabled", config.compile.enabled),
        ("memory.fit", config.memory.fit),
        ("precision.cudnn_benchmark", config.precision.cudnn_benchmark),
    ):
        reason = "the bits of a run would depend on the machine that it began on"
        require(not (on and config.exchange.exact), f"{key} excludes exchange.name exact: {reason}")
    require(
        not config.exchange.sync_every or config.precision.name != "bf16-params",
        f"exchange.sync_every {config.exchange.sync_every} averages parameters, which "
        "precision.name bf16-params rounds: use precision.name bf16",
    )
    require(
        config.optim.scale_lr == "none" or config.batch.per_rank_size > 0,
        f"optim.scale_lr {config.optim.scale_lr} needs batch.per_rank_size: batch.global_size "
        "does not grow with the ranks",
    )
    require(
        not config.optim.ema_decay or not config.exchange.sync_every,
        "optim.ema_decay excludes exchange.sync_every: ranks that step on their own have "
        "averages of their own",
    )
    require(
        config.optim.name != "adamw8bit" or not config.exchange.sync_every,
        "optim.name adamw8bit excludes exchange.sync_every: its moments cannot be averaged",
    )
    if config.parallel.spans_ranks:
        _check_spanning(config)
    _check_zero(config)
    wants = "train.patience" if config.train.patience else "checkpoint.keep_best"
    require(
        config.eval.every > 0 or not (config.train.patience or config.checkpoint.keep_best),
        f"{wants} needs evaluations: eval.every must not be 0",
    )
    steps = config.profile.range
    require(
        not steps or not config.train.steps or steps[0] <= config.train.steps,
        f"profile.steps {config.profile.steps} begins after the last step (train.steps "
        f"{config.train.steps})",
    )


def _check_spanning(config: Any) -> None:
    """Check keys that cannot be combined with a model that spans ranks."""
    exchange = config.exchange
    key = next(
        f"parallel.{axis} {degree}"
        for axis, degree in config.parallel.degrees.items()
        if degree > 1
    )
    for other, on, why in (
        ("exchange.name exact", exchange.exact, "its sums are those of whole gradients"),
        (f"exchange.compression {exchange.compression}", exchange.compression != "none",
         "it compresses whole gradients"),
        (f"exchange.wire {exchange.wire}", exchange.wire != "float32",
         "parts travel in their own precision"),
        (f"exchange.reduce {exchange.reduce}", exchange.reduce != "average",
         "it compares whole gradients"),
        (f"exchange.sync_every {exchange.sync_every}", exchange.sync_every > 0,
         "ranks would step on their own with parts of a model"),
        (f"optim.name {config.optim.name}",
         config.optim.name in ("muon", "adafactor", "adamw8bit"),
         "its update of a matrix needs the whole matrix: use adamw, adam, sgd or lion"),
        ("batch.deal speed", config.batch.deal == "speed", "a replica is as fast as its slowest"),
        ("batch.per_rank_size", config.batch.per_rank_size > 0,
         "ranks of a replica share their samples: give batch.global_size"),
        (f"batch.interleave {config.batch.interleave}", config.batch.interleave > 1,
         "it is for models that each rank holds whole"),
        ("memory.fit", config.memory.fit, "it measures a whole model on one rank"),
        ("compile.enabled", config.compile.enabled, "not tried together"),
        (f"precision.name {config.precision.name}",
         config.precision.name in ("fp16", "bf16-params"),
         "use bf16, whose gradients need no scale and whose parameters no masters"),
    ):  # fmt: skip
        require(not on, f"{key} excludes {other}: {why}")
    parallel = config.parallel
    for axis in ("tensor", "shard"):
        degree = getattr(parallel, axis)
        require(
            parallel.schedule != "zero-bubble" or 1 in (degree, parallel.pipeline),
            f"parallel.{axis} {degree} excludes parallel.schedule zero-bubble, which has torch "
            "compute the gradients of weights apart from the others: use interleaved1f1b",
        )


_ELEMENTWISE = ("adamw", "adam", "sgd", "lion")


def _check_zero(config: Any) -> None:
    """Check keys for parallel.zero, with which a rank steps on slices of parameters."""
    if not config.parallel.zero:
        return
    key = f"parallel.zero {config.parallel.zero}"
    require(
        not config.parallel.spans_ranks,
        f"{key} is for models that each rank holds whole: use parallel.shard, which spreads the "
        "optimizer's state too",
    )
    require(
        config.optim.name in _ELEMENTWISE,
        f"{key} gives each rank slices of parameters, and optim.name {config.optim.name} wants "
        f"whole ones: use {', '.join(_ELEMENTWISE[:-1])} or {_ELEMENTWISE[-1]}",
    )
    require(
        not config.optim.fused,
        f"{key} excludes optim.fused, which rounds an element by where it lies in its slice",
    )
    require(
        not config.exchange.sync_every,
        f"{key} excludes exchange.sync_every: ranks that step on their own need the whole state",
    )
    require(
        config.exchange.reduce == "average",
        f"{key} excludes exchange.reduce adasum, which cannot be elastic",
    )
    require(
        not config.optim.ema_decay,
        f"{key} excludes optim.ema_decay: averaged weights would be whole on every rank",
    )
