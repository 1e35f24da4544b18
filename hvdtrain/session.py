"""One run from start to end on this rank: find the others, load, train, say what came out.

Whatever may fail on one rank and not on the others (reading data, making folders, loading a
checkpoint) runs inside `_alike`: all ranks end alike, and one says why.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from horovod.common.exceptions import HorovodInternalError

from hvdtrain import build, log
from hvdtrain.checkpoint.format import Checkpoint, read
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.config import Settings
from hvdtrain.engine.loop import Loop
from hvdtrain.engine.run_folder import RunFolder, default_id
from hvdtrain.engine.state import RunState
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError, agree, broadcast_json, gather_json
from hvdtrain.runtime.failure import end_all
from hvdtrain.runtime.init import choose_device, initialise
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Datasets, Task, optional
from hvdtrain.telemetry.exporter import write_targets
from hvdtrain.telemetry.metrics_file import MetricsFile

T = TypeVar("T")


def run(settings: Settings) -> int:
    """Trains as configured.

    Returns:
        The exit code, the same on every rank. A crash does not return: it ends the process.

    Raises:
        UserError: Horovod cannot start; every rank raises it.
    """
    stop = StopFlag()
    stop.install()
    topology = initialise()
    try:
        return _train(settings, topology, stop)
    except AgreedError as error:
        if error.rank == topology.rank:
            where = "" if error.rank == 0 else f"rank {error.rank} on {topology.host}: "
            print(f"hvdtrain: error: {where}{error}", file=sys.stderr, flush=True)
        with suppress(HorovodInternalError):
            gather_json(None, "told")  # nobody ends before the message is out
        return error.exit_code
    except BaseException as error:
        end_all(error, topology)
    finally:
        log.close()


def _alike(name: str, part: Callable[[], T]) -> T:
    """Runs a part that may fail on some ranks; then all go on, or none does.

    Raises:
        AgreedError: some rank's part raised UserError.
    """
    result, failure = None, None
    try:
        result = part()
    except UserError as error:
        failure = error
    agree(failure, name)
    return result  # type: ignore[return-value]


def _train(settings: Settings, topology: Topology, stop: StopFlag) -> int:
    config, first = settings.config, topology.rank == 0
    _alike("same configuration", lambda: _check_same_configuration(settings, topology))
    run_id = broadcast_json(config.run.id or default_id(config.task), "run.id")
    folder = RunFolder(Path(config.run.root) / run_id)
    manager = CheckpointManager(folder.checkpoints, config.checkpoint.keep) if first else None
    _alike("folder", lambda: _open_folder(settings, folder, topology))
    logger.info("run %s on %s", folder.path, topology.describe())

    device = _alike("device", lambda: choose_device(topology))
    task, datasets = _alike("data", lambda: _load_data(settings))
    _alike("same data", lambda: _check_same(datasets, topology))
    state, exchange = build.build_state(task, config, device, datasets)
    _alike("resume", lambda: _resume(config.run.resume, state, manager))
    state.broadcast()

    exporter = _alike("telemetry", lambda: build.build_exporter(config, topology, run_id))
    target = (topology.host, topology.local_rank, exporter.port if exporter else 0)
    targets = gather_json(target, "targets")
    open_records: Callable[[], MetricsFile | None] = _nothing
    if manager is not None:
        start = _this_start(settings, topology, state)
        manifest = build.build_manifest(
            settings, topology, device, datasets.fingerprint, [*folder.starts(), start]
        )
        open_records = partial(_open_records, settings, folder, manager, manifest, state, targets)
    metrics = _alike("records", open_records)
    callbacks = build.build_callbacks(
        config, task, datasets, state, topology, device, manager, metrics, exporter
    )
    loop = build.build_loop(
        config, task, datasets, state, exchange, topology, device, callbacks, stop
    )
    try:
        loop.run()
    finally:
        for callback in callbacks.as_list():
            callback.close()
    _alike("last checkpoint", lambda: _check_saved(callbacks))
    if first:
        folder.targets.unlink(missing_ok=True)  # a crash leaves it: Prometheus then shows the loss
        _summary(loop, callbacks, task, state, folder)
    gather_json(None, "done")  # the launcher takes the first end of a rank for the end of all
    return EXIT_PREEMPTED if loop.preempted else 0


def _open_folder(settings: Settings, folder: RunFolder, topology: Topology) -> None:
    if topology.rank == 0:
        folder.prepare(fresh=settings.config.run.resume == "never")
        log.to_screen()
    try:
        log.to_file(folder.logs, topology.rank, topology.host)
    except OSError as error:
        raise UserError(f"{folder.logs}: cannot be written ({error.strerror})") from None


def _load_data(settings: Settings) -> tuple[Task, Datasets]:
    task = build.build_task(settings)
    return task, build.build_datasets(task, settings.config)


def _check_same_configuration(settings: Settings, topology: Topology) -> None:
    """A host with another YAML file or task would run another loop."""
    mine = sha256(settings.resolved.encode()).hexdigest()
    if mine != broadcast_json(mine, "configuration"):
        raise UserError(
            f"the configuration here is not that of rank 0 on {topology.hosts[0]}: compare the "
            "files that --config names, and hvdtrain's version, on the two hosts"
        )


def _check_same(datasets: Datasets, topology: Topology) -> None:
    """Every rank must have rank 0's data: a sample is a number here."""
    mine = [len(datasets.train), datasets.fingerprint]  # type: ignore[arg-type]
    theirs = broadcast_json(mine, "fingerprint")
    if mine != theirs:
        raise UserError(
            f"the training data here ({mine[0]} samples, fingerprint {mine[1]}) is not the data of "
            f"rank 0 on {topology.hosts[0]} ({theirs[0]} samples, fingerprint {theirs[1]})"
        )


