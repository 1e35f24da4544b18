"""`hvdtrain.training`: a loop that a script writes itself, with everything that a run has.

    with hvdtrain.training(model, optimizer, dataset) as training:
        for step in training:
            with step:
                for batch in step:
                    step.backward(loss_of(model, batch))

Any launcher starts the script. The built-in loop takes the same steps (engine/loop.py); model,
optimizer, data and losses come from the script.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from hvdtrain import comm, log
from hvdtrain.api.flags import (
    check_effect,
    config_flags,
    configuration_words,
    unread_words,
)
from hvdtrain.api.guards import BackwardGuard, DatasetGuard, refuse_accumulation_hooks
from hvdtrain.config import Settings, parse
from hvdtrain.data.loader import EVALUATE_SEED
from hvdtrain.data.mixture import fingerprint_of
from hvdtrain.engine.callbacks.evaluate import evaluating
from hvdtrain.engine.loop import OUTSIDE, Step, Value
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.structure import ModelStructure
from hvdtrain.errors import UserError, crash
from hvdtrain.log import logger
from hvdtrain.optim.several import SeveralOptimizers
from hvdtrain.optim.state_dicts import members
from hvdtrain.process.prepare import prepare_environment
from hvdtrain.process.session import Session
from hvdtrain.runtime.collectives import AgreedError, RankLostError
from hvdtrain.runtime.device import random_numbers_kept, random_state, seed_all
from hvdtrain.runtime.environment import forget_launcher, launched_size, process_start
from hvdtrain.runtime.failure import abort_all_ranks, check_not_left_mpi, leave_horovod
from hvdtrain.runtime.heartbeat import HEARTBEAT, Activity
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.user_errors import report
from hvdtrain.runtime.wrappers import unwrapped
from hvdtrain.streams import flush, open_missing
from hvdtrain.tasks import Datasets, Task

_SAMPLES = 1 << 40  # sample numbers of a run without a dataset


class SampleNumbers(Dataset[int]):
    """Dataset of a script that makes its own samples: sample i is the number i."""

    fingerprint = "sample numbers"

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Script:
    """The task of a script with its own loop; `load_class` finds it by name."""

    OPTIONAL: ClassVar[Mapping[str, Any]] = Task.OPTIONAL
    # A script that does not clip its gradients does not expect it.
    defaults: ClassVar[Mapping[str, Any]] = {"optim.clip_norm": 0.0, "eval.every": 0}
    metrics: Sequence[str] = ()
    run_name: str
    script_state: ScriptState
    collate: Callable[[list[Any]], Any]
    dataset: Dataset[Any]
    wrapped: nn.Module  # as the script calls it, see runtime/wrappers.py
    _model: nn.Module
    _optimizer: Optimizer

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        dataset: Dataset[Any],
        metrics: Sequence[str],
        collate: Callable[[list[Any]], Any] | None,
    ) -> Script:
        script = cls()
        script.wrapped, script._model = model, unwrapped(model)
        script._optimizer, script.dataset = optimizer, dataset
        several = optimizer.by_name if isinstance(optimizer, SeveralOptimizers) else ()
        script.run_name = Path(sys.argv[0]).stem or "script"
        script.metrics = (*(f"{name}_loss" for name in several), *metrics)
        script.script_state = ScriptState(optimizer)
        script.collate = collate or _collated
        return script

    def datasets(self) -> Datasets:
        return Datasets(self.dataset, fingerprint=fingerprint_of(self.dataset))

    def model(self) -> nn.Module:
        return self._model

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self._optimizer

    def schedule(self, step: int) -> None:
        """The script sets the learning rate."""

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        raise AssertionError("a script with its own loop computes the losses")


def training(
    model: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer],
    dataset: Dataset[Any] | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    metrics: Sequence[str] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    argv: Sequence[str] | None = None,
    takeover: str | Path | None = None,
) -> Training:
    """Return the run of a loop that the script writes; use it as a context manager.

    All ranks call it with the same arguments. The model may be on the CPU: it is moved to this
    rank's device. Rank 0's weights are sent to the others.

    Args:
        model: what is trained; also in torch.compile's module or DataParallel, whose prefixes are
            not part of the names in a checkpoint.
        optimizer: of torch, over the model's parameters. Its learning rate is the script's.
            Several by name, such as {"generator": g, "discriminator": d}: see `Step.backward`.
        dataset: map-style, of known length; None: the script makes its samples, and a step gives
            their numbers, such as seeds, (micro_size,) int64.
        config: a YAML file or a preset, or keys of the configuration as for `hvdtrain.run`. With
            {"run.root": None} the run leaves no files; for one process.
        metrics: names of further values that `step.backward` gets.
        collate: makes a micro-batch of a list of samples; default: torch's default_collate. Tensors
            in dicts, lists and tuples, and objects with a method `to`, are moved to the device.
        argv: words of which keys of the configuration override `config`, such as
            --train.duration 100;
            all others are the script's own. Default: the command line; in a notebook, none.
        takeover: checkpoint of this script from before it used hvdtrain, or of its trainer, from
            which a new run continues; run.takeover in docs/takeover.md.

    Raises:
        SystemExit: the configuration is wrong (exit code 2), after a message from one rank.
        Exception: in a notebook or an interactive shell, any mistake, and what the script raises
            within the block; otherwise it ends all ranks, after a message from one rank.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = [(torch.ones(2), torch.ones(1))] * 64
        >>> keys = {"train.duration": 2, "batch.global_size": 8, "telemetry.port": 0}
        >>> with hvdtrain.training(model, optimizer, data, config=keys) as training:
        ...     for step in training:
        ...         with step:
        ...             for x, y in step:
        ...                 step.backward((model(x) - y).square().mean())
    """
    open_missing()
    began = time.time() if _interactive() else process_start()
    stop = StopFlag()
    stop.install()
    task = f"--task={Script.__module__}:{Script.__name__}"
    try:
        own = _checked(model, optimizer)
        file, flags = list[str](), list[str]()
        if isinstance(config, str | Path):
            file = [f"--config={config}"]
        else:
            flags = [*config_flags(config or {})]
        if takeover is not None:
            flags.append(f"--run.takeover={takeover}")
        in_notebook = _interactive() and not hasattr(sys.modules["__main__"], "__file__")
        words = argv if argv is not None else [] if in_notebook else sys.argv[1:]
        own_flags = [*configuration_words(words)]
        check_effect(own_flags)
        temporary = None
        if "--run.root=null" in flags:
            if launched_size() not in (None, 1):
                raise UserError("run.root null, without files of the run, is for one process")
            temporary = TemporaryDirectory(prefix="hvdtrain-", ignore_cleanup_errors=True)
            flags[flags.index("--run.root=null")] = f"--run.root={temporary.name}"
        settings = parse([task, *file, *own_flags], flags)
        settings.unread = tuple(unread_words(words, config or {}))
        if settings.config.parallel.any:
            raise UserError(
                "parallel.*: a script with its own loop trains a model that every rank holds "
                "completely; write a task for models that span ranks (docs/custom-tasks.md)"
            )
        if settings.config.integrity.replay_every:
            raise UserError(
                "integrity.replay_every: a script with its own loop computes the losses itself, so "
                "ranks cannot replay its micro-batches: use 0"
            )
    except UserError as error:
        raise _reported(error, stop) from None
    data = SampleNumbers() if dataset is None else dataset
    script = Script.of(model, own, data, metrics, collate)
    return Training(settings, script, stop, began, temporary)


def _collated(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            "torch's default_collate cannot make a micro-batch of samples of type "
            f"{type(samples[0]).__name__} ({str(error).splitlines()[0]}): pass "
            "hvdtrain.training(..., collate=function), which makes one of a list of samples"
        ) from None


class _ZeroGrad:
    """`zero_grad` of a model or an optimizer during a run: refused inside a step's block.

    Copies of the owner have the usual method.
    """

    def __init__(self, owner: Optimizer | nn.Module, in_block: Callable[[], bool]) -> None:
        self._owner, self._in_block = owner, in_block

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._in_block():
            raise UserError(
                f"{type(self._owner).__name__}.zero_grad() was called inside a step's block, where "
                "it would delete the gradients of earlier micro-batches: gradients are cleared "
                "before each step, so remove the call"
            )
        type(self._owner).zero_grad(self._owner, *args, **kwargs)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self._owner).zero_grad, self._owner)


class Training:
    """A run whose loop the script writes, see `training`.

    Attributes:
        state: by name, what the script keeps from step to step in addition to model and optimizer.
            An object has state_dict() and load_state_dict(); anything else is a plain value.
            Register all names before the loop; lists, dicts and tensors are restored in place. The
            state is saved, sent to new ranks and compared like the model.
    """

    _of_this_process: ClassVar[set[tuple[Path, str]]] = set()  # directory and run.id

    def __init__(
        self,
        settings: Settings,
        script: Script,
        stop: StopFlag,
        began: float,
        temporary: TemporaryDirectory[str] | None,
    ) -> None:
        self._settings, self._script, self._began = settings, script, began
        self._stop, self._temporary = stop, temporary
        self._finish = False
        self._lost: RankLostError | None = None
        self._step: Step | None = None
        self._steps: Generator[Step, None, int] | None = None
        self._code: int | None = None
        self._warned = False  # of random numbers in an evaluation
        self._watched: list[Any] = []  # with a zero_grad of this run
        self._hooks: list[Any] = []  # of the optimizers
        self._guard: BackwardGuard | None = None
        self._optimizers: list[Optimizer] = []  # with an add_param_group of this run
        # In an evaluation: this rank's number among the ranks that share it, and their number.
        self._place: tuple[int, int] | None = None
        self._session: Session
        self.state = script.script_state.objects

    # --- start and end ------------------------------------------------------

    def __enter__(self) -> Training:
        try:
            if self._settings.config.runtime.standalone:
                forget_launcher()
            check_not_left_mpi()
            self._refuse_second_run()
            prepare_environment(self._settings.config)
            self._session = Session(
                self._settings, self._stop, self._began, self._script, lambda: self._finish
            )
        except RankLostError as error:
            own = crash(f"Horovod could not be started: {error}")
            raise _reported(own, self._stop) from None
        except UserError as error:
            raise _reported(error, self._stop) from None
        optimizer = self._script.optimizer(self._script.model())
        several = optimizer.by_name if isinstance(optimizer, SeveralOptimizers) else {"": optimizer}
        for one in several.values():
            self._hooks.append(one.register_step_pre_hook(self._refuse_by_hand))
        # Not on their classes: other models and optimizers keep the usual method.
        modules = self._script.wrapped.modules()
        self._watched = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self._watched += several.values()
        for owner in self._watched:
            owner.zero_grad = _ZeroGrad(owner, self._in_block)
        self._guard = BackwardGuard(self._script.model(), lambda: self._step)
        self._guard.install()
        self._optimizers += several.values()
        for one in self._optimizers:
            one.add_param_group = self._refuse_group  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session = self._session
        if self._code is None and (error is None or isinstance(error, SystemExit)):
            error = UserError(
                "the loop was left before its end: it ends by itself after train.duration; to end "
                "it earlier call training.finish()"
                if self._steps is not None
                else "the block has no loop: for step in training"
            )
        self._step = None
        continues = _interactive() and session.topology.world_size == 1
        raised: BaseException | None = None
        try:
            if isinstance(error, AgreedError):
                self._close_steps()  # here, and not when the interpreter has ended other threads
                self._code = session.end_by_agreement(error)
            elif error is not None and self._code is None:
                raised = self._explained(error)
                if continues or self._temporary is not None:
                    self._close_steps()
                    session.persistent.release()
                if not continues:
                    self._clean_up()
                    session.report(error)
                    abort_all_ranks(raised, session.topology)
        finally:
            log.close()
        self._clean_up()
        if not (continues or error is None or isinstance(error, AgreedError | SystemExit)):
            return  # of the script's own code after the loop
        comm.COLLECTIVES.refuse("")
        if continues:
            self._stop.uninstall()
        else:
            self._stop.ignore()
        leave_horovod()
        HEARTBEAT.beat(Activity.DONE)
        if raised is not None:
            raise raised
        if self._code and not continues:
            raise _end(self._code)

    def _refuse_second_run(self) -> None:
        """Refuse a run.id that this script has used; in a notebook, a cell may continue its run."""
        run = self._settings.config.run
        if run.id is None or _interactive():
            return
        own = Path(run.root).absolute(), run.id
        if own in self._of_this_process:
            raise UserError(
                f"run.id {run.id}: this script has trained it already, so that this loop would "
                "continue it, with its weights. Give each run of a script, such as the folds of a "
                'cross-validation, its own run.id: hvdtrain.training(..., config={"run.id": name})'
            )
        self._of_this_process.add(own)

    def _clean_up(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
        for owner in self._watched:
            del owner.zero_grad
        self._watched.clear()
        for optimizer in self._optimizers:
            del optimizer.add_param_group
        self._optimizers.clear()
        if self._script.script_state.structure is not None:
            self._script.script_state.structure.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _close_steps(self) -> None:
        """Close the exporter and the run's files, after an error outside `Session.steps`."""
        if self._steps is not None:
            self._steps.close()

    # --- the loop -----------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """Iterate over the run's steps, from where an earlier start of the run ended.

        After a loss of ranks the step is repeated, see `Step`. A process without which the run
        continues leaves the script here (SystemExit), and so does every process if the ranks were
        asked to stop (exit code 75).
        """
        if self._steps is not None:
            raise UserError("a run has one loop: `for step in training` has begun already")
        refuse_accumulation_hooks(self._script.model())
        self._script.script_state.structure = ModelStructure(self._script.model())
        self._script.script_state.begin()
        self._steps, first = self._session.steps(), True
        steps = self._steps
        dataset = DatasetGuard(self._script.dataset, self._settings.config.loader.workers)
        while (step := self._next(lambda: next(steps))) is not None:
            yield step
            dataset.check()
            if first and self.rank == 0:
                self._warn_of_schedulers()
                if not self._stop.installed:
                    logger.warning(
                        "the loop runs in a thread, where Python handles no signals: SIGTERM and "
                        "SIGUSR1 end the process without a checkpoint"
                    )
            first = False

    def _next(self, resume: Callable[[], Step]) -> Step | None:
        """Return the step that the run's generator yields; None: the run has ended."""
        self._step = None
        try:
            self._step = resume()
        except RankLostError as error:
            self._lost = error
            raise
        except StopIteration as end:
            self._code = int(end.value)
            if self._code or self._session.removed:
                raise SystemExit(self._code) from None
        return self._step

    def _warn_of_schedulers(self) -> None:
        optimizer = self._script.optimizer(self._script.model())
        for name, one in members(optimizer).items():
            # A private mark of torch, see tests/single/test_torch_private.py: without it there is
            # no warning.
            scheduled = hasattr(one.step, "_wrapped_by_lr_sched")
            objects = [*self.state.values()]
            objects += [a for value in objects for a in getattr(value, "__dict__", {}).values()]
            if scheduled and not any(getattr(o, "optimizer", None) is one for o in objects):
                log.logger.warning(
                    "the optimizer%s has a scheduler that is not in training.state: after a resume "
                    "its schedule would begin again; before the loop, set "
                    'training.state["scheduler"] = scheduler',
                    f" {name}" if name else "",
                )

    @property
    def rank(self) -> int:
        """This process's number among the ranks; it may change in an elastic run."""
        return self._place[0] if self._place else self._session.topology.rank

    @property
    def size(self) -> int:
        """Number of ranks; it may change in an elastic run."""
        return self._place[1] if self._place else self._session.topology.world_size

    @property
    def device(self) -> torch.device:
        """Device of the model and of the micro-batches; known inside the loop."""
        return self._session.device

    def share(self, count: int) -> range:
        """Numbers of this rank among `count` items, such as validation samples."""
        return range(self.rank, count, self.size)

    def finish(self) -> None:
        """Make the next step the last one; the ranks agree on it if any of them calls this."""
        self._finish = True

    def log(self, step: Step, **values: float) -> None:
        """Log values with a step, in metrics.jsonl and all other places; all ranks call it."""
        step.values.update({name: float(value) for name, value in values.items()})

    def evaluate(self, function: Callable[..., Value | float], items: int | None = None) -> float:
        """Return the mean of `function` over all ranks; all ranks call it, outside a step's block.

        The model is in eval mode, and no gradients are recorded. The mean does not depend on the
        number of ranks if each rank evaluates its `share` of the data, without random numbers; or
        with `items`, also if `function` draws random numbers.

        Args:
            function: called without arguments; returns (sum, weight) of this rank, or a mean that
                counts once per rank. With `items`, called for parts of them, each on one rank, with
                the numbers of the part (a range); returns (sum, weight) of the part, or its mean.
            items: number of items, such as validation samples. The random numbers of a part are
                seeded by its place, so each evaluation draws the same.

        Returns:
            The sum of the sums divided by that of the weights. If a rank is lost meanwhile, the
            others repeat the evaluation. NaN if one was lost in the step's block, see `Step`.
        """
        step = self._step
        if step is None:
            raise UserError("training.evaluate is called inside the loop")
        while not step.failed:
            try:
                comm.COLLECTIVES.refuse("")
                with evaluating(self._script.model()), torch.no_grad(), random_numbers_kept():
                    return self._session.iteration.evaluate(
                        partial(self._compute, function, items), self._session.topology
                    )
            except RankLostError as error:
                if step.open:
                    raise
                self._continue_after(error)
            finally:
                comm.COLLECTIVES.refuse("" if step.open else OUTSIDE)
        return math.nan

    def _continue_after(self, error: RankLostError) -> None:
        """Join the next generation within an iteration, see engine/iteration.py."""
        self._session.iteration.require_unchanged()
        steps = self._steps
        assert steps is not None
        with random_numbers_kept():
            self._step = self._next(lambda: steps.throw(error))

    def _compute(
        self,
        function: Callable[..., Value | float],
        items: int | None,
        number: int,
        ranks: int,
        all_ranks: bool,
    ) -> list[tuple[float, float]]:
        """Evaluate a share of the items, see iteration.Compute."""
        if not all_ranks:
            comm.COLLECTIVES.refuse(
                "called in an evaluation that is repeated after the loss of a rank, while other "
                "ranks wait: start again with the same run.id to resume from the newest checkpoint"
            )
        self._place = number, ranks
        try:
            return self._of_all(function) if items is None else self._of_parts(function, items)
        finally:
            self._place = None

    def _of_all(self, function: Callable[[], Value | float]) -> list[tuple[float, float]]:
        self._seed_evaluation(self.rank)
        before = random_state()
        found = _pair(function(), 1.0)
        if not self._warned and self.rank == 0 and random_state() != before:
            self._warned = True
            logger.warning(
                "training.evaluate: the function draws random numbers (a DataLoader does, unless "
                "it has a generator), so the mean may depend on the number of ranks; "
                "training.evaluate(function, items=N), which calls function(numbers) for parts of "
                "range(N), seeds them by item"
            )
        return [found]

    def _of_parts(
        self, function: Callable[[range], Value | float], items: int
    ) -> list[tuple[float, float]]:
        size, found = self._session.batch.micro_samples, []
        for part in self.share(-(-items // size)):
            numbers = range(part * size, min((part + 1) * size, items))
            self._seed_evaluation(part)
            found.append(_pair(function(numbers), len(numbers)))
        return found

    def _seed_evaluation(self, number: int) -> None:
        seed_all(self._settings.config.seed, 0, number, EVALUATE_SEED)

    def _explained(self, error: BaseException) -> BaseException:
        if isinstance(error, RankLostError) and error is not self._lost:
            return crash(
                f"another rank was lost outside the step's block ({error}): call collectives "
                "inside `with step:` or in training.evaluate"
            )
        return error

    def _refuse_by_hand(self, *_: Any) -> None:
        if self._step is not None and not self._step.updating:
            raise UserError(
                "optimizer.step() was called by the script, perhaps by GradScaler.step: the end of "
                "the step's block updates the parameters, with the gradient of all ranks; for a "
                "loss scale set precision.name fp16"
            )

    def _refuse_group(self, *_: Any, **__: Any) -> None:
        raise UserError(
            "optimizer.add_param_group() was called after hvdtrain.training had begun, which has "
            "the optimizer's parameters from its start: give the optimizer all parameters when it "
            "is created; those that train later are frozen (requires_grad_(False)) until then"
        )

    def _in_block(self) -> bool:
        return self._step is not None and self._step.open


def _pair(found: Value | float, weight: float) -> tuple[float, float]:
    """Return (sum, weight) of values that are a mean of this weight, or (sum, weight) already."""
    if isinstance(found, tuple):
        return float(found[0]), float(found[1])
    return float(found) * weight, weight


def _reported(error: UserError, stop: StopFlag) -> BaseException:
    """Return what to raise because of an error before the run; report it if the process ends."""
    if _interactive():
        stop.uninstall()
        return error
    return _end(report(error, stop))


def _end(code: int) -> SystemExit:
    """Return what ends this process with an exit code; in a thread, which it would only end, do
    so here."""
    if threading.current_thread() is not threading.main_thread():
        flush()
        os._exit(code)
    return SystemExit(code)


def _interactive() -> bool:
    """Whether this is the process of a notebook or an interactive shell, which continues."""
    return hasattr(sys, "ps1")


def _checked(model: object, optimizer: object) -> Optimizer:
    if not isinstance(model, nn.Module):
        raise UserError(f"training: model is a torch.nn.Module, not a {type(model).__name__}")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.process_group.size() > 1:
            raise UserError(
                "training: the model has a DistributedDataParallel, which would sum the gradients "
                "a second time: remove it, the end of each step's block sums them"
            )
    named: dict[str, Any] = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    for one in named.values():
        if not isinstance(one, Optimizer):
            raise UserError(
                f"training: optimizer is a torch.optim.Optimizer, not a {type(one).__name__}"
            )
        closure = signature(type(one).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise UserError(
                f"training: {type(one).__name__} evaluates the loss several times in each step, "
                "with a closure; only optimizers that step without a closure can be used"
            )
    own: Optimizer = SeveralOptimizers(named) if isinstance(optimizer, Mapping) else named[""]
    return own
