"""Files of a run that rank 0 writes, and what every process keeps between generations."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from hvdtrain import log
from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.checkpoint.format import Checkpoint, read
from hvdtrain.checkpoint.layout import named
from hvdtrain.checkpoint.manager import CheckpointManager
from hvdtrain.checkpoint.mirror import Mirror
from hvdtrain.checkpoint.writer import CheckpointWriter
from hvdtrain.config import Config
from hvdtrain.elastic.status import RENDEZVOUS
from hvdtrain.elastic.watchdog import KeptWatchdog
from hvdtrain.errors import EXIT_CRASH, UserError, crash
from hvdtrain.file_thread import wait_for_writes
from hvdtrain.log import logger
from hvdtrain.run_files.events_file import EventsFile
from hvdtrain.run_files.metrics_file import MetricsFile
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.run_directory import RunDirectory, default_id, new_directory
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.terminal import terminal
from hvdtrain.telemetry.borrowed import BorrowedNodes
from hvdtrain.telemetry.exporter import Exporter
from hvdtrain.telemetry.sinks import BackgroundSink, build_sinks

# Wait for the sinks at the end; the short one if another process waits for this one to end.
_SINKS_TIMEOUT_S = 10.0
_SHORT_SINKS_TIMEOUT_S = 2.0
# A run may be shorter than the import of a sink's package. Both timeouts together are less than the
# 30 s for which an elastic driver waits for the last ranks.
_SINK_IMPORTS_TIMEOUT_S = 15.0
_WRITES_S = 5.0  # for the last lines of the run's files, on a slow disk
_CONFIRM_S = 5.0  # to confirm that this process still owns the run
# Wait for a save in progress when a generation has ended; the save is lost if it takes longer.
_LAST_SAVE_SECONDS = 10.0
# For the mirror's copy of the end event; other ranks wait meanwhile.
_LAST_RECORDS_SECONDS = 10.0
_RECENT = 1000  # records of steps
_RETURN_SECONDS = 1.0  # between two looks for a directory whose disk is not mounted


class RunRecorder:
    """Run directory with its metrics, checkpoints and events.

    Args:
        directory: run directory, owned by this process.
        config: which checkpoints are kept.
        sinks: also receive the metrics, from `open` to `end_sinks`.
        mirror: copy of the run's checkpoints.

    Attributes:
        metrics, ranks, writer: None before `open`; `ranks` is RUN/ranks.jsonl.
        starts: one entry for each start of the run so far.
        borrowed: what lent nodes have done, as far as this process has recorded it.
    """

    def __init__(
        self,
        directory: RunDirectory,
        config: CheckpointConfig,
        sinks: Sequence[BackgroundSink] = (),
        mirror: Mirror | None = None,
    ) -> None:
        self.directory = directory
        self.sinks = sinks
        self.mirror = mirror
        self.manager = CheckpointManager(
            directory.checkpoints,
            config.keep,
            partial(directory.ownership.confirm, _CONFIRM_S),
            config.keep_best,
            mirror,
        )
        self.metrics: MetricsFile | None = None
        self.ranks: MetricsFile | None = None
        self.writer: CheckpointWriter | None = None
        self.events = EventsFile(directory.events, directory.ownership)
        self.starts = directory.starts()
        self.borrowed = BorrowedNodes()
        self._small = LateFiles(partial(directory.ownership.confirm, _CONFIRM_S))
        self._sinks_ended = False
        self._numbers: dict[str, int] = {}  # claim -> number of the generation
        self._restarts = 0
        self._lost_steps = 0

    def describe(self, path: Path, write: Callable[[], None], tolerate_errors: bool) -> None:
        """Write one of the small files that record how the run was started.

        Args:
            tolerate_errors: other ranks hold a state that would be lost. A failure is then only
                logged, and the file is tried again before each checkpoint.

        Raises:
            OSError: the file cannot be written; only without `tolerate_errors`.
        """
        self._small.write(path, write, tolerate_errors)

    def open(self, step: int, exporter: Exporter | None, tolerate_errors: bool = False) -> None:
        """Open the metrics files of a run that resumes from `step`; set aside later steps.

        If the files are already open, only set aside later steps (local SGD, copies in memory).

        Raises:
            OSError: the files cannot be written; only without `tolerate_errors`, see `describe`.
        """
        if self.writer is not None and self.writer.taken_step > step:
            self.wait_for_save()
        try:
            self.manager.supersede(after=step)
        except OSError as error:
            if not tolerate_errors:
                raise
            logger.error("%s: %s; training continues", self.manager.root, error.strerror)
        if self.metrics is not None and self.ranks is not None and self.writer is not None:
            self.metrics.roll_back(step)
            self.ranks.roll_back(step)
            self.writer.go_back(step, self.manager.newest_step())
            return
        directory, owner = self.directory, self.directory.ownership
        self.metrics = MetricsFile(directory.metrics, step, owner, tolerate_errors)
        self.ranks = MetricsFile(directory.ranks, step, owner, tolerate_errors)
        for sink in self.sinks:
            sink.start(self.metrics.last_step or 0)
        self.writer = CheckpointWriter(self.manager, self.manager.newest_step(), self.events.write)
        if self.mirror is not None:
            self.mirror.open(self.starts[0]["time"], step, self.events.write)
        if exporter is not None:
            _export_checkpoints(exporter, self.writer)
            if self.mirror is not None:
                _export_mirror(exporter, self.mirror)
            self._export_history(exporter)

    def bring_to_disk(self) -> None:
        """Write the other files of the run before a checkpoint, also those that were removed.

        No failure prevents the checkpoint: the lines of a file can be missed, the state cannot.
        """
        self._small.again(removed=True)
        for file in filter(None, (self.metrics, self.ranks)):
            try:
                file.sync()
            except OSError as error:
                file.report(error)

    def wait_for_save(self) -> None:
        """Wait a limited time for a save in progress."""
        if self.writer is not None:
            self.writer.wait(time.monotonic() + _LAST_SAVE_SECONDS)

    def choose(self, resume: str, begun: bool = False, every: int = 0) -> Checkpoint | None:
        """Return the checkpoint from which the run continues; None: from the start.

        Args:
            resume: as run.resume.
            begun: this job has trained: it continues from its own newest checkpoint, if any.
            every: as in CheckpointManager.newest.

        Raises:
            UserError: there is no such checkpoint, or no complete one; with exit code 1, the disk
                of the run directory does not respond, or is not mounted.
        """
        if begun:
            try:
                self.directory.ownership.recognize()
            except OSError as error:
                raise crash(f"{self.directory.path}: {error.strerror}") from None
        if resume == "never" and not begun:
            return None
        if resume in ("auto", "never"):
            return self.manager.newest(every)
        path = Path(resume)
        if not path.is_dir():
            raise UserError(
                f"run.resume {resume}: expected auto, never or the directory of a checkpoint"
            )
        of_this_run = path.resolve().parent == self.manager.root.resolve()
        if named(self.manager.root) and (begun or not of_this_run):
            # This run began from a checkpoint of another run and has continued since, even if its
            # own checkpoints were damaged.
            return self.manager.newest(every)
        return read(path)

    def leave_later_checkpoints(self, step: int) -> None:
        """Set aside checkpoints of steps that the run will do in another way.

        Raises:
            UserError: one cannot be renamed: a later start would resume from it.
        """
        try:
            self.manager.supersede(after=step)
        except OSError as error:
            raise UserError(
                f"{self.manager.root}: a checkpoint to which the run must not return cannot be "
                f"renamed ({error.strerror})"
            ) from None
        if self.writer is not None:
            self.writer.last_saved_step = min(self.writer.last_saved_step, step)

    def emit_starts(self, generations: Sequence[dict[str, Any]]) -> None:
        """Write the start event of a generation, before its first step.

        Args:
            generations: the generations in which this process took part, the current one last.
                Events of earlier ones may also be missing, if their rank 0 died while the disk
                was full.
        """
        past = self.events.lines()
        saved = {event.get("step") for event in past if event.get("event") == "checkpoint"}
        starts = [event for event in past if event.get("event") == "start"]
        known = {event.get("claim") for event in starts}
        # Generations before a recorded one did no step with its rank 0.
        newest_first = takewhile(lambda facts: facts["claim"] not in known, reversed(generations))
        missing = [*newest_first][::-1]
        lost = self.metrics.superseded_steps if self.metrics is not None else 0
        self._lost_steps = sum(event.get("lost_steps", 0) for event in starts) + lost
        for number, facts in enumerate(missing, start=len(starts)):
            if facts["source"] == "checkpoint" and facts["step"] not in saved:
                # Its writer was killed before it could write the event: how long the save held up
                # the steps is unknown.
                self.events.write("checkpoint", step=facts["step"], seconds=0.0)
                saved.add(facts["step"])
            steps = lost if facts is generations[-1] else 0
            self.events.write("start", generation=number, lost_steps=steps, **facts)
        if self.mirror is not None and self.mirror.restored is not None:
            self.events.write("restored", **self.mirror.restored)
            self.mirror.restored = None
        self._restarts = len(starts) + len(missing) - 1
        events = (event for event in self.events.lines() if event.get("event") == "start")
        self._numbers = {event.get("claim", ""): event["generation"] for event in events}

    def generation(self, claim: str) -> int | None:
        """Return the number of the generation with this claim; None: it has no start event."""
        return self._numbers.get(claim)

    def emit_end(self, step: int, exit_code: int) -> None:
        """Write the event of an end on which the ranks agreed."""
        self.events.write("end", step=step, exit_code=exit_code)
        if self.mirror is not None:
            self.mirror.finish(_LAST_RECORDS_SECONDS)

    def end_sinks(self, exit_code: int) -> None:
        """Close the sinks and wait a limited time for them; a second call does nothing.

        Args:
            exit_code: exit code of this process.
        """
        if self._sinks_ended:
            return
        self._sinks_ended = True
        for sink in self.sinks:
            sink.close(exit_code)
        limit = _SHORT_SINKS_TIMEOUT_S
        if exit_code == 0:
            limit, imports = _SINKS_TIMEOUT_S, time.monotonic() + _SINK_IMPORTS_TIMEOUT_S
            for sink in self.sinks:
                sink.wait_for_import(imports)
        deadline = time.monotonic() + limit
        for sink in self.sinks:
            sink.wait(deadline)

    @property
    def sink_stuck(self) -> bool:
        """Whether a sink hangs and would keep this process from ending."""
        return any(sink.stuck for sink in self.sinks)

    def close(self) -> None:
        self._small.again()
        if self.mirror is not None:
            self.mirror.close()
        self.end_sinks(EXIT_CRASH)
        for file in (self.metrics, self.ranks):
            if file is not None:
                file.close()
        # Events on a slow disk: without the ownership of the run they would be left out.
        wait_for_writes(_WRITES_S)

    def _export_history(self, exporter: Exporter) -> None:
        exporter.watch_total(
            "restarts", "Generations of the run after its first one", lambda: self._restarts
        )
        exporter.watch_total(
            "lost_steps",
            "Steps redone after restarts, up to the last one that was logged (train.log_every)",
            lambda: self._lost_steps,
        )
        exporter.watch(
            "run_start_timestamp_seconds", "First start of the run", lambda: self.starts[0]["time"]
        )
        exporter.watch(
            "borrowed_nodes",
            "Nodes that a batch system lends to the run now",
            lambda: len(self.borrowed.hosts),
        )
        exporter.watch_totals(
            "borrowed_node_seconds",
            "Node-seconds of lent nodes, from the start of the agent to the last step: used in "
            "steps, or idle",
            "state",
            self.borrowed.seconds,
        )
        exporter.watch_total(
            "file_failures",
            "Times that a file of the run other than a checkpoint could not be written",
            self._failures,
        )

    def _failures(self) -> int:
        files = (self.metrics, self.ranks, self.events, self._small, self.directory.ownership)
        return sum(file.failures for file in files if file is not None)


def build_recorder(config: Config, directory: RunDirectory, mirror: Mirror | None) -> RunRecorder:
    """Build rank 0's recorder for a run directory that it owns."""
    sinks = [BackgroundSink(sink) for sink in build_sinks(config.telemetry, directory.path)]
    return RunRecorder(directory, config.checkpoint, sinks, mirror)


