"""torch._dynamo is imported only by processes that compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment

_TRAIN = """
import gc, sys
from hvdtrain.train import main
flags = "--task tests.support.tasks:Regression --optim.name adamw --telemetry.port 0 --run.id case"
assert main([*flags.split(), "--run.root", sys.argv[1]]) == 0
assert gc.isenabled()
"""
_NOT_IMPORTED = "assert 'torch._dynamo.convert_frame' not in sys.modules\n"
_COMPILE = """
import torch
twice = torch.compile(lambda x: x + x, backend="eager", fullgraph=True)
assert twice(torch.ones(2)).tolist() == [2.0, 2.0]
import torch._dynamo.utils
assert torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__file__
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.AdamW(model.parameters())
torch.compile(model, backend="eager")(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


def _run(code: str, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_dynamo_is_imported_only_when_compiling(tmp_path: Path) -> None:
    _run(_TRAIN + _NOT_IMPORTED + _COMPILE, tmp_path)


@pytest.mark.slow
def test_training_works_after_torch_compile(tmp_path: Path) -> None:
    _run("import sys" + _COMPILE + _TRAIN, tmp_path)
