"""Takes the snapshot to which ranks that step on their own go back after a failure."""

from __future__ import annotations

from hvdtrain.engine.loop import Loop, StepRecord
from hvdtrain.engine.snapshot import Snapshot


class KeepSynchronised:
    """Comes after all callbacks that may change the state (ReplicaCheck)."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        snapshot.keep()  # where the generation begins

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        if loop.synchronised:
            self._snapshot.keep()

    def close(self) -> None:
        pass
