"""A run that continues what another trainer began: `run.takeover` and `hvdtrain takeover`.

Rank 0 loads the other trainer's state into the components of the run, before it sends its state to
all ranks. The run begins at the step of that checkpoint, as from a checkpoint of its own.

In a script with its own loop the optimizer is the script's, so that the numbers of parameters in
its state_dict() are the same as at the other trainer, and its options and schedulers are loaded
with it. A built-in task has another optimizer: parameters are found by name, and the options are
those of the configuration.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from hvdtrain.checkpoint.format import write
from hvdtrain.checkpoint.interchange.other_run import OtherRun
from hvdtrain.checkpoint.interchange.readers import read_other_run
from hvdtrain.config import Settings
from hvdtrain.data.loader import has_own_order
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.optim.state_dicts import load_state_dict, members
from hvdtrain.parallel.config import ParallelConfig
from hvdtrain.process.build import RunComponents, build_components
from hvdtrain.process.initial_weights import copy_weights
from hvdtrain.process.other_optimizer import listed, load_by_name, placed_state
from hvdtrain.process.prepare import Start, prepare, prepare_environment
from hvdtrain.process.strategy import build_strategy
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.init import initialize
from hvdtrain.tasks import optional
from hvdtrain.text import plural

# Of the options of optimizers: those that choose how to compute the same step, and what the
# schedule sets in each step.
_NOT_COMPARED = {
    *("params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
    *("lr", "initial_lr", "lr_scale"),
}


def take_over(components: RunComponents, path: str) -> None:
    """Load the state of another trainer's checkpoint; on one rank, whose state the others receive.

    Raises:
        UserError: it cannot be read, or is of another model or optimizer.
    """
    try:
        run = read_other_run(Path(path))
        _load(components, run)
    except UserError as error:
        raise UserError(f"run.takeover: {error}") from None


def write_checkpoint(settings: Settings, path: str, out: Path) -> Path:
    """Write the state of another trainer's checkpoint as the first checkpoint of a run.

    Args:
        settings: of the run; `parallel.*` has no effect on a checkpoint.
        path: of the other trainer's checkpoint.
        out: run directory, which contains no run.

    Returns:
        The checkpoint.

    Raises:
        UserError: as `take_over`, or `out` contains a run, or cannot be written.
    """
    directory = RunDirectory(out)
    if directory.metrics.exists() or directory.checkpoints.exists():
        raise UserError(f"--out {out} already contains a run; name a directory that does not")
    if settings.config.batch.per_rank_size:
        raise UserError(
            "batch.per_rank_size: the position in the data depends on the number of ranks; omit "
            "--out, and start the run with --run.takeover"
        )
    config = replace(settings.config, parallel=ParallelConfig())
    settings = replace(settings, config=config)
    prepare_environment(config)
    topology = initialize(config.runtime.threads)
    prepared = prepare(settings, topology, Start(time.perf_counter(), local_rank=0))
    strategy = build_strategy(config, elastic=False)
    components = build_components(prepared, strategy, topology)
    take_over(components, path)
    try:
        return write(directory.checkpoints, components.state.capture())
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror})") from None


def _load(components: RunComponents, run: OtherRun) -> None:
    state, script = components.state, optional(components.task, "script_state")
    if run.step >= components.config.train.steps:
        raise UserError(
            f"{run.path} is of step {run.step}, but the run has {components.config.train.steps} "
            "steps: increase train.duration"
        )
    loaded = copy_weights(state.model, run.weights, run.path)
    if script is None:
        load_by_name(state, run)
    else:
        _load_into_script(state, script, run)
    progress, resolved = state.progress, components.prepared.resolved
    progress.step = state.applied.count = run.step
    progress.samples = resolved.samples_before(run.step)
    logger.info(
        "took over step %d of %s from %s: %s and the optimizer; the run begins there",
        run.step,
        run.trainer,
        run.path,
        plural(loaded, "tensor"),
    )
    _say_what_differs(components, run)


# --- the script's optimizer, and its schedulers -------------------------------


def _load_into_script(state: RunState, script: ScriptState, run: OtherRun) -> None:
    script.load(())
    script.restore()  # an earlier takeover may have been lost with its ranks
    own = members(state.optimizer)
    if run.by_name is not None:
        load_by_name(state, run)
    else:
        if len(own) != len(run.optimizers):
            raise UserError(
                f"{run.path} has the state of {plural(len(run.optimizers), 'optimizer')}, and the "
                f"script has {len(own)}"
            )
        for one, saved in zip(own.values(), run.optimizers, strict=True):
            load_state_dict(one, placed_state(one, saved, run))
    schedulers = {name: one for name, one in script.objects.items() if _is_scheduler(one)}
    if run.by_name is not None:
        for name, scheduler in schedulers.items():
            _advance(name, scheduler, run.step)
    elif len(schedulers) != len(run.schedulers):
        raise UserError(
            f"{run.path} has the state of {plural(len(run.schedulers), 'scheduler')}, and "
            f"training.state has {len(schedulers)}: before the loop, set "
            'training.state["scheduler"] = scheduler for each of them'
        )
    for (name, scheduler), saved in zip(schedulers.items(), run.schedulers, strict=False):
        try:
            scheduler.load_state_dict(saved)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"training.state[{name!r}] does not load the scheduler of {run.path}: {error}"
            ) from None
        if (counted := saved.get("last_epoch", run.step)) != run.step:
            logger.warning(
                "takeover: training.state[%r] has been stepped %s times in %d steps: step it as "
                "often as the other trainer did (Accelerate: once in each process)",
                name,
                counted,
                run.step,
            )
    others = sorted(script.objects.keys() - schedulers.keys())
    if others:
        run.left.append(
            f"training.state of {', '.join(others)}, which keep the state that the script gave them"
        )
    script.keep()


def _is_scheduler(value: object) -> bool:
    """Whether it is a scheduler of learning rates, of torch or such as timm's."""
    names = {base.__name__ for base in type(value).__mro__}
    return bool(names & {"LRScheduler", "ReduceLROnPlateau", "Scheduler"})


