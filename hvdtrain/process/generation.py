"""One generation of a run: the ranks agree on a source rank, receive its state, and train.

A run that is not elastic has exactly one generation.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.config import Settings
from hvdtrain.data.files import files_of
from hvdtrain.elastic.membership import Membership
from hvdtrain.elastic.status import STATE_TRANSFER, TRAINING, Identity, without_unseeded
from hvdtrain.engine.callbacks.evaluate import evaluating
from hvdtrain.engine.integrity import TensorHash
from hvdtrain.engine.loop import Interruptions, Loop, Progress, SpikeRollback, Step
from hvdtrain.engine.replay import ReplayActions
from hvdtrain.engine.spikes import Spike
from hvdtrain.engine.state import Snapshot, state_hash
from hvdtrain.errors import EXIT_PREEMPTED, UserError, crash
from hvdtrain.exchange.local_sgd import LocalSgd
from hvdtrain.log import logger
from hvdtrain.process.build import RunComponents, build_loop
from hvdtrain.process.callbacks import Callbacks, Outputs, build_callbacks
from hvdtrain.process.manifest import build_manifest, run_facts, start_facts
from hvdtrain.process.recorder import PersistentState, RunRecorder
from hvdtrain.process.resume import resume, roll_back
from hvdtrain.process.start_checks import check_hierarchical, raise_first
from hvdtrain.run_files.host_records import WRONG
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime.allocation import borrowed_since, slurm_job
from hvdtrain.runtime.collectives import gather_json, on_all_ranks, sum_
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.tensor_shards import local
from hvdtrain.runtime.terminal import terminal
from hvdtrain.tasks import optional
from hvdtrain.telemetry.config import LINGER_SECONDS
from hvdtrain.telemetry.exporter import ExporterAddress, write_targets
from hvdtrain.text import encodable, plural, styled
from hvdtrain.untrusted import printable_lines

_SEEN = 3  # last records of a start event, by which clocks of two hosts are compared
_OPTIMIZER_VALUES = 2  # per parameter, as AdamW keeps
# Interval of the turns while rank 0 waits for an upload, see `Generation._wait_for_mirror`.
_TURN_SECONDS = 1.0


@dataclass(frozen=True)
class Launched:
    """How this process was started.

    Args:
        digest: digest of the configuration, for the comparison with other ranks.
        local_rank: its local rank at its start; local ranks change in an elastic run.
        stop: raised when this process is asked to stop.
        membership: in an elastic run.
        finish: see Session.
    """

    settings: Settings
    digest: str
    local_rank: int
    stop: StopFlag
    membership: Membership | None
    finish: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Cause:
    """Why a generation begins.

    Args:
        name: launch, failure, hosts (processes joined or left), or spike (the run may return to a
            checkpoint because of a loss spike).
        since: unix time of the cause.
        number: of earlier generations of the same ranks.
    """

    name: str
    since: float
    number: int = 0


class Generation:
    """One generation, see the top of this file.

    Args:
        persistent: what this process keeps between generations; updated in place.
        topology: the ranks of this generation.
    """

    def __init__(
        self,
        launched: Launched,
        components: RunComponents,
        persistent: PersistentState,
        topology: Topology,
        cause: Cause,
    ) -> None:
        self._launched = launched
        self._config = components.config
        self._components = components
        self._persistent = persistent
        self._topology = topology
        self._cause = cause
        claim = str(self._claim() or persistent.claim)
        claim += f"-{cause.number}" if cause.number else ""
        self._context = components.context(topology, claim)
        self._statuses: list[RankStatus] = []
        self._spiked: Progress | None = None  # of the newest state, if its last step was a spike
        self._lost_step: int | None = None  # step whose state all its holders lost
        self._from_copies = False  # the state is from copies in memory
        self._job: str | None = None  # Slurm's, whose end is the run's
        self._borrowed: dict[str, float] = {}  # lent hosts, and since when (unix time)
        self._within_iterations = False  # some ranks of a script's own loop

    def steps(self) -> Generator[Step, None, int]:
        """Yield each step until the run's end; return the exit code.

        Raises:
            MembershipChanged, RankLostError, SpikeRollback: another generation follows.
            AgreedError: a rank cannot begin, or the run must end.
        """
        self._context.heartbeat.beat(Activity.PREPARING)
        check_hierarchical(self._config, self._topology)
        self._persistent.phase = STATE_TRANSFER
        source, targets = self._compare_ranks()
        if self._within_iterations:
            yield from self._finish_iterations()
        if self._components.exporter is not None:
            self._components.exporter.describe(run_facts(self._config))
        self._check_memory()
        source = self._take_over(source)
        on_all_ranks("recorder", lambda: self._open_recorder(targets))
        self._emit_start(source)
        return (yield from self._train())

    # --- state transfer -------------------------------------------------------

    def _compare_ranks(self) -> tuple[int | None, list[ExporterAddress]]:
        """Gather the status of all ranks.

        Returns:
            The rank whose state all ranks receive, or None if no rank has one; all exporters.
        """
        topology, components, persistent = self._topology, self._components, self._persistent
        progress, agreement = components.state.progress, components.agreement
        step = progress.step
        status = RankStatus(
            persistent.trained, step, agreement.reachable_step(step) if agreement else step
        )
        port = components.exporter.port if components.exporter else 0
        iteration = components.iteration
        identity = components.prepared.identity(self._launched.digest)
        facts = gather_json(
            {
                "status": asdict(status),
                "spiked": asdict(progress) if progress.spike is not None else None,
                "newest": persistent.newest,
                "copied": persistent.copied_step,
                "damaged": persistent.damaged_copies,
                "within": iteration is not None and iteration.after_block,
                "run": persistent.run_id,
                "lost_disk": persistent.directory.ownership.has_lost(),
                "identity": asdict(identity),
                "job": slurm_job(),
                "borrowed": borrowed_since(),
                "target": ExporterAddress(topology.host, self._launched.local_rank, port),
            },
            "rendezvous",
        )
        self._within_iterations = any(fact["within"] for fact in facts)
        persistent.lost_disk = any(fact["lost_disk"] for fact in facts)
        # ssh does not pass on the variable. The ranks of an elastic run may be in several jobs.
        jobs = {fact["job"] for fact in facts} - {None}
        several = self._launched.membership is not None and len(jobs) > 1
        self._job = None if several else next(iter(jobs), None)
        self._borrowed = {
            host: fact["borrowed"]
            for host, fact in zip(topology.hosts, facts, strict=True)
            if fact["borrowed"] is not None
        }
        statuses = [RankStatus(**fact["status"]) for fact in facts]
        newest = max((s.step for s in statuses if s.trained), default=-1)
        if agreement is not None and persistent.trained:
            agreement.catch_up(step, newest)
        self._statuses = [status.caught_up(newest) for status in statuses]
        # Not of `source`: a rank that has just caught up did not know of the spike.
        spiked = (f["spiked"] for f, s in zip(facts, statuses, strict=True) if s.trained)
        self._spiked = next((Progress(**one) for one in spiked if one is not None), None)
        known = [fact["newest"] for fact in facts if fact["newest"] is not None]
        persistent.newest = max([*known, newest]) if known or newest >= 0 else None
        self._from_copies = newest in (fact["copied"] for fact in facts)
        persistent.damaged_copies = sorted({copy for fact in facts for copy in fact["damaged"]})
        source = most_advanced(self._statuses)
        theirs = facts[source or 0]
        if source is None:  # otherwise the launcher has compared identities
            expected, *others = without_unseeded([Identity(**fact["identity"]) for fact in facts])
            host = topology.hosts[0]
            raise_first(["", *(own.differs_from(expected, host) for own in others)])
        known = [fact["run"] for fact in (theirs, *facts) if fact["run"] is not None]
        if not known:
            own = persistent.new_run_id() if topology.rank == 0 else None
            known = gather_json(own, "run")
        persistent.take_run_id(known[0])
        return source, [ExporterAddress(*fact["target"]) for fact in facts]

    def _finish_iterations(self) -> Generator[Step, None, None]:
        """Let the ranks that are within an iteration of a script's loop finish it first.

        Raises:
            RankLostError: another generation follows.
        """
        iteration, persistent = self._components.iteration, self._persistent
        assert iteration is not None
        persistent.phase = TRAINING
        self._context.heartbeat.beat(Activity.WORKING)
        yield from iteration.finish()
        iteration.wait_for_others()
        self._context.heartbeat.beat(Activity.PREPARING)
        persistent.phase = STATE_TRANSFER

    def _take_over(self, source: int | None) -> int | None:
        """Bring every rank to the same state; all ranks decide identically from the statuses.

        Returns:
            `source`; None if no rank could provide the state: it is from a checkpoint or new.
        """
        persistent, state = self._persistent, self._components.state
        if self._spiked is not None and self._roll_back(self._spiked):
            source, persistent.newest = None, None
        elif source is None or not self._receive(source):
            source, persistent.trained = None, False
            on_all_ranks("directory", self._open_directory)
            resume(self._config, self._components, persistent, self._topology)
        persistent.trained, state.progress.spike = True, None
        step = state.progress.step
        self._lost_step = persistent.newest if (persistent.newest or 0) > step else None
        persistent.newest = persistent.copied_step = None
        # Otherwise `resume` has logged the loss.
        if self._from_copies and self._topology.rank == 0:
            logger.warning(
                "lost ranks held shards of the model that no other rank has: the run continues "
                "from the copies in memory of step %d, and repeats %s",
                step,
                plural((self._lost_step or step) - step, "step"),
            )
        elif source is not None and self._lost_step is not None and self._topology.rank == 0:
            logger.warning(
                "the state of step %d is lost with the ranks that held it: the run continues from "
                "step %d",
                self._lost_step,
                step,
            )
        return source

    def _roll_back(self, before: Progress) -> bool:
        """Return to the newest checkpoint; False, on all ranks: the step is skipped instead."""
        on_all_ranks("directory", self._open_directory)
        if roll_back(self._config, self._components, self._persistent, self._topology, before):
            return True
        if self._topology.rank == 0:
            logger.warning(
                "step %d: there is no checkpoint to which the run could return from a loss spike "
                "(train.spike.action rollback); the step is skipped instead",
                before.step,
            )
        self._spiked = None
        return False

    def _receive(self, source: int) -> bool:
        """Send the state of rank `source` to every rank that does not hold it.

        If a rank dies meanwhile, each other rank holds its own state or the new one (see
        restore_consistent_state), or no state if it joined without one.

        Returns:
            False, on all ranks: a shard was lost with the ranks that held it.
        """
        persistent, components, topology = self._persistent, self._components, self._topology
        state, own, newest = components.state, self._statuses[topology.rank], self._statuses[source]
        # Shards have no older version: ranks that hold shards are never a step apart.
        if own.trained and own != newest and state.sharded is None:
            components.older = Snapshot(state, torch.device("cpu"))
            components.older.keep()
        persistent.trained = own == newest
        if not state.assign_shards(topology, newest.step):
            return False
        if not all_equal(self._statuses):
            persistent.initial = False
            state.broadcast(root=source)
        if own != newest:
            # This rank's residuals predate a step in which it may have taken part.
            state.drop_local()
        components.older = None
        return True

    def _someone_trained(self) -> bool:
        return any(status.trained for status in self._statuses)

    def _shard_bytes(self) -> int:
        """Size of a copy of this rank's shard for checkpoint.memory; 0: it keeps no copies."""
        state = self._components.state
        found = self._components.strategy.copies(state)
        if found is None:
            return 0
        size = sum(t.nbytes for t in found[1]().tensors.values())
        if not state.progress.step:  # the optimizer's state does not exist yet
            trained = self._components.exchange.parameters
            size += _OPTIMIZER_VALUES * sum(local(p).nbytes for p in trained)
        return size

    def _check_memory(self) -> None:
        """Check on all ranks of a new run that the hosts have the memory for copies of shards."""
        size = self._shard_bytes()
        if not size or self._someone_trained():
            return
        from hvdtrain.engine.callbacks.copies import check_memory

        config = self._config.checkpoint.memory
        on_all_ranks("checkpoint.memory", lambda: check_memory(config, self._topology, size))

    # --- the run on disk ------------------------------------------------------

    def _open_directory(self) -> None:
        persistent = self._persistent
        begun = persistent.newest is not None
        persistent.open_directory(self._topology, self._claim(), self._someone_trained(), begun)
        # Not before: the handlers of this rank's file and of the screen exist now.
        warning = self._launched.settings.warning
        if warning and persistent.initial and self._topology.rank == 0:
            logger.warning("%s", warning)

    def _claim(self) -> Claim | None:
        """Claim of this generation to the run directory; None if the run is not elastic."""
        membership = self._launched.membership
        return Claim(membership.job, membership.generation) if membership else None

    def _open_recorder(self, targets: list[ExporterAddress]) -> None:
        """Open the run directory and write config and manifest on rank 0.

        No file of the run changes before this.
        """
        self._open_directory()
        recorder = self._persistent.recorder
        if recorder is None:
            return
        directory, components, config = self._persistent.directory, self._components, self._config
        step, tolerate_errors = components.state.progress.step, self._someone_trained()
        resolved = self._launched.settings.resolved
        recorder.starts.append(
            {
                "time": time.time(),
                "step": step,
                "cause": self._cause.name,
                "world_size": self._topology.world_size,
                "hosts": self._topology.ranks_by_host(),
                "config": resolved,
            }
        )
        manifest = build_manifest(
            self._launched.settings,
            self._topology,
            components.device,
            components.datasets,
            recorder.starts,
            self._context.mesh.grid,
        )
        files = {
            directory.config: lambda: directory.write_config(resolved),
            directory.manifest: lambda: directory.write_manifest(manifest),
        }
        data_files = files_of(components.datasets.fingerprint)
        if data_files:
            files[directory.data_files] = lambda: directory.write_data_files(data_files)
        if config.telemetry.port:
            files[directory.targets] = lambda: self._write_targets(targets)
        else:
            directory.remove_targets()
        try:
            for path, write in files.items():
                recorder.describe(path, write, tolerate_errors)
            recorder.open(step, components.exporter, tolerate_errors)
        except OSError as error:
            raise UserError(f"{directory.path}: cannot be written ({error.strerror})") from None

    def _write_targets(self, targets: list[ExporterAddress]) -> None:
        directory, tls = self._persistent.directory, bool(self._config.telemetry.tls_cert_file)
        write_targets(directory.targets, directory.path.name, targets, tls, self._context.mesh.grid)
        directory.list_targets()

    def _emit_start(self, source: int | None) -> None:
        """Record this generation's start on every rank, because rank 0 may die before it writes it.

        Rank 0 writes all starts that are missing in events.jsonl.
        """
        state, membership = self._components.state, self._launched.membership
        hashed = source is not None and self._config.train.replica_check_every > 0
        spiked = self._spiked.spike if self._spiked is not None else None
        origin = "checkpoint" if state.progress.step else "new"
        if source is not None:
            origin = "memory_copy" if self._from_copies else "memory"
        damaged, self._persistent.damaged_copies = self._persistent.damaged_copies, []
        self._persistent.generations.append(
            {
                "time": time.time(),
                "claim": self._context.claim,
                "cause": self._cause.name,
                "source": origin,
                "seconds": time.time() - self._cause.since,
                "silent": membership.silent if membership else [],
                "residuals_lost": self._residuals_lost(source),
                "seen": [[r["step"], r["time"]] for r in [*self._persistent.recent][-_SEEN:]],
                **self._useful_ranks(),
                **({"borrowed": self._borrowed} if self._borrowed else {}),
                **({} if spiked is None else {"spike": Spike(**spiked).facts()}),
                **({} if self._lost_step is None else {"lost_step": self._lost_step}),
                **({"damaged_copies": damaged} if damaged else {}),
                **({"state_hash": state_hash(state, TensorHash())} if hashed else {}),
                **start_facts(self._components, self._topology),
            }
        )
        if self._persistent.recorder is not None:
            self._persistent.recorder.borrowed.hosts = self._borrowed
            self._persistent.recorder.emit_starts(self._persistent.generations)

    def _useful_ranks(self) -> dict[str, int]:
        """Most ranks that have work in a step; {}: any number, because each has its own batch."""
        if self._config.batch.per_rank_size:
            return {}
        replica = self._context.mesh.grid.replica_size
        return {"useful_ranks": self._config.batch.micro_batches * replica}

    def _residuals_lost(self, source: int | None) -> int:
        """Number of ranks of the last generation whose residuals (error feedback) are lost."""
        before, state = self._persistent.generations, self._components.state
        if source is None or not before or not state.of_scope("local"):
            return 0
        kept = self._statuses.count(self._statuses[source])
        return int(before[-1]["world_size"]) - kept

    # --- training -------------------------------------------------------------

    def _train(self) -> Generator[Step, None, int]:
        persistent, cause, context = self._persistent, self._cause, self._context
        failed = cause.name == "failure"
        membership = self._launched.membership
        interruptions = Interruptions(
            self._launched.stop,
            lambda: (
                membership is not None
                and (membership.hosts_changed or persistent.directory_returned)
            ),
            self._launched.finish,
        )
        outputs = Outputs(
            persistent.directory,
            persistent.recorder,
            cause.since if failed else None,
            persistent.recent,
            interruptions.membership_changed,
            (self._job, self._launched.stop) if self._job and self._topology.rank == 0 else None,
        )
        callbacks = build_callbacks(self._config, self._components, outputs, context)
        idle = context.mesh.data.size - self._config.batch.micro_batches
        if idle > 0 and self._topology.rank == 0:
            logger.info(
                "a step has %s for %s: %d without work; decrease batch.micro_size",
                plural(self._config.batch.micro_batches, "micro-batch", "micro-batches"),
                plural(context.mesh.data.size, "rank"),
                idle,
            )
        if cause.name == "launch" and self._topology.rank == 0 and (size := self._shard_bytes()):
            from hvdtrain.engine.callbacks.copies import log_memory

            log_memory(self._config.checkpoint.memory, self._topology, size)
        listed = callbacks.as_list()
        loop = build_loop(
            self._config,
            self._components,
            listed,
            interruptions,
            context,
            self._replay_actions(outputs.recorder),
        )
        if cause.name != "launch" and self._topology.rank == 0:
            seconds = time.time() - cause.since
            logger.info("resumed after step %d, %.2f s later", loop.progress.step, seconds)
        persistent.phase = TRAINING
        try:
            yield from loop.steps()
        except SpikeRollback:
            # The save in progress may be of the checkpoint to which the run returns.
            callbacks.checkpoint.wait()
            raise
        finally:
            loop.close()
        context.heartbeat.beat(Activity.PREPARING)
        on_all_ranks("last checkpoint", lambda: _check_saved(callbacks))
        if self._config.checkpoint.mirror is not None:
            self._wait_for_mirror(loop)
        if persistent.recorder is not None and persistent.recorder.writer is not None:
            log_summary(
                loop, callbacks, persistent.recorder.writer, self._components, persistent.directory
            )
        return self._finish(persistent.recorder, EXIT_PREEMPTED if loop.preempted else 0)

    def _replay_actions(self, recorder: RunRecorder | None) -> ReplayActions:
        membership, exporter = self._launched.membership, self._components.exporter
        actions = ReplayActions(
            exclude=partial(membership.leave, cause=WRONG) if membership is not None else None,
            requested=self._launched.settings.config.integrity.replay_every is not None,
        )
        if recorder is not None:
            actions = replace(actions, emit=recorder.events.write)
        if exporter is not None and self._topology.rank == 0:
            actions = replace(actions, count=exporter.replayed)
        return actions

    def _wait_for_mirror(self, loop: Loop) -> None:
        """Return when rank 0 has uploaded its checkpoints or given up; every rank calls it.

        Ranks take turns, as for the last checkpoint: one collective as long as an upload would look
        like a rank that does not respond.
        """
        recorder, config, stop = self._persistent.recorder, self._config, self._launched.stop
        mirror = recorder.mirror if recorder is not None and self._topology.rank == 0 else None
        began = time.monotonic()
        limit = began + config.checkpoint.mirror_wait_seconds
        if loop.preempted and config.preempt.grace_seconds:
            limit = min(limit, loop.asked_to_stop_at + config.preempt.grace_seconds)
        waits = mirror is not None and not mirror.wait(0.0)
        if mirror is not None and waits:
            logger.info("waiting up to %.0f s for the upload to %s", limit - began, mirror.url)
        while sum_(torch.tensor([int(waits)]), "mirror.waiting").item():
            if mirror is None or not waits:
                continue
            waits = not mirror.wait(_TURN_SECONDS)
            asked = stop.raised and not loop.preempted
            if waits and (asked or time.monotonic() >= limit):
                waits = False
                logger.warning(
                    "the upload to %s has not finished after %.0f s; %s",
                    mirror.url,
                    time.monotonic() - began,
                    mirror.describe(),
                )

    def _finish(self, recorder: RunRecorder | None, code: int) -> int:
        """Wait for scrapes, sinks and the other ranks; return the exit code."""
        heartbeat, exporter = self._context.heartbeat, self._components.exporter
        if exporter is not None and code == 0:
            with heartbeat.waiting():
                stop = self._launched.stop
                exporter.linger(LINGER_SECONDS, lambda: stop.raised)
        if recorder is not None:
            with heartbeat.waiting():
                recorder.end_sinks(code)
            # A crash keeps the targets, so that Prometheus shows the loss.
            self._persistent.directory.remove_targets()
            recorder.emit_end(self._components.state.progress.step, code)
        gather_json(None, "done")  # the launcher treats a rank's end as the end of all ranks
        return code


