"""Launcher variables read before Horovod starts, and settings made for Horovod and MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import LauncherError, UserError
from hvdtrain.runtime import environment
from hvdtrain.runtime.environment import (
    forget_launcher,
    launched_local_rank,
    launched_local_size,
    launched_rank,
    launched_size,
    prepare,
)
from hvdtrain.runtime.machine import has_rdma
from tests.support.runs import TINY, losses, run

LAUNCHERS = {
    "horovodrun": {
        "HOROVOD_RANK": "3", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "srun": {
        "PMIX_RANK": "3", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
    },
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_and_sizes_are_read_from_every_launcher(launcher: str) -> None:
    env = LAUNCHERS[launcher]
    assert (launched_rank(env), launched_size(env), launched_local_size(env)) == (3, 4, 2)


def test_process_without_launcher_is_rank_0_alone() -> None:
    assert (launched_rank({}), launched_size({}), launched_local_size({})) == (0, None, 1)


@pytest.mark.parametrize("launcher", [None, *LAUNCHERS])
def test_user_settings_are_not_overwritten(launcher: str | None) -> None:
    launched = LAUNCHERS[launcher] if launcher else {}
    env = dict(launched)
    prepare(env, host_cores=1)
    users = {key: launched.get(key, "the user's") for key in env}
    kept = dict(users)
    prepare(users, host_cores=1)
    assert users == kept and "the user's" in kept.values()


def test_user_settings_in_an_open_mpi_file_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".openmpi/mca-params.conf"
    file.parent.mkdir()
    file.write_text("# mine\nbtl_tcp_flags = 3\n")
    env: dict[str, str] = {}
    prepare(env, host_cores=1)
    assert "OMPI_MCA_btl_tcp_flags" not in env
    assert env["OMPI_MCA_btl_tcp_eager_limit"] == "262144"


def test_single_process_does_not_start_mpi() -> None:
    alone: dict[str, str] = {}
    prepare(alone, host_cores=8)
    assert alone["HOROVOD_CONTROLLER"] == alone["HOROVOD_CPU_OPERATIONS"] == "gloo"
    for env in LAUNCHERS.values():
        launched = dict(env)
        prepare(launched, host_cores=8)
        assert launched.get("HOROVOD_CONTROLLER") is None


@pytest.mark.parametrize(("cores", "yields"), [(1, True), (2, True), (3, False)])
def test_idle_ranks_yield_only_when_they_share_cores(cores: int, yields: bool) -> None:
    env = dict(LAUNCHERS["mpirun"])
    prepare(env, cores)
    assert ("OMPI_MCA_mpi_yield_when_idle" in env) is yields


@pytest.mark.parametrize("asked", [False, True])
def test_hierarchical_all_reduce_is_used_only_if_requested(asked: bool) -> None:
    env = dict(LAUNCHERS["mpirun"])
    prepare(env, host_cores=8, hierarchical=asked)
    assert env["HOROVOD_HIERARCHICAL_ALLREDUCE"] == str(int(asked))


@pytest.mark.parametrize(
    ("launcher", "of_host", "more", "expected"),
    [
        ("horovodrun --gloo", 4, {}, "1"),
        ("horovodrun --gloo", 1, {}, "0"),
        ("horovodrun --gloo", 8, {}, "0"),
        ("horovodrun --gloo", 3, {}, "0"),
        ("horovodrun --gloo", 4, {"HOROVOD_ELASTIC": "1"}, "0"),
        ("mpirun", 4, {}, "0"),
    ],
)
def test_gloo_all_reduce_is_hierarchical_only_when_that_is_faster(
    launcher: str, of_host: int, more: dict[str, str], expected: str
) -> None:
    gloo = {"HOROVOD_SIZE": "8", "HOROVOD_LOCAL_SIZE": str(of_host), "HOROVOD_CONTROLLER": "gloo"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": str(of_host)}
    env = (mpi if launcher == "mpirun" else gloo) | more
    prepare(env, host_cores=8)
    assert env["HOROVOD_HIERARCHICAL_ALLREDUCE"] == expected


def test_wait_for_a_missing_rank_is_bounded() -> None:
    env: dict[str, str] = {}
    prepare(env, host_cores=2)
    assert 0 < int(env["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]) <= 1800


@pytest.mark.parametrize(("ranks", "seconds"), [(4, 3), (64, 3), (256, 5), (1000, 13), (9999, 30)])
def test_elastic_gloo_timeout_scales_with_world_size(ranks: int, seconds: int) -> None:
    env = {"HOROVOD_ELASTIC": "1", "HOROVOD_SIZE": str(ranks)}
    prepare(env, host_cores=2)
    assert int(env["HOROVOD_GLOO_TIMEOUT_SECONDS"]) == seconds


def test_preparing_the_environment_loads_neither_torch_nor_horovod() -> None:
    code = (
        "import sys, hvdtrain.runtime.environment as e; e.prepare();"
        "sys.exit('torch' in sys.modules or 'horovod' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("device", "ranks", "ring"),
    [
        (None, 1, True),
        (None, 2, False),
        ("infiniband/mlx5_0", 1, False),
        ("cxi/cxi0", 1, False),
    ],
)
def test_ring_all_reduce_is_used_only_over_tcp_with_one_rank_per_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, ranks: int, ring: bool
) -> None:
    if device:
        (tmp_path / "sys/class" / device).mkdir(parents=True)
    monkeypatch.setattr(environment, "has_rdma", lambda: has_rdma(tmp_path))
    env = {**LAUNCHERS["mpirun"], "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)}
    prepare(env, host_cores=1)
    assert ("HOROVOD_MPI_RING_ALLREDUCE" in env) is ring


AGENT = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
# Torch's env:// rendezvous: rank 3 of 4.
OF_TORCH = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}  # fmt: skip
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_NPROCS": "16"}


@pytest.mark.parametrize(
    ("env", "size", "rank"),
    [
        ({}, None, 0),
        # One process in a job script, and in the shell of salloc, which is a step of one task.
        (BATCH_SCRIPT, None, 0),
        ({**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 1, 0),
        *((env, 4, 3) for env in LAUNCHERS.values()),
        *(({**BATCH_SCRIPT, **env}, 4, 3) for env in LAUNCHERS.values()),
        ({"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4"}, 4, 3),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, 4, 3),
        ({**OF_TORCH, **AGENT}, 4, 3),
        ({**OF_TORCH, "LOCAL_SIZE": "2"}, 4, 3),  # deepspeed
        ({k: v for k, v in OF_TORCH.items() if k != "LOCAL_RANK"}, 4, 3),  # PyTorchJob
        ({**OF_TORCH, **AGENT, "RANK": "0", "WORLD_SIZE": "1"}, 1, 0),
        # srun or mpirun has started torchrun on two hosts.
        ({**OF_TORCH, **AGENT, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, 4, 3),
        ({**OF_TORCH, **AGENT, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, 4, 3),
        # horovodrun, or mpirun in a script that sets torch's variables for other programs.
        ({**OF_TORCH, **AGENT, "HOROVOD_SIZE": "8", "HOROVOD_RANK": "7"}, 8, 7),
        ({**OF_TORCH, "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "7"}, 8, 7),
    ],
)  # fmt: skip
def test_launcher_of_this_process_is_recognized_among_outer_ones(
    env: dict[str, str], size: int | None, rank: int
) -> None:
    assert (launched_size(env), launched_rank(env)) == (size, rank)
    prepare(dict(env), host_cores=8)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
        ({"WORLD_SIZE": "4", "RANK": "3", "SLURM_NTASKS": "4"}, "WORLD_SIZE=4"),
        ({**OF_TORCH, "MASTER_PORT": ""}, "WORLD_SIZE=4"),
        (OF_TORCH, "WORLD_SIZE=4"),  # a local rank without the number of local ranks
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
    ],
)
def test_process_among_others_that_cannot_be_served_is_refused(
    env: dict[str, str], named: str
) -> None:
    env = dict(env)
    with pytest.raises(LauncherError, match=rf"{named} in the environment.*runtime\.standalone"):
        prepare(env, host_cores=8)
    forget_launcher(env)
    prepare(env, host_cores=8)
    assert (launched_size(env), launched_rank(env), env.get("RANK")) == (None, 0, None)


def test_torchrun_ranks_use_gloo_without_mpi() -> None:
    env = OF_TORCH | AGENT
    assert (launched_local_rank(env), launched_local_size(env)) == (1, 2)
    prepare(env, host_cores=8)
    assert env["HOROVOD_CONTROLLER"] == env["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert env["HOROVOD_HIERARCHICAL_ALLREDUCE"] == "1"


@pytest.mark.parametrize("env", [LAUNCHERS["horovodrun"], {"HOROVOD_ELASTIC": "1"}])
def test_ranks_of_horovodrun_cannot_be_standalone(env: dict[str, str]) -> None:
    with pytest.raises(UserError, match="horovodrun starts the ranks of one run"):
        forget_launcher(dict(env))


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_standalone_process_forgets_its_launcher(launcher: str) -> None:
    env = dict(LAUNCHERS[launcher])
    forget_launcher(env)
    assert (launched_size(env), launched_rank(env), launched_local_size(env)) == (None, 0, 1)


@pytest.mark.slow
def test_process_that_would_train_alone_ends_unless_standalone(tmp_path: Path) -> None:
    others = {"WORLD_SIZE": "4"}
    done = run(tmp_path, [*TINY, "--run.root", str(tmp_path / "runs")], env=others)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "hvdtrain: error: WORLD_SIZE=4 in the environment" in done.stderr
    assert not (tmp_path / "runs").exists()
    alone = ["--train.duration", "2", "--run.root", str(tmp_path), "--run.id", "alone"]
    done = run(tmp_path, [*TINY, *alone, "--runtime.standalone", "true"], env=others)
    assert done.returncode == 0 and len(losses(tmp_path / "alone")) == 2, done


@pytest.mark.slow
def test_ranks_of_a_launcher_that_horovod_does_not_see_end_with_one_error(tmp_path: Path) -> None:
    # As `srun --mpi=none -n 2` starts them.
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "OMPI_MCA_ess": "^slurm"}
    env = step | {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    done = run(tmp_path, [*TINY, "--run.root", str(tmp_path / "runs")], env=env)
    assert (done.returncode, done.stderr) == (2, ""), done
    done = run(tmp_path, [*TINY, "--run.root", str(tmp_path)], env=env | {"SLURM_PROCID": "0"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done
    assert "the launcher started 2 ranks, but Horovod sees 1" in done.stderr, done
