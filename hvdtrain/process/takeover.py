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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hvdtrain.checkpoint.format import write
from hvdtrain.checkpoint.interchange.other_run import OtherRun, StateDict
from hvdtrain.checkpoint.interchange.readers import read_other_run
from hvdtrain.checkpoint.spread import as_in
from hvdtrain.checkpoint.weights import Weights
from hvdtrain.config import Settings
from hvdtrain.data.loader import has_own_order
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.state import RunState
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.optim.optimizer import parameter_names, set_state_tensors
from hvdtrain.optim.state_dicts import load_state_dict, members
from hvdtrain.parallel.config import ParallelConfig
from hvdtrain.process.build import RunComponents, build_components
from hvdtrain.process.initial_weights import converted, copy_weights
from hvdtrain.process.prepare import Start, prepare, prepare_environment
from hvdtrain.process.strategy import build_strategy
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.tensor_shards import model_tensors
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
    loaded = copy_weights(state.model, run.weights, run.path)
    if script is None:
        _load_by_name(state, run)
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


# --- the optimizer ------------------------------------------------------------


def _load_into_script(state: RunState, script: ScriptState, run: OtherRun) -> None:
    own = members(state.optimizer)
    if run.by_name is not None:
        _load_by_name(state, run)
    else:
        if len(own) != len(run.optimizers):
            raise UserError(
                f"{run.path} has the state of {plural(len(run.optimizers), 'optimizer')}, and the "
                f"script has {len(own)}"
            )
        for one, saved in zip(own.values(), run.optimizers, strict=True):
            _check_numbers(one, saved, run)
            load_state_dict(one, saved)
    schedulers = {
        name: value
        for name, value in script.objects.items()
        if isinstance(value, LRScheduler | ReduceLROnPlateau)
    }
    if run.by_name is not None:
        for name, scheduler in schedulers.items():
            _advance(name, scheduler, run.step)
    elif len(schedulers) != len(run.schedulers):
        raise UserError(
            f"{run.path} has the state of {plural(len(run.schedulers), 'scheduler')}, and "
            f"training.state has {len(schedulers)}: before the loop, set "
            'training.state["scheduler"] = scheduler for each, and for no other'
        )
    for (name, scheduler), saved in zip(schedulers.items(), run.schedulers, strict=False):
        try:
            scheduler.load_state_dict(saved)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise UserError(
                f"training.state[{name!r}] does not load the scheduler of {run.path}: {error}"
            ) from None
    others = sorted(script.objects.keys() - schedulers.keys())
    if others:
        run.left.append(
            f"training.state of {', '.join(others)}, which keep the state that the script gave them"
        )
    script.keep()


