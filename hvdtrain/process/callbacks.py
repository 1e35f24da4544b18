"""Callbacks of a generation, in the order in which the loop calls them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint.manager import FilesOfRank, NoFiles
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.config import Config
from hvdtrain.data.validation import ValidationData
from hvdtrain.engine.callbacks.allocation import StopBeforeEnd
from hvdtrain.engine.callbacks.checkpoint import SaveCheckpoints, Saving
from hvdtrain.engine.callbacks.digests import RecordDigests
from hvdtrain.engine.callbacks.evaluate import Evaluate
from hvdtrain.engine.callbacks.log import CountBorrowed, Export, LogMetrics, RecordMfu
from hvdtrain.engine.callbacks.profile import Profile
from hvdtrain.engine.callbacks.replicas import ReplicaCheck
from hvdtrain.engine.callbacks.stragglers import Destinations, DetectStragglers
from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.engine.state import KeepCommonState
from hvdtrain.errors import UserError
from hvdtrain.process.build import RunComponents, build_passes
from hvdtrain.process.recorder import RunRecorder
from hvdtrain.run_files.digests import DigestFiles
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.allocation import seconds_left
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.tasks import optional

if TYPE_CHECKING:
    from hvdtrain.engine.callbacks.copies import KeepCopies


class OwnCallback(Callback):
    """A callback of the task: `on_step(record)` returns values to add to the step, by name."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        values = self._own.on_step(dict(record)) or {}
        if wrong := [name for name in values if name in record]:
            raise UserError(
                f"the task's callback {type(self._own).__name__} adds {', '.join(wrong)} to step "
                f"{record['step']}, which has it already: choose another name"
            )
        record.update({name: float(value) for name, value in values.items()})


@dataclass
class Callbacks:
    """Callbacks in call order; None: not configured."""

    mfu: RecordMfu | None
    replicas: ReplicaCheck | None
    export: Export | None
    stragglers: DetectStragglers | None
    evaluate: Evaluate | None
    own: list[OwnCallback]
    borrowed: CountBorrowed | None
    log: LogMetrics
    checkpoint: SaveCheckpoints
    snapshot: KeepCommonState | None
    copies: KeepCopies | None
    profile: Profile | None
    digests: RecordDigests | None
    end: StopBeforeEnd | None

    def as_list(self) -> list[Callback]:
        """Return the configured callbacks."""
        found: list[Callback] = []
        for slot in fields(self):
            value = getattr(self, slot.name)
            found += value if isinstance(value, list) else [value] if value is not None else []
        return found


@dataclass(frozen=True)
class Outputs:
    """Destinations of a generation's output.

    Args:
        directory: run directory.
        recorder: on rank 0.
        failed_at: unix time of the failure before this generation, if any.
        recent: last records of this process, see LogMetrics.
        hosts_changed: whether this rank was notified that processes join or leave.
        job: on rank 0, Slurm's job of all ranks, and what raises a stop request.
    """

    directory: RunDirectory
    recorder: RunRecorder | None
    failed_at: float | None = None
    recent: deque[StepRecord] = field(default_factory=deque)
    hosts_changed: Callable[[], bool] = lambda: False
    job: tuple[str, StopFlag] | None = None


def build_callbacks(
    config: Config, components: RunComponents, outputs: Outputs, context: RankContext
) -> Callbacks:
    """Build the callbacks of one generation."""
    state, exporter, recorder = components.state, components.exporter, outputs.recorder
    emit = recorder.events.write if recorder else _nothing
    digests = DigestFiles.of_this_process()
    return Callbacks(
        mfu=RecordMfu(components.flops) if components.flops else None,
        replicas=ReplicaCheck(
            config.train.replica_check_every,
            config.checkpoint.every,
            state,
            emit,
            context.mesh.grid,
        )
        if config.train.replica_check_every
        else None,
        export=Export(exporter, outputs.failed_at, state.progress.step) if exporter else None,
        stragglers=DetectStragglers(
            config.telemetry,
            state.progress.step,
            components.exchange,
            Destinations(exporter, recorder.ranks if recorder else None, emit),
            context,
            assign_by_speed=config.batch.deal == "speed",
        )
        if config.telemetry.exchange_every
        else None,
        evaluate=Evaluate(
            config.eval,
            build_passes(config, components, context),
            ValidationData(
                components.datasets.validation,
                config.seed,
                components.loading(),
                components.buckets.validation,
            ),
            context,
            components.ema,
            emit,
        )
        if config.eval.every and components.datasets.validation is not None
        else None,
        own=[OwnCallback(own) for own in (optional(components.task, "callbacks") or list)()],
        borrowed=CountBorrowed(recorder.borrowed) if recorder else None,
        log=LogMetrics(
            recorder.metrics if recorder else None,
            outputs.recent,
            recorder.generation if recorder else _nothing,
            recorder.sinks if recorder else (),
            # With batch.max_tokens, the samples themselves count their tokens.
            None if config.batch.max_tokens else optional(components.task, "units"),
        ),
        checkpoint=SaveCheckpoints(
            config.checkpoint,
            config.preempt.grace_seconds,
            build_saving(components, outputs, context),
            context.timer,
            punctual=config.train.spike.action == "rollback",
        ),
        snapshot=KeepCommonState(components.snapshot) if components.snapshot else None,
        copies=_build_copies(components, context),
        profile=Profile(
            config.profile,
            outputs.directory.profile,
            state.progress.step,
            components.exchange,
            context,
        )
        if config.profile.steps is not None
        else None,
        digests=RecordDigests(digests, state, context, outputs.hosts_changed)
        if digests is not None
        else None,
        end=_build_end(outputs, config.preempt.grace_seconds),
    )


def _build_end(outputs: Outputs, grace_seconds: float) -> StopBeforeEnd | None:
    if outputs.job is None or outputs.recorder is None:
        return None
    writer, (job, stop) = outputs.recorder.writer, outputs.job
    save_seconds = writer.expected_seconds if writer else lambda: 0.0
    return StopBeforeEnd(partial(seconds_left, job), save_seconds, grace_seconds, stop)


def _build_copies(components: RunComponents, context: RankContext) -> KeepCopies | None:
    """Begin to keep copies of shards, if configured; every rank calls it."""
    state, agreement = components.state, components.agreement
    found = components.strategy.copies(state)
    if found is None or agreement is None:
        return None
    from hvdtrain.engine.callbacks.copies import KeepCopies, export

    copies, shard = found
    if components.exporter is not None:
        export(components.exporter, copies)
    config, step = components.config.checkpoint.memory, state.progress.step
    return KeepCopies(config, copies, shard, agreement, context, step)


def build_saving(components: RunComponents, outputs: Outputs, context: RankContext) -> Saving:
    """Build the objects with which this rank takes part in saves."""
    state, recorder, group = components.state, outputs.recorder, context.mesh.world
    if recorder is not None and group.rank == 0:  # a former rank 0 also has a recorder
        return Saving(state, group, recorder.writer, recorder.bring_to_disk)
    writer = None
    if group.rank == 0:
        writer = CheckpointWriter(NoFiles())
    elif state.of_scope("local", "sharded"):
        directory = outputs.directory
        writer = CheckpointWriter(FilesOfRank(directory.checkpoints, directory.ownership.recognize))
    return Saving(state, group, writer, _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    pass
