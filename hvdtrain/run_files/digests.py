"""Digests that the ranks of `hvdtrain check` write: of their state after each step, and of samples.

HVDTRAIN_CHECK names the directory, which `hvdtrain check` gives each of its runs. Each process
appends to files of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.run_files.events_file import each_line

VARIABLE = "HVDTRAIN_CHECK"


class DigestFiles:
    """The directory of one run's digests."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kill, self._join = directory / "kill", directory / "join"

    @classmethod
    def of_this_process(cls) -> DigestFiles | None:
        """Return the files to which this process writes; None: `hvdtrain check` has not started it.

        They may be pickled for data workers.
        """
        directory = os.environ.get(VARIABLE)
        return cls(Path(directory)) if directory else None

    def plan_failure(self, step: int, ranks: int) -> None:
        """Make rank 0 kill itself after a step, and the others wait until there are `ranks` again.

        Called before the run starts.
        """
        self._kill.write_text(str(step))
        self._join.write_text(str(ranks))

    def claim_kill(self, step: int) -> bool:
        """Whether the process that calls this after `step` must kill itself; once per run."""
        with suppress(FileNotFoundError):
            if step >= int(self._kill.read_text()):
                self._kill.unlink()
                return True
        return False

    @property
    def ranks_to_wait_for(self) -> int:
        """Number of ranks for which a smaller generation waits after a step; 0: it does not."""
        try:
            return 0 if self._kill.exists() else int(self._join.read_text())
        except FileNotFoundError:
            return 0

    def stop_waiting(self) -> None:
        """Continue without the killed rank's successor."""
        self._join.unlink(missing_ok=True)

    def append(self, kind: str, line: Mapping[str, Any]) -> None:
        """Append a line to this process's file of a kind."""
        own = {**line, "process": os.getpid()}
        with (self._directory / f"{kind}-{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(own) + "\n")

    def read(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of all processes, in the order of each process."""
        for path in sorted(self._directory.glob(f"{kind}-*.jsonl")):
            yield from (line for line in each_line(path) if line is not None)
