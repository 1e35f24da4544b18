"""Launcher variables read before Horovod starts, and settings made for Horovod and MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.runtime import environment
from hvdtrain.runtime.environment import (
    launched_local_size,
    launched_rank,
    launched_size,
    prepare,
    torchrun_rank,
)
from hvdtrain.runtime.machine import has_rdma
from tests.support.runs import TINY
from tests.support.runs import environment as environment_of_a_run

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


def test_batch_script_variables_are_not_taken_for_a_launcher() -> None:
    # sbatch sets them for its script, which is one process whatever the job's size.
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_NPROCS": "16"}
    assert (launched_rank(script), launched_size(script)) == (0, None)
    # mpirun inside a Slurm job: every rank inherits the script's SLURM_PROCID.
    assert launched_rank({**script, **LAUNCHERS["mpirun"]}) == 3


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


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1"}


@pytest.mark.parametrize(
    ("env", "found"),
    [
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (1, 2)),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "SLURM_STEP_NUM_TASKS": "1"}, (1, 2)),
        (TORCHRUN, (1, 2)),
        ({**TORCHRUN, "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        *(({**TORCHRUN, **launched}, None) for launched in LAUNCHERS.values()),
        ({**TORCHRUN, "HOROVOD_ELASTIC": "1"}, None),
    ],
)
def test_torchrun_is_recognized_unless_another_launcher_started_the_rank(
    env: dict[str, str], found: tuple[int, int] | None
) -> None:
    assert torchrun_rank(env) == found


@pytest.mark.slow
def test_torchrun_is_rejected_with_one_error_and_starts_no_runs(tmp_path: Path) -> None:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    train = ["-m", "hvdtrain.train", *TINY, "--run.root", str(tmp_path / "runs")]
    done = subprocess.run(
        [*torchrun, *train], env=environment_of_a_run({}), capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.stderr.count("hvdtrain: error: torchrun started 2 processes") == 1, done
    assert done.stderr.count("exitcode  : 2") >= 1, done  # as torchrun reports it
    assert done.returncode != 0 and not (tmp_path / "runs").exists()
