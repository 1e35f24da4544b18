"""One run from start to end on this rank.

    prepare: device, data, model, optimizer, exporter       once in a process
    a generation: rendezvous, take over the state, train    once; in an elastic run again
             whenever ranks have died, or processes join or leave

Whatever may fail on one rank and not on the others (reading data, making folders, loading a
checkpoint) runs inside `on_all_ranks`: all ranks end alike, and one says why. In an elastic run a
process prepares on its own, as a world of one rank, before it joins the others: these train on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdtrain import build, log
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.config import Settings
from hvdtrain.elastic import watchdog
from hvdtrain.elastic.failures import HAND_OVER, RENDEZVOUS, TRAINING, ProcessStatus
from hvdtrain.elastic.identity import Identity, other_configuration
from hvdtrain.elastic.kept_watchdog import KeptWatchdog
from hvdtrain.elastic.membership import LostError, Membership, RefusedError, RemovedError
from hvdtrain.elastic.state import RankStatus, all_equal, most_advanced
from hvdtrain.engine.loop import Loop, MembershipChanged
from hvdtrain.engine.modes import evaluating
from hvdtrain.engine.owner_token import Claim
from hvdtrain.engine.run_folder import RunFolder, default_id
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.horovod_wheel import recipe
from hvdtrain.log import logger
from hvdtrain.recorder import RunRecorder
from hvdtrain.runtime import environment, heartbeat
from hvdtrain.runtime.collectives import AgreedError, agree, broadcast_json, gather_json
from hvdtrain.runtime.failure import abort_all_ranks, force_exit
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.init import choose_device, initialise
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.terminal import terminal
from hvdtrain.runtime.topology import Topology
from hvdtrain.tasks import Datasets, Task, optional
from hvdtrain.telemetry.exporter import Target, write_targets
from hvdtrain.telemetry.trackers import check_packages

T = TypeVar("T")

_MAX_FAILED_RENDEZVOUS = 20
_LONGEST_MESSAGE = 1000
# For a launcher to show what it is given, before what is written to its terminal directly.
_FORWARD_SECONDS = 0.3
# For a save in progress where the ranks end by an error; it is lost if it takes longer.
_LAST_SAVE_SECONDS = 10.0
# Beyond the 10 times elastic.hang_seconds of a watchdog: others wait for this one's verdict.
_PATIENCE = (10, 60.0)


def run(settings: Settings, stop: StopFlag, began: float) -> int:
    """Trains as configured.

    Args:
        stop: raised when this process is asked to stop.
        began: when the program was started, unix time.

    Returns:
        The exit code, the same on every rank. A crash does not return: it ends the process.

    Raises:
        UserError: Horovod cannot start; every rank raises it.
    """
    config = settings.config
    environment.prepare(
        timeout_seconds=config.elastic.timeout_seconds, timeline=config.profile.steps is not None
    )
    try:
        session = Session(settings, stop, began)
    except HorovodInternalError as error:
        raise _crash(f"Horovod could not be started: {error}") from None
    try:
        code = session.run()
    except AgreedError as error:
        topology = session.topology
        if error.rank == topology.rank and session.should_report_error():
            where = "" if error.rank == 0 else f"rank {error.rank} on {topology.host}: "
            print(f"hvdtrain: error: {where}{error}", file=sys.stderr, flush=True)
        with suppress(HorovodInternalError):
            gather_json(None, "told")  # nobody ends before the message is out
        code = error.exit_code
        session.emit_end(code)
        session.give_back()
    except BaseException as error:
        session.report(error)
        abort_all_ranks(error, session.topology)
    finally:
        log.close()
    if session.has_stuck_thread():
        force_exit(code)
    return code


def on_all_ranks(name: str, part: Callable[[], T]) -> T:
    """Runs a part that may fail on some ranks; then all continue, or none does.

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


class Failure(NamedTuple):
    """How a generation of an elastic run failed; None: it did not.

    Args:
        phase: of failures.py.
    """

    phase: str | None
    message: str = ""


