"""What a process keeps from one generation to the next, beside its components."""

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
from hvdtrain.run_files.folder import RunFolder, default_id
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.runtime.terminal import terminal
from hvdtrain.runtime.topology import Topology

# For a save in progress where the ranks end by an error; it is lost if it takes longer.
_LAST_SAVE_SECONDS = 10.0
_RECENT = 1000  # records of steps


class Held:
    """The run on disk as far as this process holds it, and whether it holds the run's state.

    Args:
        watchdog: of this process; it hears where to write.
        local_rank: as the launcher had it first, for the name of that file.

    Attributes:
        run_id, folder: of the run; rank 0's count.
        claim: of this process to the folder.
        recorder: on the rank that is, or was, rank 0.
        generations: facts of each that this process took part in, as the ledger has them.
        recent: records of the last logged steps, which rank 0 may not have written yet.
        trained: this process holds the state of the run.
        initial: its state is still what the seed gives.
        newest: the newest step whose state a rank held in memory, as far as this process knows;
            None once the run continues, or begins. If no rank holds a state, that one is lost.
        phase: of failures.py.
    """

    def __init__(self, config: Config, watchdog: KeptWatchdog | None, local_rank: int) -> None:
        self._config = config
        self._watchdog = watchdog
        self._local_rank = local_rank
        self.run_id = config.run.id or default_id(config.task)
        self.folder = RunFolder(Path(config.run.root) / self.run_id)
        self.folder.ownership.look()  # while all else is prepared, its owner may show life
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
        """From rank 0: without run.id each process made up its own."""
        self.run_id = run_id
        if self.folder.path.name != run_id:
            self.folder = RunFolder(Path(self._config.run.root) / run_id)

    def open_folder(
        self, topology: Topology, claim: Claim | None, tolerate_errors: bool, begun: bool = False
    ) -> None:
        """Opens this rank's log, and on rank 0 the folder; a second call in a generation is empty.

        Args:
            claim: of this generation; None: that of the process.
            tolerate_errors: others hold a state that would be lost.
            begun: this job has trained, whether a rank still holds its state or not.

        Raises:
            UserError: the folder cannot be written, or belongs to another process.
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
        """Whether this process would not end by itself."""
        return self.recorder is not None and self.recorder.sink_stuck

    def set_aside(self) -> None:
        """Others train on without this process: one of them is rank 0."""
        if self.recorder is not None:
            self.close()
            self.release()
            self.recorder = None
            self.folder = RunFolder(self.folder.path)
        self._log_of = None

    def close(self) -> None:
        """Closes the run's files."""
        if self.recorder is not None:
            self.recorder.close()

    def release(self) -> None:
        """The run is free for the next start; a crash does not say so."""
        if self.recorder is not None and self.recorder.writer is not None:
            # Where the ranks end by an error they agreed on, nobody has waited for it yet.
            self.recorder.writer.wait(time.monotonic() + _LAST_SAVE_SECONDS)
        self.folder.ownership.release()