class LateFiles:
    """Small files, each written whole: now, later if the disk is full, and again if removed.

    Args:
        confirm: raises OSError if this process may not write.

    Attributes:
        failures: number of failed writes.
    """

    def __init__(self, confirm: Callable[[], None]) -> None:
        self._confirm = confirm
        self._written: dict[Path, Callable[[], None]] = {}
        self._waiting: dict[Path, Callable[[], None]] = {}
        self._said: set[Path] = set()
        self._lock = Lock()  # saves retry from their own thread
        self.failures = 0

    def write(self, path: Path, write: Callable[[], None], tolerate_errors: bool) -> None:
        """Write a file, see RunRecorder.describe."""
        with self._lock:
            self._waiting[path] = write
            self._try(path, tolerate_errors)

    def again(self, removed: bool = False) -> None:
        """Retry the files that could not be written.

        Args:
            removed: also write those that were removed since, which the run itself does at its end.
        """
        with self._lock:
            if removed:
                try:
                    self._confirm()
                except OSError:  # they may be there, on a disk that is away
                    removed = False
            for path, write in self._written.items() if removed else ():
                if not os.path.lexists(path):
                    logger.warning(
                        "%s was removed or moved while the run trains: it is made again", path
                    )
                    self._waiting[path] = write
            for path in list(self._waiting):
                self._try(path, tolerate_errors=True)

    def _try(self, path: Path, tolerate_errors: bool) -> None:
        try:
            self._confirm()
            self._waiting[path]()
        except OSError as error:
            self.failures += 1
            if not tolerate_errors:
                raise
            if path not in self._said:
                logger.error(
                    "%s cannot be written (%s); training continues, and the write is "
                    "retried before each checkpoint",
                    path,
                    error.strerror,
                )
            self._said.add(path)
        else:
            self._written[path] = self._waiting.pop(path)
            self._said.discard(path)


