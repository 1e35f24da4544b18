"""One run from start to end in this process.

    prepare: device, data (prepare.py)                 once per process
    build: model, optimizer, exporter (build.py)       once per process; once per generation if the
                                                       model spans ranks of an elastic run
    run a generation (generation.py)                   once; in an elastic run again whenever ranks
                                                       have died, join or leave

Operations that may fail on some ranks only (reading data, creating directories, loading a
checkpoint) run inside `on_all_ranks`: all ranks end together, and one reports the reason. In an
elastic run a process prepares alone, as a world of one rank, before it joins the other ranks, which
continue to train.

If a rank is lost, every other rank gets a RankLostError from its current collective. Without
elastic training this ends the run (`run`). In an elastic run the driver (elastic/driver.py) also
notifies the ranks, which abort their collectives at once (`_abort`). Each surviving rank then

1. shuts Horovod down, so that no collective writes into its state any more,
2. restores a complete state if necessary (generation.restore_consistent_state),
3. requests its ranks in the next generation from the driver (Rejoin),
4. agrees with the other ranks on a source rank, receives its state if it is newer, and continues
   to train (generation.py). New processes receive the state in the same way.

If no rank holds a complete state, the run continues from copies of shards in memory (strategy.py),
or from its newest checkpoint (resume.py). If processes only join or leave, all ranks end the
generation at a step boundary (MembershipChanged) and continue with item 3. If the run returns to a
checkpoint because of a loss spike (SpikeRollback, in any run), the same ranks begin another
generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import prod

import torch

from hvdtrain import log
from hvdtrain.config import Settings
from hvdtrain.data.config import BatchConfig
from hvdtrain.elastic import reach, watchdog
from hvdtrain.elastic.membership import (
    LostError,
    Membership,
    RefusedError,
    RemovedError,
    ReplacedError,
)
from hvdtrain.elastic.status import RENDEZVOUS, STATE_TRANSFER, TRAINING, ProcessStatus
from hvdtrain.elastic.watchdog import KeptWatchdog
from hvdtrain.engine.iteration import Iteration
from hvdtrain.engine.loop import MembershipChanged, SpikeRollback, Step
from hvdtrain.errors import EXIT_CRASH, crash
from hvdtrain.log import logger
from hvdtrain.process.build import RunComponents, build_components
from hvdtrain.process.data import build_datasets
from hvdtrain.process.generation import Cause, Generation, Launched, restore_consistent_state
from hvdtrain.process.prepare import Prepared, Start, prepare, prepare_environment
from hvdtrain.process.recorder import PersistentState
from hvdtrain.process.start_checks import agree_to_start, check_gpus
from hvdtrain.process.strategy import Strategy, build_strategy
from hvdtrain.runtime import environment, heartbeat, notices
from hvdtrain.runtime.collectives import AgreedError, RankLostError, gather_json, on_all_ranks
from hvdtrain.runtime.device import gpu_of
from hvdtrain.runtime.failure import abort_all_ranks, force_exit
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.init import abort_collectives, initialize, shut_down
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.streams import say
from hvdtrain.tasks import Task, optional
from hvdtrain.untrusted import printable_lines

_LONGEST_MESSAGE = 1000


def run(settings: Settings, stop: StopFlag, began: float) -> int:
    """Train as configured.

    Args:
        stop: raised when this process is asked to stop.
        began: unix time of the program's start.

    Returns:
        The exit code, the same on every rank. A crash does not return: it ends the process.

    Raises:
        UserError: Horovod cannot start; every rank raises it.
    """
    config = settings.config
    prepare_environment(config)
    try:
        session = Session(settings, stop, began)
    except RankLostError as error:
        raise crash(f"Horovod could not be started: {error}") from None
    try:
        code = run_steps(session.steps())
    except AgreedError as error:
        code = session.end_by_agreement(error)
    except BaseException as error:
        session.report(error)
        abort_all_ranks(error, session.topology)
    finally:
        log.close()
    if session.persistent.has_stuck_thread():
        force_exit(code)
    return code


def run_steps(steps: Generator[Step, None, int]) -> int:
    """Run each step with the task's loss; return the exit code."""
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return int(end.value)
        step.run()


