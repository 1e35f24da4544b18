"""Private parts of torch that hvdtrain relies on: one test fails for each that torch changes."""

from __future__ import annotations

import subprocess
import sys

from tests.support.runs import REPOSITORY, environment

_OPTIMIZE = """
import sys
from torch import nn, ones
from hvdtrain.optim.config import OptimConfig
from hvdtrain.optim.optimizer import build_optimizer
for name in ("adamw", "sgd", "adam", "lion", "muon", "adafactor"):
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = build_optimizer(OptimConfig(name=name), model)
    model(ones(1, dtype=int)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo.convert_frame" in sys.modules)
"""


def _imports_dynamo(first: str) -> bool:
    """Whether optimizers import torch._dynamo after the line `first`."""
    done = subprocess.run(
        [sys.executable, "-c", first + _OPTIMIZE],
        env=environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1] == "True"


def test_no_optimizer_imports_dynamo_with_the_stand_in() -> None:
    assert not _imports_dynamo("from hvdtrain.runtime.lazy_dynamo import defer; defer()")


def test_optimizers_import_dynamo_without_the_stand_in() -> None:
    assert _imports_dynamo(""), "torch no longer does: remove hvdtrain/runtime/lazy_dynamo.py"