def _export_checkpoints(exporter: Exporter, writer: CheckpointWriter) -> None:
    exporter.watch(
        "last_checkpoint_step", "Step of the newest checkpoint", lambda: writer.last_saved_step
    )
    exporter.watch(
        "last_checkpoint_timestamp_seconds",
        "When the newest checkpoint was complete, or when saving could have begun",
        lambda: writer.last_saved_at,
    )
    exporter.watch(
        "last_checkpoint_write_seconds",
        "Seconds to write the newest checkpoint, in parallel with steps",
        lambda: writer.seconds,
    )
    exporter.watch_total(
        "checkpoint_failures", "Checkpoints that could not be written", lambda: writer.failures
    )
    exporter.watch_total(
        "checkpoint_stall_seconds",
        "Seconds for which steps waited for saves, to copy the state",
        lambda: writer.stall_seconds_total,
    )


def _export_mirror(exporter: Exporter, mirror: Mirror) -> None:
    exporter.watch(
        "mirrored_checkpoint_step",
        "Step of the newest checkpoint in checkpoint.mirror; 0: none",
        lambda: mirror.newest_step,
    )
    exporter.watch_total(
        "mirror_failures",
        "Checkpoints that could not be uploaded to checkpoint.mirror",
        lambda: mirror.failures,
    )
    exporter.watch_total(
        "mirror_sent_bytes", "Bytes uploaded to checkpoint.mirror", lambda: mirror.sent_bytes
    )