class Session:
    """One run in this process, see the top of this file.

    Args:
        script: the task of a script with its own loop; None: that of the configuration.
        finish: whether the script wants the next step to be the last one.

    Attributes:
        topology: the ranks of this generation.
        persistent: what this process keeps between generations.
        removed: the run continues without this process.
    """

    def __init__(
        self,
        settings: Settings,
        stop: StopFlag,
        began: float,
        script: Task | None = None,
        finish: Callable[[], bool] = lambda: False,
    ) -> None:
        self._script, self.removed = script, False
        self._began = began
        self._began_clock = time.perf_counter()
        self._stop = stop
        self._number = environment.launched_rank()
        self._local_rank = environment.launched_local_rank()
        self._membership = Membership.of_this_process(stop)
        notice = settings.config.preempt.notice
        if notice is not None:
            notices.watch(notice, notices.parse_source(notice), self._on_notice)
        self._launched = Launched(
            settings,
            sha256(settings.resolved.encode()).hexdigest(),
            self._local_rank,
            stop,
            self._membership,
            finish,
        )
        self.persistent = PersistentState(
            settings.config,
            self._start_watchdog(settings),
            self._local_rank,
            settings.config.task if script is None else optional(script, "run_name"),
        )
        self._strategy = build_strategy(settings.config, elastic=self._membership is not None)
        # None until a generation builds them, if the strategy rebuilds.
        self._components: RunComponents | None = None
        self._threads = settings.config.runtime.threads
        self.topology = initialize(self._threads, lambda: stop.raised)

    @property
    def device(self) -> torch.device:
        """Device of this process; known inside the loop."""
        return self._prepared.device

    @property
    def iteration(self) -> Iteration:
        """Of a script with its own loop; known inside the loop."""
        assert self._components is not None
        assert self._components.iteration is not None
        return self._components.iteration

    @property
    def batch(self) -> BatchConfig:
        """Sizes of a step and of a micro-batch; known inside the loop."""
        return self._prepared.config.batch

    def _start_watchdog(self, settings: Settings) -> KeptWatchdog | None:
        if environment.launched_size() in (None, 1) and not environment.elastic():
            return None
        launcher = self._membership.launcher if self._membership else ""
        hang_seconds = settings.config.elastic.hang_seconds
        heartbeat.HEARTBEAT.judged = hang_seconds > 0
        kept = KeptWatchdog(
            partial(watchdog.start, heartbeat.HEARTBEAT, hang_seconds, launcher, self._number)
        )
        if self._membership is not None:
            self._membership.listen(self._abort)
        return kept

    def _on_notice(self, message: str) -> None:
        """Handle the notice that this host is about to be reclaimed; runs in another thread."""
        logger.warning("%s", message)
        if self._membership is None:
            self._stop.raise_before_signals()
        else:
            self._membership.leave(message)

    def _abort(self) -> None:
        """Abort collectives because this generation is over; runs in another thread."""
        heartbeat.HEARTBEAT.generation_over = True
        # First: no rank may agree on a step with results of the collectives that are aborted below.
        abort_collectives()
        self._strategy.abort_collectives()

    def steps(self) -> Generator[Step, None, int]:
        """Yield each step of the run; return the exit code.

        Raises:
            RankLostError: a rank was lost in a run that is not elastic.
            BaseException: any other error, see the function `run`.
        """
        self._prepare()
        try:
            if self._membership is None:
                code = yield from self._train(Cause("launch", self._began))
            else:
                code = yield from self._generations(self._membership)
        finally:
            if self._prepared.exporter is not None:
                self._prepared.exporter.close()
            if self._prepared.precision.loss_scale is not None:
                self._prepared.precision.loss_scale.remove_hooks()
            self.persistent.close()
        self.persistent.release()
        self._strategy.close()
        return code

    def end_by_agreement(self, error: AgreedError) -> int:
        """End with an error that all ranks of this generation share; return the exit code."""
        if error.rank == self.topology.rank and self._should_report_error():
            where = "" if error.rank == 0 else f"rank {error.rank} on {self.topology.host}: "
            message = printable_lines(f"{where}{error}")
            say(f"hvdtrain: error: {message}")
        with suppress(RankLostError):
            gather_json(None, "reported")  # no rank ends before the message is printed
        if self.persistent.recorder is not None:
            self.persistent.recorder.emit_end(self._prepared.progress.step, error.exit_code)
        self.persistent.release()
        return error.exit_code

    def _should_report_error(self) -> bool:
        """Whether this process reports an error that the ranks of this generation share.

        Processes that prepare alone may all find the same error: the first process reports it,
        and the launcher then ends the others.
        """
        alone = self._membership is not None and self.topology.world_size == 1
        return not (alone and self._number > 0 and self._stop.raised_by_launcher())

    def report(self, error: BaseException) -> None:
        """Report an error of this process, which is about to end it, to an elastic launcher."""
        if self._membership is None or isinstance(error, (RankLostError, KeyboardInterrupt)):
            return
        trains = self.persistent.phase == TRAINING
        step = self._prepared.progress.step + 1 if trains else None
        where = f"rank {self.topology.rank} on {self.topology.host}"
        self._membership.report(
            f"{where}: {type(error).__name__}: {error}"[:_LONGEST_MESSAGE], step
        )

    def _prepare(self) -> None:
        settings, membership, topology = self._launched.settings, self._membership, self.topology
        agree_to_start(settings, self._launched.digest, topology, membership, self._number)
        start = Start(self._began_clock, self._local_rank, elastic=membership is not None)
        script, data = self._script, None
        if script is not None:
            data = script, on_all_ranks("data", lambda: build_datasets(script, settings.config))
        self._prepared = prepare(settings, topology, start, data)
        if not self._strategy.rebuilds:
            self._components = build_components(self._prepared, self._strategy, topology)

    def _train(self, cause: Cause) -> Generator[Step, None, int]:
        if self._strategy.rebuilds:
            heartbeat.HEARTBEAT.beat(Activity.PREPARING)
            self.persistent.phase = STATE_TRANSFER
            self._components = None  # its memory is needed
            self._components = self._strategy.regroup(
                self.topology,
                self.persistent,
                self._prepared.progress.step,
                lambda: build_components(self._prepared, self._strategy, self.topology),
            )
        assert self._components is not None
        with self._strategy.lost_peers():
            while True:
                generation = Generation(
                    self._launched, self._components, self.persistent, self.topology, cause
                )
                try:
                    return (yield from generation.steps())
                except SpikeRollback:
                    cause = Cause("spike", time.time(), cause.number + 1)

    def _let_replace(self, membership: Membership, reason: ReplacedError) -> int:
        """End this healthy process so that a new one replaces it; return the exit code."""
        logger.warning("this process ends, and a new one takes its place: %s", reason)
        try:
            membership.replace(str(reason))
        except OSError as error:
            raise crash(f"the launcher does not respond ({error}): {reason}") from None
        with heartbeat.HEARTBEAT.waiting():
            shut_down()
        return 0

    def _generations(self, membership: Membership) -> Generator[Step, None, int]:
        """Join generations and yield their steps until the run's end; return the exit code."""
        rejoin = Rejoin(
            membership,
            self._launched,
            self._prepared,
            self.persistent,
            self._strategy,
            own_loop=self._script is not None,
        )
        failed_at, failure = -1, Failure()
        cause = Cause("launch", self._began)
        while True:
            try:
                self.topology = rejoin(failure, self._components)
            except RemovedError:
                self.removed = True
                return 0
            except RefusedError as refusal:
                say(f"hvdtrain: error: {refusal}")
                return EXIT_CRASH
            except LostError as error:
                raise crash(f"the launcher no longer responds ({error})") from None
            try:
                check_gpus(self.topology)
                return (yield from self._train(cause))
            except ReplacedError as error:
                self.removed = True
                return self._let_replace(membership, error)
            except MembershipChanged:
                failure = Failure()
                if self.persistent.phase == TRAINING:  # otherwise keep the cause
                    cause = Cause("hosts", time.time())
            except RankLostError as error:
                failed = self._prepared.progress.step + 1
                failure = Failure(self.persistent.phase, str(error))
                with heartbeat.HEARTBEAT.waiting():
                    shut_down()  # from here on no collective writes into the state
                components = self._components
                if components is not None and restore_consistent_state(components):
                    self.persistent.trained = True
                step = self._prepared.progress.step
                logger.warning("step %d failed: %s", failed, error)
                if cause.name != "failure" or step != failed_at:
                    cause = Cause("failure", time.time())
                failed_at = step