class Session:
    """See the top of this file.

    Attributes:
        topology: the ranks of this generation.
    """

    def __init__(self, settings: Settings, stop: StopFlag, began: float) -> None:
        self._began = began
        self._began_clock = time.perf_counter()
        self._settings = settings
        self._config = settings.config
        self._stop = stop
        self._heartbeat = heartbeat.OWN
        self._number = environment.launched_rank()
        self._local_rank = environment.launched_local_rank()
        alone = environment.launched_size() in (None, 1) and not environment.elastic()
        self._membership = Membership.of_this_process(stop)
        self._watchdog: KeptWatchdog | None = None
        if not alone:
            launcher = self._membership.launcher if self._membership else ""
            line = self._membership.line if self._membership else None
            hang_seconds = self._config.elastic.hang_seconds
            self._watchdog = KeptWatchdog(
                partial(watchdog.start, self._heartbeat, hang_seconds, launcher, self._number, line)
            )
            if line is not None:
                line.listen(hvd.abort)
        self._run_id = self._config.run.id or default_id(self._config.task)
        self._claim = Claim.of_this_process()
        self._folder = RunFolder(Path(self._config.run.root) / self._run_id)
        self._folder.ownership.look()  # while all else is prepared, its owner may show life
        self._trained = False
        self._phase = RENDEZVOUS
        self._initial = True  # the state is still what the seed gives
        self._logs_as: Topology | None = None  # of the generation whose log is open
        self._recorder: RunRecorder | None = None
        self.topology = initialise()

    def run(self) -> int:
        """Returns the exit code; raises as the function `run` says, and HorovodInternalError."""
        self._prepare()
        try:
            if self._membership is None:
                code = self._generation("launch", self._began)
            else:
                code = self._generations(self._membership)
        finally:
            if self._components.exporter is not None:
                self._components.exporter.close()
            if self._recorder is not None:
                self._recorder.close()
        self.give_back()
        return code

    def should_report_error(self) -> bool:
        """Whether an error that the ranks of this generation share is this process's to tell.

        Processes that prepare alone may all find the same mistake: the first of them tells it,
        whereupon the launcher ends the others.
        """
        alone = self._membership is not None and self.topology.world_size == 1
        return not (alone and self._number > 0 and self._stop.raised_by_launcher())

    def report(self, error: BaseException) -> None:
        """Tells an elastic launcher of an error of this process's own, which is about to end it."""
        if self._membership is None or isinstance(error, (HorovodInternalError, KeyboardInterrupt)):
            return
        step = self._components.state.progress.step + 1 if self._phase == TRAINING else None
        where = f"rank {self.topology.rank} on {self.topology.host}"
        self._membership.report(
            f"{where}: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE], step
        )

    def has_stuck_thread(self) -> bool:
        """Whether this process would not end by itself."""
        return self._recorder is not None and self._recorder.sink_stuck

    def emit_end(self, exit_code: int) -> None:
        """Writes the ledger's line of an end that the ranks agreed on."""
        if self._recorder is not None:
            self._recorder.events.write(
                "end", step=self._components.state.progress.step, exit_code=exit_code
            )

    def give_back(self) -> None:
        """The run is free for the next start; a crash does not say so."""
        if self._recorder is not None and self._recorder.writer is not None:
            # Where the ranks end by an error they agreed on, nobody has waited for it yet.
            self._recorder.writer.wait(time.monotonic() + _LAST_SAVE_SECONDS)
        self._folder.ownership.release()

    # --- once in a process -------------------------------------------------

    def _prepare(self) -> None:
        config = self._config
        if self._membership is not None:
            on_all_ranks("launcher", partial(_check_elastic, self._membership))
        on_all_ranks("same configuration", self._check_same_configuration)
        elastic = self._membership is not None
        if not elastic:
            on_all_ranks("profile", self._check_profiled_ranks)
        device_index = self._local_rank if elastic else None
        device = on_all_ranks("device", lambda: choose_device(self.topology, device_index))
        timer = build.build_timer(self._began_clock, device)
        task, datasets = on_all_ranks("data", self._load_data)
        model = on_all_ranks("model", lambda: build.build_model(task, config, device))
        state, exchange = build.build_state(model, config, datasets, elastic)
        on_all_ranks("sinks", partial(check_packages, config.telemetry))
        exporter = on_all_ranks(
            "telemetry",
            lambda: build.build_exporter(config, self._local_rank, device, timer, exchange),
        )
        self._components = build.RunComponents(
            task, datasets, device, state, exchange, self._heartbeat, timer, exporter
        )

    def _load_data(self) -> tuple[Task, Datasets]:
        task = build.build_task(self._settings)
        return task, build.build_datasets(task, self._config)

    def _check_same_configuration(self) -> None:
        """A host with another YAML file or task would run another loop."""
        if self._digest() != broadcast_json(self._digest(), "configuration"):
            raise UserError(other_configuration(self.topology.hosts[0]))

    def _check_profiled_ranks(self) -> None:
        """An elastic run may get the rank later, or lose it; any other never will."""
        size = self.topology.world_size
        named = self._config.profile.named_ranks or ()
        missing = sorted(rank for rank in named if rank >= size)
        if missing:
            raise UserError(
                f"profile.ranks names rank {missing[0]}, but the run's ranks are 0 to {size - 1}"
            )

    def _digest(self) -> str:
        return sha256(self._settings.resolved.encode()).hexdigest()

    # --- generations of an elastic run ------------------------------------------

    def _generations(self, membership: Membership) -> int:
        failed_at, failure = -1, Failure(None)
        cause, since = "launch", self._began
        while True:
            try:
                self._join(membership, failure)
            except RemovedError:
                return 0
            except RefusedError as refusal:
                print(f"hvdtrain: error: {refusal}", file=sys.stderr, flush=True)
                return EXIT_CRASH
            except LostError as error:
                raise _crash(f"the launcher does not answer any more ({error})") from None
            try:
                return self._generation(cause, since)
            except MembershipChanged:
                cause, since, failure = "hosts", time.time(), Failure(None)
            except HorovodInternalError as error:
                step, failure = (
                    self._components.state.progress.step,
                    Failure(self._phase, str(error)),
                )
                logger.warning("step %d failed: %s", step + 1, error)
                if cause != "failure" or step != failed_at:
                    cause, since = "failure", time.time()
                failed_at = step

    def _join(self, membership: Membership, failure: Failure) -> None:
        """Leaves the last generation, and is one of the next one's ranks then.

        Args:
            failure: how the last generation ended.

        Raises:
            RemovedError, RefusedError, LostError: as Membership.join.
            UserError: the ranks meet again and again without success.
        """
        for _ in range(_MAX_FAILED_RENDEZVOUS):
            with self._heartbeat.waiting():
                hvd.shutdown()
            self._components.exchange.abort()
            self._heartbeat.beat(Activity.RENDEZVOUS)
            membership.join(self._process_status(failure))
            self._phase = RENDEZVOUS
            try:
                with self._heartbeat.waiting():
                    self.topology = initialise()
            except HorovodInternalError as error:
                logger.warning("a rank died during the rendezvous, or cannot be reached: %s", error)
                failure = Failure(RENDEZVOUS, str(error))
            else:
                return
        raise _crash(
            f"the rendezvous failed {_MAX_FAILED_RENDEZVOUS} times in a row: can the hosts reach "
            "each other on all ports?"
        )

    def _process_status(self, failure: Failure) -> ProcessStatus:
        times, more = _PATIENCE
        return ProcessStatus(
            identity=self._identity(),
            trained=self._trained,
            step=self._components.state.progress.step,
            patience=times * self._config.elastic.hang_seconds + more,
            failed=failure.phase,
            message=failure.message[:_LONGEST_MESSAGE],
        )

    def _identity(self) -> Identity:
        made = self._components
        samples = len(made.datasets.train)  # type: ignore[arg-type]
        return Identity(made.device.type, self._digest(), samples, made.datasets.fingerprint)

    # --- one generation -----------------------------------------------------------

    def _generation(self, cause: str, since: float) -> int:
        """Meets, takes over the state and trains to the end, or to the next meeting.

        Args:
            cause: launch, failure, or hosts (processes came or went).
            since: when that was, unix time.
        """
        self._heartbeat.beat(Activity.PREPARING)
        self._phase = HAND_OVER
        source, targets = self._compare_ranks()
        topology, config = self.topology, self._config
        if self._components.exporter is not None:
            self._components.exporter.describe(build.run_facts(config))
        if self._folder.path.name != self._run_id:
            self._folder = RunFolder(Path(config.run.root) / self._run_id)
        folder = self._folder
        self._take_over(source, folder)
        on_all_ranks("recorder", lambda: self._open_records(folder, targets, cause))
        self._emit_start(cause, since, source)
        recorder = self._recorder
        callbacks = build.build_callbacks(
            config,
            self._components,
            topology,
            recorder,
            folder,
            since if cause == "failure" else None,
        )
        loop = build.build_loop(
            config, self._components, topology, callbacks, self._stop, self._membership
        )
        if cause != "launch" and topology.rank == 0:
            seconds = time.time() - since
            logger.info("resumed after step %d, %.2f s later", loop.progress.step, seconds)
        self._phase = TRAINING
        try:
            loop.run()
        finally:
            for callback in callbacks.as_list():
                callback.close()
        self._heartbeat.beat(Activity.PREPARING)
        on_all_ranks("last checkpoint", lambda: _check_saved(callbacks))
        if recorder is not None and recorder.writer is not None:
            _summary(loop, callbacks, recorder.writer, self._components, folder)
        code = EXIT_PREEMPTED if loop.preempted else 0
        if self._components.exporter is not None and code == 0:
            with self._heartbeat.waiting():
                self._components.exporter.linger(
                    config.telemetry.linger_seconds, lambda: self._stop.raised
                )
        if recorder is not None:
            with self._heartbeat.waiting():
                recorder.end_sinks(code)
            folder.remove_targets()  # a crash leaves them: Prometheus shows the loss
        self.emit_end(code)
        gather_json(None, "done")  # the launcher takes the first end of a rank for the end of all
        return code

    def _compare_ranks(self) -> tuple[int | None, list[Target]]:
        """Learns where all ranks stand: (the rank whose state counts or None, exporters)."""
        topology = self.topology
        status = RankStatus(self._trained, self._components.state.progress.step)
        port = self._components.exporter.port if self._components.exporter else 0
        facts = gather_json(
            {
                "status": asdict(status),
                "run": self._run_id,
                "identity": asdict(self._identity()),
                "target": Target(topology.host, self._local_rank, port),
            },
            "rendezvous",
        )
        self._statuses = [RankStatus(**fact["status"]) for fact in facts]
        source = most_advanced(self._statuses)
        theirs = facts[source or 0]
        if source is None:  # else the launcher has seen to it
            problem = self._identity().differs_from(
                Identity(**theirs["identity"]), topology.hosts[0]
            )
            on_all_ranks("same run", lambda: _refuse(problem))
        self._run_id = theirs["run"]
        return source, [Target(*fact["target"]) for fact in facts]

    def _open_folder(self, folder: RunFolder) -> None:
        """Opens this rank's log in it, and on rank 0 the folder; a second time in a generation it
        changes nothing."""
        topology = self.topology
        if self._logs_as == topology:
            return
        if topology.rank == 0 and self._recorder is None:
            fresh = self._config.run.resume == "never" and not self._someone_trained()
            if self._membership is not None:
                self._claim = Claim(self._membership.job, self._membership.generation)
            folder.prepare(fresh, self._claim, self._someone_trained())
            log.to_screen(terminal())
            self._recorder = build.build_recorder(self._config, folder)
        log.close_files()
        try:
            log.to_file(folder.logs, topology.rank, topology.host)
            if self._watchdog is not None:
                name = f"hang_{topology.host}_{self._local_rank}.txt"
                self._watchdog.write_to(folder.logs / name)
        except OSError as error:
            if not self._someone_trained():
                raise UserError(f"{folder.logs}: cannot be written ({error.strerror})") from None
            logger.error(
                "%s: cannot be written (%s); training continues", folder.logs, error.strerror
            )
        self._logs_as = topology
        logger.info("run %s on %s", folder.path, topology.describe())

    def _someone_trained(self) -> bool:
        return any(status.trained for status in self._statuses)

    def _take_over(self, source: int | None, folder: RunFolder) -> None:
        """Every rank holds the state that counts then; all decide alike, from `_compare_ranks`."""
        if source is None:
            on_all_ranks("resume", lambda: self._resume(folder))
            self._initial = False
            self._components.state.broadcast(root=0)
        elif not all_equal(self._statuses):
            # Half a new state is none, should a rank die meanwhile.
            self._trained = self._statuses[self.topology.rank] == self._statuses[source]
            self._initial = False
            self._components.state.broadcast(root=source)
        self._trained = True

    def _resume(self, folder: RunFolder) -> None:
        """Rank 0 decides and loads; the others get it by broadcast."""
        self._open_folder(folder)
        checkpoint = self._recorder.choose(self._config.run.resume) if self._recorder else None
        if checkpoint is not None:
            self._components.state.load(checkpoint)
            logger.info(
                "resumed from the checkpoint of step %d", self._components.state.progress.step
            )
        elif not self._initial and self.topology.rank == 0:
            # Half of a state whose source died, or of one that was left behind.
            made = self._components
            made.state.start_over(build.build_model(made.task, self._config, made.device))

    def _open_records(self, folder: RunFolder, targets: list[Target], cause: str) -> None:
        """Rank 0 writes what says how the run was started; nothing is changed before this."""
        self._open_folder(folder)
        if self._recorder is None:
            return
        recorder, config, step = self._recorder, self._config, self._components.state.progress.step
        tolerate_errors = self._someone_trained()
        start = {
            "time": time.time(),
            "step": step,
            "cause": cause,
            "world_size": self.topology.world_size,
            "hosts": self.topology.ranks_by_host(),
            "config": self._settings.resolved,
        }
        recorder.starts.append(start)
        manifest = build.build_manifest(
            self._settings,
            self.topology,
            self._components.device,
            self._components.datasets.fingerprint,
            recorder.starts,
        )
        resolved = self._settings.resolved
        try:
            recorder.describe(folder.config, lambda: folder.write_config(resolved), tolerate_errors)
            recorder.describe(
                folder.manifest, lambda: folder.write_manifest(manifest), tolerate_errors
            )
            if config.telemetry.port:
                recorder.describe(
                    folder.targets, lambda: self._write_targets(folder, targets), tolerate_errors
                )
            else:
                folder.remove_targets()
            recorder.open(step, self._components.exporter, tolerate_errors)
        except OSError as error:
            raise UserError(f"{folder.path}: cannot be written ({error.strerror})") from None

    def _write_targets(self, folder: RunFolder, targets: list[Target]) -> None:
        tls = bool(self._config.telemetry.tls_cert_file)
        write_targets(folder.targets, folder.path.name, targets, tls)
        folder.list_targets()

    def _emit_start(self, cause: str, since: float, source: int | None) -> None:
        if self._recorder is None:
            return
        progress, config = self._components.state.progress, self._config
        self._recorder.emit_start(
            cause=cause,
            step=progress.step,
            samples=progress.samples,
            world_size=self.topology.world_size,
            hosts=self.topology.ranks_by_host(),
            source="memory" if source is not None else "checkpoint" if progress.step else "new",
            seconds=time.time() - since,
            silent=self._membership.silent if self._membership else [],
            global_size=config.batch.global_size,
            micro_size=config.batch.micro_size,
            seed=config.seed,
            dataset_size=len(self._components.datasets.train),  # type: ignore[arg-type]
            fingerprint=self._components.datasets.fingerprint,
            total_steps=config.train.steps,
        )