class PersistentState:
    """Open files of the run in this process, and whether the process holds the run's state.

    Args:
        watchdog: watchdog of this process; receives the path of its log.
        local_rank: the local rank at the start, for the name of that log.
        name: of the run, if it has no ID.

    Attributes:
        run_id: ID of the run. Without run.id it is None until rank 0 has made a new directory.
        directory: run directory, once `run_id` is known.
        claim: claim of this process to the run directory.
        recorder: on the rank that is, or was, rank 0.
        generations: start event of each generation in which this process took part.
        recent: records of the last logged steps, which rank 0 may not have written yet.
        trained: this process holds the state of the run.
        initial: its state is still the initial one from the seed.
        newest: the newest step whose state a rank held in memory, as far as this process knows;
            None once the run continues or begins. If no rank holds a state, this one is lost.
        copied_step: the step of the copies in memory from which the run continues; None: it does
            not continue from copies.
        damaged_copies: copies in memory that were found damaged since the last start event.
        phase: phase of the generation, see elastic/status.py.
        lost_disk: a rank had the run directory, and its disk is not mounted: no rank may make it.
    """

    def __init__(
        self, config: Config, watchdog: KeptWatchdog | None, local_rank: int, name: str
    ) -> None:
        self._config = config
        self._watchdog = watchdog
        self._local_rank = local_rank
        self.run_id = config.run.id
        self._default_id = default_id(name)
        self.directory = RunDirectory(Path(config.run.root) / (self.run_id or self._default_id))
        self.directory.ownership.look()  # first of two reads of the owner's counter
        self.claim = Claim.of_this_process()
        self.recorder: RunRecorder | None = None
        self.generations: list[dict[str, Any]] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.trained = False
        self.initial = True
        self.newest: int | None = None
        self.copied_step: int | None = None
        self.damaged_copies: list[str] = []
        self.phase = RENDEZVOUS
        self.lost_disk = False
        self._away = False  # in this generation, rank 0 continues without the directory
        self._returned = False  # it is there again
        self._waits: Thread | None = None  # for the return of the directory
        self._log_of: Topology | None = None  # the generation whose log is open

    @property
    def directory_returned(self) -> bool:
        """Whether rank 0 continued without the run directory, and another generation can open it.

        False while it is being opened, which can take as long as a download of checkpoints.
        """
        return self._away and self._returned

    def new_run_id(self) -> str:
        """Make a new directory, which no other job that starts in the same second can have."""
        return new_directory(Path(self._config.run.root), self._default_id).name

    def take_run_id(self, run_id: str) -> None:
        """Adopt the ID that all ranks use."""
        self.run_id = run_id
        if self.directory.path.name != run_id:
            self.directory = RunDirectory(Path(self._config.run.root) / run_id)

    def open_directory(
        self, topology: Topology, claim: Claim | None, tolerate_errors: bool, begun: bool = False
    ) -> None:
        """Open this rank's log and, on rank 0, the run directory.

        A second call in the same generation does nothing.

        Args:
            claim: claim of this generation; None: the claim of the process.
            tolerate_errors: other ranks hold a state that would be lost.
            begun: this job has trained, whether or not a rank still holds its state.

        Raises:
            UserError: the directory cannot be written, or belongs to another process.
        """
        if topology.rank > 0:
            with suppress(OSError):  # rank 0 has made it, at the latest before the second call
                self.directory.ownership.recognize(strict=self.lost_disk)
        if self._log_of == topology and not self.directory_returned:
            return
        self._returned = False
        opens = topology.rank == 0 and self.recorder is None
        self._away = opens and self._is_away(tolerate_errors)
        if opens and not self._away:
            fresh = self._config.run.resume == "never" and not (tolerate_errors or begun)
            self.claim = claim or self.claim
            self.directory.prepare(fresh, self.claim, tolerate_errors)
            log.to_screen(terminal())
            mirror = self._build_mirror()
            # Otherwise the run continues from memory.
            if mirror is not None and not tolerate_errors:
                starts = self.directory.starts()
                mirror.restore(starts[0]["time"] if starts else None, fresh)
            self.recorder = build_recorder(self._config, self.directory, mirror)
        self._open_log(topology, tolerate_errors)
        self._log_of = topology
        logger.info("run %s on %s", self.directory.path, topology.describe())
        if setting := self._config.depends_on_ranks:
            logger.info("the curve depends on the number of ranks: %s", setting)

    def _is_away(self, tolerate_errors: bool) -> bool:
        """Whether rank 0 must continue without the run directory, because its disk is away."""
        if not tolerate_errors:
            return False
        try:
            self.directory.ownership.recognize(strict=self.lost_disk)
        except OSError as error:
            log.to_screen(terminal())
            logger.error(
                "%s: %s; training continues without checkpoints until it is there again",
                self.directory.path,
                error.strerror,
            )
            if self._waits is None or not self._waits.is_alive():
                self._waits = Thread(target=self._wait_for_return, daemon=True)
                self._waits.start()
            return True
        return False

    def _wait_for_return(self) -> None:
        while self.recorder is None:
            time.sleep(_RETURN_SECONDS)
            with suppress(OSError):
                self.directory.ownership.recognize()
                self._returned = True
                return

    def _build_mirror(self) -> Mirror | None:
        config = self._config.checkpoint
        if config.mirror is None:
            return None
        return Mirror(self.directory.path, config.mirror, config, self.claim.job)

    def _open_log(self, topology: Topology, tolerate_errors: bool) -> None:
        logs = self.directory.logs
        log.close_files()
        try:
            recognize = self.directory.ownership.recognize
            log.to_file(logs, topology.rank, topology.host, partial(recognize, self.lost_disk))
        except OSError as error:
            if not tolerate_errors:
                raise UserError(f"{logs}: cannot be written ({error.strerror})") from None
            logger.error("%s: cannot be written (%s); training continues", logs, error.strerror)
        if self._watchdog is not None:
            self._watchdog.write_to(logs / f"hang_{topology.host}_{self._local_rank}.txt")

    def has_stuck_thread(self) -> bool:
        """Whether a hanging thread would keep this process from ending."""
        return self.recorder is not None and self.recorder.sink_stuck

    def set_aside(self) -> None:
        """Close the run's files: the other ranks continue without this process."""
        if self.recorder is not None:
            self.close()
            self.release()
            self.recorder = None
            self.directory = RunDirectory(self.directory.path)
        self._log_of = None

    def close(self) -> None:
        """Close the run's files."""
        if self.recorder is not None:
            self.recorder.close()

    def release(self) -> None:
        """Release the run directory for the next start; a crashed process does not release it."""
        if self.recorder is not None:
            # If the ranks end by an agreed error, the save may still be in progress.
            self.recorder.wait_for_save()
        self.directory.ownership.release()
