"""Runs of models that span ranks: any layout, or a change of layouts, has one rank's losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hvdtrain import cli
from hvdtrain.checkpoint.weights import read_weights
from hvdtrain.parallel.config import AXES, ParallelConfig
from hvdtrain.runtime.mesh import Grid, key_of_degree
from tests.support.runs import TINY, metrics, run, train

pytestmark = pytest.mark.slow

# The rate depends only on the step, so a run may continue for longer than it was begun for.
SIZES = [
    *TINY,
    *("--model.layers", "2", "--model.mlp", "swiglu", "--model.norm", "rms"),
    *("--schedule.name", "constant", "--schedule.warmup_steps", "2"),
    *("--checkpoint.every", "4", "--eval.every", "4", "--train.log_every", "1"),
    *("--optim.ema_decay", "0.8"),
]
# (launcher, degrees, last step); the remaining factor of the ranks is the data axis.
CHAIN = [
    ("mpirun:2", {"context": 2}, 4),
    ("gloo:4", {}, 6),
    ("gloo:4", {"tensor": 2}, 8),
    ("gloo:4", {"pipeline": 2, "shard": 2, "shard.stage": "2"}, 12),
    ("", {}, 16),
]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a run that changes its layout every few steps, the run on one rank).

    Both begin with the weights of a third run.
    """
    root = tmp_path_factory.mktemp("runs")
    begun = train(root, "begun", [*SIZES, "--train.duration", "2", "--seed", "7"])
    sizes = [*SIZES, "--run.init_from", str(begun / "checkpoints/step_00000002")]
    for launcher, degrees, steps in CHAIN:
        axes = [f"--{key_of_degree(axis)}={degree}" for axis, degree in degrees.items()]
        train(root, "chain", [*sizes, *axes, "--train.duration", str(steps)], launcher)
    for steps in (12, 16):  # the last step of a run is saved whatever the writer is doing
        one = train(root, "one", [*sizes, "--train.duration", str(steps)])
    return root / "chain", one


@pytest.mark.smoke
def test_layouts_continue_each_other_with_the_curve_of_one_rank(
    chain: tuple[Path, Path],
) -> None:
    found, wanted = (metrics(directory) for directory in chain)
    assert [line["step"] for line in found] == list(range(1, 17))
    for line, expected in zip(found, wanted, strict=True):
        for key in ("loss", "grad_norm", "validation_loss", "ema_validation_loss"):
            if key in expected:
                assert line[key] == pytest.approx(expected[key], rel=1e-5), (key, line["step"])


def test_run_starts_from_the_weights_of_init_from(chain: tuple[Path, Path]) -> None:
    begun = metrics(chain[0].with_name("begun"))
    assert metrics(chain[0])[0]["loss"] < begun[0]["loss"] - 0.01


def test_weights_of_a_sharded_checkpoint_are_read_whole(chain: tuple[Path, Path]) -> None:
    checkpoints = chain[0] / "checkpoints"
    split = read_weights(checkpoints / "step_00000012").tensors
    assert (checkpoints / "step_00000012" / "model.rank_00001.safetensors").exists()
    one = read_weights(chain[1] / "checkpoints" / "step_00000012").tensors
    assert split.keys() == one.keys()
    for name, tensor in one.items():
        assert (split[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize("more", [[], ["--ema"]])
def test_sharded_checkpoint_is_exported_as_whole_weights(
    chain: tuple[Path, Path], tmp_path: Path, more: list[str]
) -> None:
    found = []
    for directory in chain:
        checkpoint, out = directory / "checkpoints" / "step_00000012", tmp_path / directory.name
        assert cli.main(["ckpt", "export", str(checkpoint), "--out", str(out), *more]) == 0
        found.append(load_file(out / "model.safetensors"))
    split, one = found
    assert split.keys() == one.keys()
    for name, tensor in one.items():
        assert (split[name] - tensor).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--parallel.tensor", "2"], "1 rank cannot be divided into replicas of 2"),
        (
            ["--parallel.tensor", "2", "--optim.name", "muon"],
            "parallel.tensor 2 excludes optim.name",
        ),
        (
            [
                *("--parallel.shard.degree=2", "--parallel.pipeline=2"),
                "--parallel.schedule=zero-bubble",
            ],
            "parallel.shard.degree 2 excludes parallel.schedule zero-bubble",
        ),
        (["--parallel.shard.offload", "cpu"], "offload cpu requires parallel.shard.degree"),
    ],
)
def test_impossible_layout_is_refused_with_the_reason(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    done = run(tmp_path, [*TINY, "--run.root", str(tmp_path), *flags])
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr, done


def test_replica_ranks_share_a_host_if_it_has_room() -> None:
    """Also if the launcher numbers the ranks round-robin over the hosts."""
    degrees = ParallelConfig(tensor=2, pipeline=2).degrees
    hosts = ["a", "b"] * 4
    grid = Grid.of(hosts, degrees, AXES)
    for rank in range(8):
        assert {hosts[r] for r in grid.replica_of(rank)} == {hosts[rank]}
        assert rank in grid.same_shard(rank)
        assert {hosts[r] for r in grid.same_shard(rank)} == {"a", "b"}


def test_grid_groups_ranks_with_the_same_work_or_shard() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=2, context=2)
    grid = Grid.of(["a"] * 16, parallel.degrees, AXES)
    assert grid.stages == [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]
    assert grid.in_step == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert grid.with_same_parameters[0] == (0, 2, 8, 10)
    assert Grid.at([grid.coordinates(rank) for rank in range(16)]) == grid
    plain = Grid.of(["a", "b"], ParallelConfig().degrees, AXES)
    assert plain.stages == [(0, 1)] and plain.in_step == [(0,), (1,)]


def test_print_layout_needs_no_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, ["--parallel.pipeline", "2", "--print_layout", "node1:2,node2:2"])
    assert done.returncode == 0, done
    assert done.stdout.splitlines() == [
        "4 ranks = data 2 x pipeline 2",
        "replica 0 on node1: rank 0 (pipeline 0), rank 1 (pipeline 1)",
        "replica 1 on node2: rank 2 (pipeline 0), rank 3 (pipeline 1)",
    ]
    assert "torch" not in json.dumps(done.stderr)