def _check_elastic(membership: Membership) -> None:
    """Elastic runs need what the patches of hvdtrain's Horovod bring, and its own driver."""
    if not recipe.is_ours():
        raise UserError(
            "this Horovod was not built by hvdtrain, and an elastic run needs its patches: "
            "`hvdtrain horovod build --install`"
        )
    try:
        served = membership.served()
    except LostError as error:
        raise _crash(f"the launcher does not answer ({error})") from None
    if not served:
        raise UserError(
            "horovodrun cannot see that this is hvdtrain: let it start `python -m hvdtrain.train` "
            "itself, or set HVDTRAIN_ELASTIC=1 where a script starts it"
        )


def _crash(message: str) -> UserError:
    """An error that is reported like a user's mistake, but is none: trying again may help."""
    error = UserError(message)
    error.exit_code = EXIT_CRASH
    return error


def _refuse(problem: str) -> None:
    if problem:
        raise UserError(problem)


def _check_saved(callbacks: build.Callbacks) -> None:
    error = callbacks.checkpoint.error
    if error is not None:
        raise _crash(f"the last checkpoint could not be written: {error}")


def _summary(
    loop: Loop,
    callbacks: build.Callbacks,
    writer: CheckpointWriter,
    made: build.RunComponents,
    folder: RunFolder,
) -> None:
    """Rank 0's last lines: what the model learnt, and where everything is."""
    if loop.preempted:
        logger.info("asked to stop after step %d; %s", loop.progress.step, writer.newest())
    if writer.failures:
        logger.warning("%d checkpoints could not be written", writer.failures)
    last: dict[str, Any] = callbacks.log.last
    if not last:
        logger.info("step %d of %d was done already", loop.progress.step, loop.train.steps)
    sample = optional(made.task, "sample")
    if sample is not None and not loop.preempted:
        _show_sample(sample, made.state.model)
    for name, key in (("final train loss", "loss"), ("final validation loss", "validation_loss")):
        if key in last:
            logger.info("%s %.4f", name, last[key])
    if loop.progress.nonfinite:
        logger.warning("%d steps were skipped: gradient not finite", loop.progress.nonfinite)
    logger.info("files of this run: %s", folder.path)


def _show_sample(sample: Callable[[torch.nn.Module], Any], model: torch.nn.Module) -> None:
    """Prints what the trained model does. The run is finished, whatever goes wrong here."""
    try:
        with evaluating(model), torch.no_grad():
            text = str(sample(model))
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(f"\n{text.encode(encoding, 'replace').decode(encoding)}\n", flush=True)
        if terminal() not in (None, sys.stderr):
            time.sleep(_FORWARD_SECONDS)
    except Exception as error:
        logger.warning("the sample could not be shown (%s: %s)", type(error).__name__, error)
