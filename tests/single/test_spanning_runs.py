"""Models that span ranks: the curve of one rank, on whichever layout, across layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.parallel.config import ParallelConfig
from hvdtrain.runtime.grid import Grid
from tests.support.runs import TINY, metrics, run, train

pytestmark = pytest.mark.slow

# The rate follows from the step alone: so a run may be continued for longer than it was begun for.
SIZES = [
    *TINY,
    *("--model.layers", "2", "--model.mlp", "swiglu", "--model.norm", "rms"),
    *("--schedule.name", "constant", "--schedule.warmup_steps", "2"),
    *("--checkpoint.every", "4", "--eval.every", "4", "--train.log_every", "1"),
]
CHAIN = [
    (["--parallel.tensor", "2"], 4),
    (["--parallel.shard", "2", "--parallel.reshard_after_forward", "false"], 8),
    (["--parallel.pipeline", "2"], 12),
    ([], 16),  # one rank
]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a run that continues on another layout every 4 steps, the run on one rank)."""
    root = tmp_path_factory.mktemp("runs")
    for layout, steps in CHAIN:
        flags = ["--train.steps", str(steps), *layout]
        train(root, "chain", [*SIZES, *flags], "mpirun:2" if layout else "")
    one = train(root, "one", [*SIZES, "--train.steps", "16"])
    return root / "chain", one


def test_a_layout_has_another_curve_or_does_not_continue_the_checkpoint_of_another(
    chain: tuple[Path, Path],
) -> None:
    found, wanted = (metrics(folder) for folder in chain)
    assert [line["step"] for line in found] == list(range(1, 17))
    for line, expected in zip(found, wanted, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            if key in expected:
                assert line[key] == pytest.approx(expected[key], rel=1e-5), (key, line["step"])


def test_weights_of_a_checkpoint_in_pieces_are_not_whole(chain: tuple[Path, Path]) -> None:
    checkpoints = chain[0] / "checkpoints"
    split = read_weights(checkpoints / "step_00000012").tensors
    assert (checkpoints / "step_00000012" / "model.rank_00001.safetensors").exists()
    one = read_weights(chain[1] / "checkpoints" / "step_00000012").tensors
    assert split.keys() == one.keys()
    for name, tensor in one.items():
        assert (split[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parallel.tensor", "2"], "1 rank cannot be divided into replicas of 2"),
        (["--parallel.tensor", "2", "--optim.ema_decay", "0.9"], "excludes optim.ema_decay"),
        (["--parallel.place", "[tensor, shard]"], "parallel.place must name each of"),
        (["--parallel.offload", "cpu"], "parallel.offload cpu is about parameters that ranks"),
    ],
)
def test_an_impossible_layout_is_no_sentence(tmp_path: Path, flags: list[str], said: str) -> None:
    done = run(tmp_path, [*TINY, "--run.root", str(tmp_path), *flags])
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr, done


def test_neighbours_on_an_axis_are_on_different_hosts_though_one_has_room() -> None:
    """Also where the launcher numbers the ranks host after host in turns."""
    degrees = ParallelConfig(tensor=2, pipeline=2).degrees
    hosts = ["a", "b"] * 4
    grid = Grid.of(hosts, degrees, ParallelConfig().place)
    for rank in range(8):
        assert {hosts[r] for r in grid.replica_of(rank)} == {hosts[rank]}
        assert rank in grid.same_part(rank)
        assert {hosts[r] for r in grid.same_part(rank)} == {"a", "b"}


def test_the_layout_is_not_printed_without_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, ["--parallel.pipeline", "2", "--print_layout", "node1:2,node2:2"])
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [
        "4 ranks = data 2 x pipeline 2",
        "replica 0 on node1: rank 0 (pipeline 0), rank 1 (pipeline 1)",
        "replica 1 on node2: rank 2 (pipeline 0), rank 3 (pipeline 1)",
    ]
    assert "torch" not in json.dumps(done.stderr)