def _advance(name: str, scheduler: Any, steps: int) -> None:
    """Step a scheduler as the script would have: the other trainer's was not torch's."""
    if not isinstance(scheduler, LRScheduler):
        raise UserError(
            f"training.state[{name!r}] is a {type(scheduler).__name__}, whose state is not in the "
            "checkpoint, and does not follow from the number of steps"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for _ in range(steps):
            scheduler.step()


# --- what is said -------------------------------------------------------------


def _say_what_differs(components: RunComponents, run: OtherRun) -> None:
    config = components.config
    for phrase in run.left:
        logger.warning("takeover: not kept: %s", phrase)
    for sentence in _options(components, run):
        logger.warning("takeover: %s", sentence)
    batch = config.batch.global_size
    if run.global_size is not None and run.global_size != batch and not config.batch.max_tokens:
        logger.warning(
            "takeover: a step had %d samples; batch.global_size is %d", run.global_size, batch
        )
    if run.clip_norm is not None and run.clip_norm != config.optim.clip_norm:
        logger.warning(
            "takeover: gradients were clipped to %g; optim.clip_norm is %g",
            run.clip_norm,
            config.optim.clip_norm,
        )
    _say_order(components, run)


def _say_order(components: RunComponents, run: OtherRun) -> None:
    config, samples = components.config, components.state.progress.samples
    if components.datasets.fingerprint == "sample numbers":
        return  # the script makes its samples from their numbers
    if run.shuffle_seed is None:
        own = has_own_order(components.datasets.train)
        logger.warning(
            "takeover: the run continues with sample %d of %s, which may not be the next one of "
            "the other trainer: %s",
            samples,
            "the dataset's own order" if own else f"loader.order {config.loader.order}",
            run.order,
        )
    elif (config.loader.order, config.seed) != ("torch", run.shuffle_seed):
        logger.warning(
            "takeover: the order of samples was that of --loader.order torch --seed %d, and is "
            "another one now: samples of this epoch are repeated or skipped",
            run.shuffle_seed,
        )
    elif samples > (size := components.prepared.resolved.epoch_samples) and (
        size % config.batch.global_size
    ):
        logger.warning(
            "takeover: an epoch of %d samples is not a whole number of steps: %s ends each epoch "
            "with a smaller step, hvdtrain does not, so its position differs by up to %d samples",
            size,
            run.trainer,
            samples // size * config.batch.global_size,
        )


def _options(components: RunComponents, run: OtherRun) -> Iterable[str]:
    """Options of the other optimizer that this run sets in another way."""
    script = optional(components.task, "script_state")
    if script is not None and run.by_name is None:
        return  # loaded with the optimizer
    own = components.state.optimizer.param_groups
    # The schedule sets the rate.
    scheduled = script is None or any(map(_is_scheduler, script.objects.values()))
    names = {name for group in own for name in group} - _NOT_COMPARED
    for name in sorted(names | (set() if scheduled else {"lr"})):
        theirs = {_plain(group[name]) for group in run.groups() if name in group}
        ours = {_plain(group[name]) for group in own if name in group}
        if theirs and theirs != ours:
            yield f"the optimizer had {name} {listed(theirs)}; this run has {listed(ours)}"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
