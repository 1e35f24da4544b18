"""Resumption of a run that no rank holds in memory: from a checkpoint, or from its start.

Also the return of all ranks to a checkpoint because of a loss spike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.format import Checkpoint
from hvdtrain.config import Config
from hvdtrain.data.files import FileFacts, files_of, first_change
from hvdtrain.engine.loop import Progress
from hvdtrain.engine.spikes import MOST_ROLLBACKS, Spike, rolled_back
from hvdtrain.errors import EXIT_NOT_FINITE, UserError, crash
from hvdtrain.log import logger
from hvdtrain.process.build import RunComponents, build_model
from hvdtrain.process.initial_weights import load_initial_weights
from hvdtrain.process.recorder import PersistentState
from hvdtrain.process.takeover import take_over
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import AgreedError, broadcast_json, on_all_ranks
from hvdtrain.runtime.mesh import Group, Mesh, Topology
from hvdtrain.runtime.tensor_shards import model_tensors
from hvdtrain.tasks import Datasets


def resume(
    config: Config, components: RunComponents, persistent: PersistentState, topology: Topology
) -> None:
    """Give all ranks the state of the checkpoint that `run.resume` selects, or the initial state.

    Args:
        persistent: with an open run directory; rank 0's recorder has the checkpoints. If the ranks
            have trained (`newest`), the run continues from its own newest checkpoint.

    Raises:
        AgreedError: there is no such checkpoint, or it does not fit.
    """
    state, group = components.state, Mesh.replicated(topology).data
    if state.sharded is not None:
        state.sharded.begin(topology)
    logger.info("%s", components.prepared.resolved.describe_length())
    for note in components.datasets.notes:
        logger.info("%s", note)
    directory = on_all_ranks("resume", lambda: _load(config, components, persistent, group))
    persistent.initial = False
    _share(config, components, directory, group)


def roll_back(
    config: Config,
    components: RunComponents,
    persistent: PersistentState,
    topology: Topology,
    before: Progress,
) -> bool:
    """Return all ranks to the run's newest checkpoint; its later samples so far are passed over.

    Checkpoints that were written for another reason than `checkpoint.every` count only if there is
    no other one: the curve must not depend on when the run was stopped.

    Args:
        persistent: as in `resume`.
        before: progress of the state whose last step was a spike.

    Returns:
        False, on all ranks: there is no checkpoint, and no state has changed.

    Raises:
        AgreedError: exit code 3, the run has returned to this checkpoint too often.
    """
    assert before.spike is not None
    spike, group = Spike(**before.spike), Mesh.replicated(topology).data
    found = _newest(config, persistent) if topology.rank == 0 else None
    to = broadcast_json(found.state["step"] if found else None, "spike.checkpoint")
    if to is None:
        return False
    where = f"step {spike.step}: loss {spike.loss:.4f} is a spike (limit {spike.limit:.4f})"
    if sum(one[0] == to for one in before.rollbacks) >= MOST_ROLLBACKS:
        components.state.progress.step = spike.step - 1  # the last one with a line of metrics
        raise AgreedError(
            f"{where}, and the run has returned to the checkpoint of step {to} {MOST_ROLLBACKS} "
            "times already (train.spike.action rollback); lower optim.lr, raise "
            "train.spike.factor, or use train.spike.action skip",
            EXIT_NOT_FINITE,
            rank=0,
        )
    persistent.trained = False
    state = components.state
    if state.sharded is not None:
        state.sharded.begin(topology)

    stream = components.prepared.stream
    reached = stream.position if stream is not None else None

    def restore() -> Path | None:
        directory = _restore(components, persistent, found)
        if stream is not None and reached is not None and reached.samples == before.samples:
            stream.keep(reached)  # else the samples that are passed over are read again
        if directory is not None and persistent.recorder is not None:
            persistent.recorder.leave_later_checkpoints(to)
        return directory

    directory = on_all_ranks("resume", restore)
    _share(config, components, directory, group)
    progress = state.progress
    first, progress.samples = progress.samples, before.samples
    progress.rollbacks = rolled_back(before.rollbacks, to, spike.step)
    progress.spikes = before.spikes
    if topology.rank == 0:
        logger.warning(
            "%s: back to the checkpoint of step %d; samples %d to %d of the order are passed over",
            where,
            to,
            first,
            progress.samples - 1,
        )
    return True


def _newest(config: Config, persistent: PersistentState) -> Checkpoint | None:
    """Return the newest intact checkpoint on rank 0."""
    recorder = persistent.recorder
    if recorder is None:
        return None
    with heartbeat.HEARTBEAT.waiting():
        recorder.wait_for_save()
    try:
        return recorder.choose(config.run.resume, begun=True, every=config.checkpoint.every)
    except UserError as error:
        logger.warning("%s", error)
        return None


def _share(config: Config, components: RunComponents, directory: Path | None, group: Group) -> None:
    """Give all ranks the state that rank 0 has loaded, and load the parts of each rank."""
    state = components.state
    state.broadcast(root=0)
    if state.of_scope("local", "sharded"):
        name = broadcast_json(str(directory.absolute()) if directory else "", "resume.directory")
        own = Path(name) if name else None
        on_all_ranks("resume.local", lambda: _load_own(config, components, own, group))


def _load_own(
    config: Config, components: RunComponents, directory: Path | None, group: Group
) -> None:
    """Load state that is not replicated, on every rank."""
    state = components.state
    state.load_local(directory, group)
    if directory is not None:
        state.read_shards(directory)
    elif state.spanned and config.run.init_from is not None:
        from hvdtrain.parallel.spanned import take_over

        # The whole model for a moment, as before the ranks took their shards.
        whole = build_model(components.task, config, components.device)
        load_initial_weights(whole, config.run.init_from, config.run.init_strict)
        take_over(state.model, model_tensors(whole))


def _load(
    config: Config, components: RunComponents, persistent: PersistentState, group: Group
) -> Path | None:
    """Load the replicated state on rank 0; return the checkpoint's directory, if there is one."""
    lost = persistent.newest is not None
    recorder = persistent.recorder
    if lost and recorder is not None:  # it may be writing one now
        with heartbeat.HEARTBEAT.waiting():
            recorder.wait_for_save()
    if recorder is None and group.rank == 0:
        raise crash(f"{persistent.directory.path}: the disk of the run directory is not mounted")
    checkpoint = recorder.choose(config.run.resume, lost) if recorder else None
    if persistent.newest is not None and group.rank == 0:
        _say_lost(components, checkpoint, persistent.newest)
    if checkpoint is not None:
        if persistent.initial:
            _check_data_files(persistent.directory.known_data_files(), components.datasets)
        return _restore(components, persistent, checkpoint)
    if (lost or not persistent.initial) and group.rank == 0:
        # The model holds part of a state whose source died, or an abandoned state. A model that
        # spans ranks has just been rebuilt for the current ranks.
        whole = components.strategy.holds_whole_model
        model = build_model(components.task, config, components.device) if whole else None
        components.state.start_over(model)
    if config.run.takeover is not None and group.rank == 0:
        take_over(components, config.run.takeover)
    if config.run.init_from is not None and group.rank == 0 and not components.state.spanned:
        load_initial_weights(components.state.model, config.run.init_from, config.run.init_strict)
    return None


