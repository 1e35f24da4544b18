"""State that a process keeps between generations, in addition to its components."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any

from hvdtrain import log
from hvdtrain.config import Config
from hvdtrain.elastic.failures import RENDEZVOUS
from hvdtrain.elastic.kept_watchdog import KeptWatchdog
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.run.recorder import RunRecorder, build_recorder
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.run_directory import RunDirectory, default_id
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.terminal import terminal

# Wait for a save in progress when the ranks end by an error; the save is lost if it takes longer.
_LAST_SAVE_SECONDS = 10.0
_RECENT = 1000  # records of steps


class Held:
    """Open files of the run in this process, and whether the process holds the run's state.

    Args:
        watchdog: of this process; receives the path of its log.
        local_rank: the local rank at the start, for the name of that log.

    Attributes:
        run_id: of the run; rank 0 decides it.
        folder: run directory; rank 0 decides it.
        claim: of this process to the run directory.
        recorder: on the rank that is, or was, rank 0.
        generations: start event of each generation in which this process took part.
        recent: records of the last logged steps, which rank 0 may not have written yet.
        trained: this process holds the state of the run.
        initial: its state is still the initial one from the seed.
        newest: the newest step whose state a rank held in memory, as far as this process knows;
            None once the run continues or begins. If no rank holds a state, this one is lost.
        phase: phase of the generation, see failures.py.
    """

    def __init__(self, config: Config, watchdog: KeptWatchdog | None, local_rank: int) -> None:
        self._config = config
        self._watchdog = watchdog
        self._local_rank = local_rank
        self.run_id = config.run.id or default_id(config.task)
        self.folder = RunDirectory(Path(config.run.root) / self.run_id)
        self.folder.ownership.look()  # first of two reads of the owner's counter
        self.claim = Claim.of_this_process()
        self.recorder: RunRecorder | None = None
        self.generations: list[dict[str, Any]] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.trained = False
        self.initial = True
        self.newest: int | None = None
        self.phase = RENDEZVOUS
        self._log_of: Topology | None = None  # the generation whose log is open

    def take_run_id(self, run_id: str) -> None:
        """Adopt rank 0's run ID: without run.id each process has made its own."""
        self.run_id = run_id
        if self.folder.path.name != run_id:
            self.folder = RunDirectory(Path(self._config.run.root) / run_id)

    def open_directory(
        self, topology: Topology, claim: Claim | None, tolerate_errors: bool, begun: bool = False
    ) -> None:
        """Open this rank's log and, on rank 0, the run directory.

        A second call in the same generation does nothing.

        Args:
            claim: of this generation; None: the claim of the process.
            tolerate_errors: other ranks hold a state that would be lost.
            begun: this job has trained, whether or not a rank still holds its state.

        Raises:
            UserError: the directory cannot be written, or belongs to another process.
        """
        if self._log_of == topology:
            return
        if topology.rank == 0 and self.recorder is None:
            fresh = self._config.run.resume == "never" and not (tolerate_errors or begun)
            self.claim = claim or self.claim
            self.folder.prepare(fresh, self.claim, tolerate_errors)
            log.to_screen(terminal())
            self.recorder = build_recorder(self._config, self.folder)
        self._open_log(topology, tolerate_errors)
        self._log_of = topology
        logger.info("run %s on %s", self.folder.path, topology.describe())
        if setting := self._config.depends_on_ranks:
            logger.info("the curve depends on the number of ranks: %s", setting)

    def _open_log(self, topology: Topology, tolerate_errors: bool) -> None:
        logs = self.folder.logs
        log.close_files()
        try:
            log.to_file(logs, topology.rank, topology.host)
            if self._watchdog is not None:
                self._watchdog.write_to(logs / f"hang_{topology.host}_{self._local_rank}.txt")
        except OSError as error:
            if not tolerate_errors:
                raise UserError(f"{logs}: cannot be written ({error.strerror})") from None
            logger.error("%s: cannot be written (%s); training continues", logs, error.strerror)

    def has_stuck_thread(self) -> bool:
        """Whether a hanging thread would keep this process from ending."""
        return self.recorder is not None and self.recorder.sink_stuck

    def set_aside(self) -> None:
        """Close the run's files: the other ranks continue without this process."""
        if self.recorder is not None:
            self.close()
            self.release()
            self.recorder = None
            self.folder = RunDirectory(self.folder.path)
        self._log_of = None

    def close(self) -> None:
        """Close the run's files."""
        if self.recorder is not None:
            self.recorder.close()

    def release(self) -> None:
        """Release the run directory for the next start; a crashed process does not release it."""
        if self.recorder is not None and self.recorder.writer is not None:
            # If the ranks end by an agreed error, the save may still be in progress.
            self.recorder.writer.wait(time.monotonic() + _LAST_SAVE_SECONDS)
        self.folder.ownership.release()