# --- from one generation of an elastic run to the next ------------------------


_MAX_FAILED_RENDEZVOUS = 20
# Factor of elastic.hang_seconds, as in watchdog.py, and further seconds: the other ranks wait this
# long for the verdict of this process's watchdog.
_VERDICT_SECONDS = (10, 60.0)


@dataclass(frozen=True)
class Failure:
    """Failure of the last generation of an elastic run.

    Args:
        phase: the phase in which it failed, see elastic/status.py; None: it did not fail.
        unreachable: hosts to which this host cannot connect, see elastic/reach.py.
    """

    phase: str | None = None
    message: str = ""
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rejoin:
    """Callable that moves this process to the next generation.

    Args:
        strategy: distributes the model over ranks.
        own_loop: the ranks run a script with its own loop.
    """

    membership: Membership
    launched: Launched
    prepared: Prepared
    persistent: PersistentState
    strategy: Strategy
    own_loop: bool

    def __call__(self, failure: Failure, components: RunComponents | None) -> Topology:
        """Leave the last generation, join the next one, and return its topology.

        Args:
            failure: failure of the last generation.
            components: components of the last generation.

        Raises:
            RemovedError, RefusedError, LostError: as Membership.join.
            UserError: the rendezvous fails _MAX_FAILED_RENDEZVOUS times in a row.
        """
        for _ in range(_MAX_FAILED_RENDEZVOUS):
            with heartbeat.HEARTBEAT.waiting():
                shut_down()
                self.strategy.leave_generation(components.exchange if components else None)
            heartbeat.HEARTBEAT.beat(Activity.RENDEZVOUS)
            with reach.listening() as place:
                self.membership.join(partial(self._status, failure, place), self._set_aside)
                # Not earlier: the listener may still report the end of the last generation.
                heartbeat.HEARTBEAT.generation_over = False
                self.persistent.phase = RENDEZVOUS
                try:
                    with heartbeat.HEARTBEAT.waiting():
                        threads = self.launched.settings.config.runtime.threads
                        return initialize(threads, gpu=gpu_of(self.prepared.device))
                except RankLostError as error:
                    logger.warning(
                        "a rank died during the rendezvous, or cannot be reached: %s", error
                    )
                    parted = reach.unreachable(self.membership.places)
                    failure = Failure(RENDEZVOUS, str(error), parted)
        cannot = f"; here not: {', '.join(failure.unreachable)}" if failure.unreachable else ""
        raise crash(
            f"the rendezvous failed {_MAX_FAILED_RENDEZVOUS} times in a row: can the hosts reach "
            f"each other on all ports{cannot}?"
        )

    def _set_aside(self) -> None:
        """Become a spare: the other ranks train without this process."""
        self.persistent.set_aside()
        self.strategy.forget_pending_step()

    def _status(self, failure: Failure, place: tuple[str, int] | None) -> ProcessStatus:
        times, more = _VERDICT_SECONDS
        config = self.prepared.config
        own = self.strategy.status(self.persistent, self.prepared.progress.step)
        return ProcessStatus(
            identity=self.prepared.identity(self.launched.digest),
            trained=self.persistent.trained,
            step=self.prepared.progress.step if own.shard is None else own.step,
            verdict_seconds=times * config.elastic.hang_seconds + more,
            failed=failure.phase,
            message=failure.message[:_LONGEST_MESSAGE],
            replica_size=prod(config.parallel.degrees.values()),
            shard=own.shard,
            reachable_step=own.reachable_step,
            gpu=gpu_of(self.prepared.device),
            works_on=self.own_loop,
            place=place,
            unreachable=failure.unreachable,
        )