def _advance(name: str, scheduler: LRScheduler | ReduceLROnPlateau, steps: int) -> None:
    """Step a scheduler as the script would have: the other trainer's was not torch's."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UserError(
            f"training.state[{name!r}] is a ReduceLROnPlateau, whose state is not in the checkpoint"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        for _ in range(steps):
            scheduler.step()


def _check_numbers(optimizer: torch.optim.Optimizer, saved: StateDict, run: OtherRun) -> None:
    """Check that the tensors of an optimizer's state have the shapes of its parameters."""
    own, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if own != theirs:
        raise UserError(
            f"the optimizer in {run.path} has groups of {theirs} parameters, and the script's "
            f"{type(optimizer).__name__} has groups of {own}: build the model and the optimizer as "
            "the script that wrote the checkpoint does"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        entries = saved["state"].get(number, {})
        moment = entries.get("exp_avg", entries.get("momentum_buffer"))
        if isinstance(moment, Tensor) and moment.shape != parameter.shape:
            raise UserError(
                f"the optimizer in {run.path} has a tensor of shape {list(moment.shape)} for "
                f"parameter {number}, whose shape is {list(parameter.shape)} here: it is the "
                "optimizer of another model, or its parameters have another order"
            )


def _load_by_name(state: RunState, run: OtherRun) -> None:
    """Load an optimizer's tensors by the names of the parameters."""
    tensors = run.by_name if run.by_name is not None else _named(run)
    entries: dict[str, dict[str, Tensor]] = {}
    shapes = {name: tensor.shape for name, tensor in run.weights.tensors.items()}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        entries.setdefault(entry, {})[name] = tensor
        if tensor.numel() > 1:  # weights may be saved in other pieces
            shapes.setdefault(name, tensor.shape)
    found = {
        f"{name}/{entry}": tensor
        for entry, own in entries.items()
        for name, tensor in _renamed(state, run.weights.facts, own, shapes, entry).items()
    }
    names = {*parameter_names(state.optimizer, state.model).values()}
    of_model = {key.rpartition("/")[0] for key in found}
    if found and of_model != names:
        differing = sorted(of_model ^ names)
        raise UserError(
            f"the optimizer in {run.path} trains other parameters than this run's: "
            f"{plural(len(differing), 'name differs', 'names differ')}, such as {differing[0]}"
        )
    set_state_tensors(state.optimizer, state.model, found)


def _named(run: OtherRun) -> dict[str, Tensor]:
    """Name the parameters of a numbered state: "name/entry" -> tensor."""
    if run.numbering is None:
        raise UserError(
            f"only the script that wrote {run.path} knows which parameter its optimizer's numbers "
            "mean: continue in this script, with hvdtrain.training(..., takeover=...); or begin a "
            "run with its weights alone (run.init_from)"
        )
    [saved] = run.optimizers
    names, numbers = run.numbering(), [n for g in saved["param_groups"] for n in g["params"]]
    if len(names) != len(numbers):
        raise UserError(
            f"the optimizer in {run.path} has {len(numbers)} parameters, and the model has "
            f"{len(names)}: it does not train all of them"
        )
    return {
        f"{name}/{entry}": value
        for name, number in zip(names, numbers, strict=True)
        for entry, value in saved["state"].get(number, {}).items()
        if isinstance(value, Tensor)
    }


def _renamed(
    state: RunState,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, torch.Size],
    entry: str,
) -> dict[str, Tensor]:
    """Give one entry of all parameters, such as "exp_avg", the names and layouts of this model.

    Such a tensor is split and transposed as its parameter is. A number, such as a count of steps,
    is repeated for that.

    Raises:
        UserError: a tensor is neither.
    """
    single = all(tensor.numel() == 1 for tensor in tensors.values())
    wrong = [n for n, t in tensors.items() if not single and t.shape != shapes.get(n, t.shape)]
    own = as_in(state.model, tensors)
    if own.keys() <= model_tensors(state.model).keys():
        return own
    if wrong:
        raise UserError(
            f"the optimizer's {entry} of {wrong[0]} has the shape "
            f"{list(tensors[wrong[0]].shape)}, which is not that of its parameter: it cannot be "
            "converted to this model's names"
        )
    if single:
        tensors = {n: t.reshape(()).expand(shapes[n]) for n, t in tensors.items() if n in shapes}
    found = as_in(state.model, converted(state.model, Weights(dict(tensors), dict(facts))))
    return {n: t.flatten()[0].clone() for n, t in found.items()} if single else found


# --- what is said -------------------------------------------------------------


def _say_what_differs(components: RunComponents, run: OtherRun) -> None:
    config = components.config
    for phrase in (*run.left, *_options(components, run)):
        logger.warning("takeover: not kept: %s", phrase)
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
    if has_own_order(components.datasets.train):
        order = "the dataset's"
    elif components.datasets.fingerprint == "sample numbers":
        return  # the script makes its samples from their numbers
    elif run.shuffle_seed is not None:
        if (config.loader.order, config.seed) == ("torch", run.shuffle_seed):
            _check_epochs(components, run)
            return
        order = f"that of --loader.order torch --seed {run.shuffle_seed}"
        logger.warning(
            "takeover: the order of samples was %s, and is another one now: samples of this epoch "
            "are repeated or passed over",
            order,
        )
        return
    else:
        order = f"loader.order {config.loader.order}"
    logger.warning(
        "takeover: the run reads on at sample %d of %s; whether these are the next ones is not "
        "known: %s",
        components.state.progress.samples,
        order,
        run.order,
    )


def _check_epochs(components: RunComponents, run: OtherRun) -> None:
    size, samples = components.prepared.resolved.epoch_samples, components.state.progress.samples
    if samples > size and size % components.config.batch.global_size:
        logger.warning(
            "takeover: the last step of each epoch of %s had fewer samples, which is not repeated: "
            "up to %d samples of this epoch are passed over",
            run.trainer,
            samples // size * components.config.batch.global_size,
        )


def _options(components: RunComponents, run: OtherRun) -> Iterable[str]:
    """Options of the other optimizer that this run's configuration sets in another way."""
    if optional(components.task, "script_state") is not None and run.by_name is None:
        return
    own = components.state.optimizer.param_groups
    for name in sorted({name for group in own for name in group} - _NOT_COMPARED):
        theirs = {_plain(group[name]) for group in run.groups() if name in group}
        ours = {_plain(group[name]) for group in own if name in group}
        if theirs and theirs != ours:
            yield f"{name} of the optimizer, {_listed(theirs)}: it is {_listed(ours)} here"


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _listed(values: Iterable[Any]) -> str:
    return " and ".join(sorted(map(str, values)))