def _restore(
    components: RunComponents, persistent: PersistentState, checkpoint: Checkpoint | None
) -> Path | None:
    """Load the replicated state from a checkpoint; return its directory."""
    if checkpoint is None:
        return None
    components.state.load(checkpoint)
    step, recorder = components.state.progress.step, persistent.recorder
    logger.info("resumed from the checkpoint of step %d", step)
    if recorder is not None and recorder.writer is not None:  # later saves no longer count
        recorder.writer.taken_step = min(recorder.writer.taken_step, step)
    return checkpoint.directory


def _check_data_files(known: Sequence[Sequence[Any]], datasets: Datasets) -> None:
    """Raise UserError, which names it, if a file of the data has changed since the last start."""
    now = files_of(datasets.fingerprint)
    fields = len(FileFacts._fields)
    before = [FileFacts(*file) for file in known if len(file) == fields]
    change = first_change(before, now) if before and now else None
    if change is not None:
        raise UserError(
            f"the training data is not that of the run's last start: {change}; restore it, or use "
            "another run.id"
        )


def _say_lost(components: RunComponents, checkpoint: Checkpoint | None, newest: int) -> None:
    where = (
        f"to the checkpoint of step {checkpoint.state['step']}" if checkpoint else "to its start"
    )
    if not components.strategy.holds_whole_model:
        what, advice = "shards of the model", "with two replicas, two ranks hold each shard"
    elif components.state.sharded is not None:
        what = "shards of the optimizer's state"
        advice = "parallel.shard.copies 2 keeps each shard on two ranks"
    else:
        what, advice = "the state", "more frequent checkpoints (checkpoint.every) lose less"
    logger.warning(
        "lost ranks held %s that no other rank has: from step %d the run returns %s; %s",
        what,
        newest,
        where,
        advice,
    )