def _resume(choice: str, state: RunState, manager: CheckpointManager | None) -> None:
    """Rank 0 decides and loads; the others get it by broadcast."""
    if manager is None or choice == "never":
        return
    checkpoint: Checkpoint | None
    path = Path(choice)
    if choice != "auto" and not path.is_dir():
        raise UserError(
            f"run.resume {choice}: auto, never or the folder of a checkpoint is expected"
        )
    of_this_run = path.resolve().parent == manager.root.resolve()
    if choice == "auto" or (manager.finished() and not of_this_run):
        # A checkpoint of another run is where this one began; it has gone on since.
        checkpoint = manager.newest()
    else:
        checkpoint = read(path)
    if checkpoint is not None:
        state.load(checkpoint)
        logger.info("resumed from the checkpoint of step %d", state.progress.step)


def _this_start(settings: Settings, topology: Topology, state: RunState) -> dict[str, Any]:
    return {
        "time": time.time(),
        "step": state.progress.step,
        "world_size": topology.world_size,
        "hosts": topology.ranks_by_host(),
        "config": settings.resolved,
    }


def _nothing() -> None:
    """What the other ranks do meanwhile."""


def _open_records(
    settings: Settings,
    folder: RunFolder,
    manager: CheckpointManager,
    manifest: dict[str, Any],
    state: RunState,
    targets: list[tuple[str, int, int]],
) -> MetricsFile:
    """Rank 0 writes what says how the run was started; nothing is changed before this."""
    try:
        folder.write_config(settings.resolved)
        folder.write_manifest(manifest)
        manager.set_aside(after=state.progress.step)
        folder.targets.unlink(missing_ok=True)
        if settings.config.telemetry.port:
            write_targets(folder.targets, folder.path.name, targets)
        return MetricsFile(folder.metrics, after=state.progress.step)
    except OSError as error:
        raise UserError(f"{folder.path}: cannot be written ({error.strerror})") from None


def _check_saved(callbacks: build.Callbacks) -> None:
    error = callbacks.checkpoint.error
    if error is not None:
        failure = UserError(f"the last checkpoint could not be written: {error}")
        failure.exit_code = EXIT_CRASH
        raise failure


def _summary(
    loop: Loop, callbacks: build.Callbacks, task: Task, state: RunState, folder: RunFolder
) -> None:
    """Rank 0's last lines: what the model learnt, and where everything is."""
    if loop.preempted:
        logger.info("asked to stop after step %d; a checkpoint is written", loop.progress.step)
    last: dict[str, Any] = callbacks.log.last
    if not last:
        logger.info("step %d of %d was done already", loop.progress.step, loop.train.steps)
    sample = optional(task, "sample")
    if sample is not None and not loop.preempted:
        state.model.eval()
        with torch.no_grad():
            print(f"\n{sample(state.model)}\n", flush=True)
    for name, key in (("final train loss", "loss"), ("final validation loss", "validation_loss")):
        if key in last:
            logger.info("%s %.4f", name, last[key])
    if loop.progress.nonfinite:
        logger.warning("%d steps were skipped: gradient not finite", loop.progress.nonfinite)
    logger.info("files of this run: %s", folder.path)
