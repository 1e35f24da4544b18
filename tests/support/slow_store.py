"""A task whose checkpoints are uploaded to a store that takes minutes for each file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.mirror import ObjectStore
from hvdtrain.tasks import Datasets
from tests.support.tasks import Regression

SECONDS = 300.0


class SlowlyMirrored(Regression):
    def datasets(self) -> Datasets:
        ObjectStore.send = _send  # type: ignore[method-assign]
        return super().datasets()


def _send(self: ObjectStore, path: Path, wanted: Mapping[str, Any], name: str) -> int:
    time.sleep(SECONDS)
    return 0