def restore_consistent_state(components: RunComponents) -> bool:
    """Restore a consistent state after a failure; no collective may be in progress.

    Ranks that step independently return to their last common state. A rank that has received a
    newer state only in part returns to its own older state.

    Returns:
        Whether this rank holds its own older state again.
    """
    diverged = isinstance(components.exchange, LocalSgd) and components.exchange.diverged
    if components.snapshot is not None and diverged:
        components.snapshot.restore()
        if components.iteration is not None:
            components.iteration.abandon()
    older, components.older = components.older, None
    if older is None:
        return False
    older.restore()
    step = components.state.progress.step
    logger.info("a newer state did not arrive: back at this rank's own state of step %d", step)
    return True


def _check_saved(callbacks: Callbacks) -> None:
    error = callbacks.checkpoint.error
    if error is not None:
        raise crash(f"the last checkpoint could not be written: {error}")


# --- the rank whose state all ranks resume from -------------------------------
#
# A state is one unit: tensors, progress and whatever else a step changes. On each rank a step
# changes all of it or nothing. After a failure some ranks may have taken one step more than others.
# The most advanced ranks all have the state that an undisturbed run has after that step. A rank
# keeps its own state, even if it is a step behind, until it has received a newer one completely.


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank in a rendezvous.

    Args:
        trained: it holds the state of this run; a new process does not.
        step: optimizer steps done.
        reachable_step: the step that it can reach by itself, see Agreement; default: `step`.
    """

    trained: bool
    step: int
    reachable_step: int | None = None

    def caught_up(self, newest: int) -> RankStatus:
        """Return the status after taking the pending step if another rank has taken that step."""
        step = newest if self.trained and self.reachable_step == newest else self.step
        return replace(self, step=step, reachable_step=None)


def most_advanced(statuses: Sequence[RankStatus]) -> int | None:
    """Return the lowest of the most advanced ranks; None if no rank has trained."""
    steps = [s.step if s.trained else -1 for s in statuses]
    return None if max(steps) < 0 else steps.index(max(steps))


def all_equal(statuses: Sequence[RankStatus]) -> bool:
    """Whether all ranks already hold the same state."""
    return all(s == statuses[0] and s.trained for s in statuses)


# --- final log lines of rank 0 ------------------------------------------------


# Time for a launcher to forward this output before output written directly to its terminal.
_FORWARD_SECONDS = 0.3
_VALUES = {
    "train loss": "loss",
    "validation loss": "validation_loss",
    "validation loss of the averaged weights": "ema_validation_loss",
}


def log_summary(
    loop: Loop,
    callbacks: Callbacks,
    writer: CheckpointWriter,
    components: RunComponents,
    directory: RunDirectory,
) -> None:
    """Log the final metrics, show a sample, and log the run directory; on rank 0."""
    if loop.preempted:
        logger.info("asked to stop after step %d; %s", loop.progress.step, writer.newest())
        if writer.last_saved_step:
            logger.info("start it again with --run.id %s to continue", directory.path.name)
    if writer.failures:
        logger.warning("%s could not be written", plural(writer.failures, "checkpoint"))
    last: dict[str, Any] = callbacks.log.last
    if not last:
        done, duration = loop.progress.step, loop.train.steps
        logger.info("nothing to do: the run has done %d of %d steps", done, duration)
    sample = optional(components.task, "sample")
    # Rank 0 alone cannot compute with a model that spans ranks.
    if sample is not None and not loop.preempted and components.strategy.holds_whole_model:
        with components.precision.autocast(components.device):
            _show_sample(sample, components.state.model)
    further = [key for key in last if key.startswith("validation_") and key not in _VALUES.values()]
    names = _VALUES | {key.replace("_", " "): key for key in further}
    when = "last" if loop.preempted else "final"
    for name, key in names.items():
        if key in last:
            logger.info("%s %s %.4f", when, name, last[key])
    if loop.progress.nonfinite:
        skipped = loop.progress.nonfinite
        were = "was" if skipped == 1 else "were"
        logger.warning("%s %s skipped: gradient not finite", plural(skipped, "step"), were)
    logger.info("files of this run: %s", directory.path)


def _show_sample(sample: Callable[[nn.Module], Any], model: nn.Module) -> None:
    """Print a sample of the trained model; no failure here fails the finished run."""
    try:
        with evaluating(model), torch.no_grad():
            text = sample(model)
        if text is None:
            return
        heading = "Sample output of the trained model:"
        if (
            terminal() is sys.stderr
        ):  # Open MPI gives ranks a terminal as stdout, whatever its own is
            heading = styled(heading, "bold")
        # Bytes and characters that the model generates must not control the terminal.
        print(f"\n{heading}\n{encodable(printable_lines(str(text)))}\n", flush=True)
        if terminal() not in (None, sys.stderr):
            time.sleep(_FORWARD_SECONDS)
    except Exception as error:
        logger.warning("the sample could not be shown (%s: %s)", type(error).__name__, error)
