"""Each parallel axis with each option that changes a step, compared with one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.bench.processes import MARK
from tests.soak.bench.layouts import TINY
from tests.soak.bench.layouts_report import Curve, Row
from tests.support import warm
from tests.support.runs import start

pytestmark = pytest.mark.slow

STEPS = 2
# Four micro-batches per step are at least two passes on each rank; all clip gradients.
SIZES = (
    *TINY,
    *("--model.layers=2", "--model.width=16", "--data.train=LICENSE", f"--eval.every={STEPS}"),
    *(f"--train.duration={STEPS + 1}", "--checkpoint.every=0", "--telemetry.port=0"),
)
AXES = {
    "tensor": ("--parallel.tensor=2",),
    "pipeline": ("--parallel.pipeline=2",),
    "context": ("--parallel.context=2",),
    "shard": ("--parallel.shard.degree=2",),
}
# Options combined with an axis, and the allowed difference of losses.
OPTIONS = {
    "selective checkpointing": (("--memory.checkpoint_activations=selective",), 1e-5),
    "clipping, ema": (("--optim.clip_norm=0.01", "--optim.ema_decay=0.5"), 1e-5),
    "lion": (("--optim.name=lion", "--optim.lr=1e-4"), 1e-5),
    "bf16": (("--precision.name=bf16",), 3e-3),
}
PAIRS = [(axis, option) for axis in AXES for option in OPTIONS]


def _curves(directory: Path, launcher: str, flags: list[tuple[str, ...]]) -> list[Curve]:
    """Return the curves of runs with these flags, one after the other in one start."""
    command = [warm.python(2), "-m", "tests.soak.bench.layout_ranks"]
    lists = [json.dumps([*SIZES, *own]) for own in flags]
    done = start(directory, [str(STEPS), *lists], launcher, command=command).wait(240)
    assert done.returncode == 0, done
    lines = [line for line in done.stdout.splitlines() if MARK in line]
    return [Curve(**json.loads(line[line.index(MARK) :])["measured"]) for line in lines]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    root = tmp_path_factory.mktemp("pairs")
    alone = _curves(root / "one", "", [flags for flags, _ in OPTIONS.values()])
    wanted = dict(zip(OPTIONS, alone, strict=True))
    pairs = [(*AXES[axis], *OPTIONS[option][0]) for axis, option in PAIRS]
    found = _curves(root / "two", "gloo:2", pairs)
    return {
        (axis, option): Row(f"{axis}, {option}", 2, curve, wanted[option], OPTIONS[option][1])
        for (axis, option), curve in zip(PAIRS, found, strict=True)
    }


@pytest.mark.parametrize(("axis", "option"), PAIRS)
def test_parallel_axis_with_an_option_has_the_curve_of_one_rank(
    rows: dict[tuple[str, str], Row], axis: str, option: str
) -> None:
    row = rows[axis, option]
    assert isinstance(row.found, Curve) and len(row.found.losses) == STEPS
    assert row.met, row.differences()
