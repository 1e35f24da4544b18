"""A task whose ranks get a forked helper process while they run."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor, nn

from hvdtrain.runtime.environment import launched_rank
from tests.support.tasks import Paced

HELPER = "helper"  # its name for ps; its command line is the rank's
_HELPER_SECONDS = 120.0


class Helped(Paced):
    """Paced; a rank forks a helper process when it is asked to, by a file.

    HVDTRAIN_TEST_CONTROL: a folder; process N (as its launcher counts) forks when there is a
    file fork-N, which it removes. The helper holds all that the rank had open, as a worker of
    multiprocessing does, sleeps, and outlives the rank.
    """

    def __init__(self) -> None:
        super().__init__()
        number = launched_rank(psutil.Process().environ())  # as it was at the start
        self._wish = Path(os.environ["HVDTRAIN_TEST_CONTROL"]) / f"fork-{number}"

    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        if self._wish.exists():
            self._fork()
        return super().loss(model, batch)

    def _fork(self) -> None:
        if os.fork() == 0:
            with suppress(BaseException):
                Path("/proc/self/comm").write_text(HELPER)
                self._wish.unlink()
                time.sleep(_HELPER_SECONDS)
            os._exit(0)
