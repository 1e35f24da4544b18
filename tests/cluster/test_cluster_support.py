"""The hosts of the cluster tests, without training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import REPOSITORY, Cluster
from tests.support.job import poll

RANKS = 4
SUM_OVER_RANKS = """
import socket, torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum).item()
print(f"host={socket.gethostname()} rank={hvd.rank()} local={hvd.local_rank()} total={total}\\n")
"""
OWNER = """
import time
from tests.support.cluster import Cluster
with Cluster(["lone1", "lone2"]) as cluster:
    print(cluster.shared.parent, *(process.pid for process in cluster.processes()), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("horovodrun --gloo -np 4 -H node1:2,node2:2", marks=pytest.mark.soak),
        pytest.param("horovodrun --mpi -np 4 -H node1:2,node2:2", marks=pytest.mark.soak),
        "mpirun -np 4 --hostfile {hostfile}",
    ],
    ids=["gloo", "mpi", "mpirun"],
)
def test_launcher_reaches_both_hosts_and_ranks_sum(
    cluster: Cluster, runs: Path, launcher: str
) -> None:
    hostfile = runs / "hostfile"
    hostfile.write_text("node1 slots=2\nnode2 slots=2\n")
    argv = [*launcher.format(hostfile=hostfile).split(), "python", "-c", SUM_OVER_RANKS]
    done = cluster.run("node1", argv, timeout=120)
    assert done.returncode == 0, done
    for rank in range(RANKS):
        host = f"node{rank // 2 + 1}"
        assert f"host={host} rank={rank} local={rank % 2} total=6.0" in done.stdout, done


def test_hosts_have_their_own_names_and_the_python_of_this_environment(cluster: Cluster) -> None:
    for name in cluster.names:
        done = cluster.run("node1", ["ssh", name, "hostname; command -v python"])
        assert done.stdout.split() == [name, f"{sys.prefix}/bin/python"], done


def test_hosts_share_the_test_directory_but_not_tmp(cluster: Cluster, runs: Path) -> None:
    cluster.file("node1", "/tmp/private").write_text("mine")
    (runs / "shared").write_text("ours")
    files = ["cat", "/tmp/private", str(runs / "shared")]
    assert cluster.run("node1", files).stdout == "mineours"
    assert cluster.run("node2", files).stdout == "ours"


def test_cut_link_isolates_a_host_until_it_is_restored(cluster: Cluster) -> None:
    probe = ["ssh", "-o", "ConnectTimeout=2", "node2", "hostname"]
    cluster.link("node2", up=False)
    try:
        assert cluster.run("node1", probe).returncode == 255
    finally:
        cluster.link("node2", up=True)
    assert cluster.run("node1", probe).returncode == 0


def test_dead_host_loses_its_processes_and_boots_again(cluster: Cluster) -> None:
    job = cluster.start("node2", ["sleep", "60"])
    cluster.kill_host("node2")
    try:
        assert job.wait(10).returncode == -signal.SIGKILL
        assert cluster.processes("node2") == []
    finally:
        cluster.boot("node2")
    assert cluster.run("node1", ["ssh", "node2", "hostname"]).stdout == "node2\n"


def test_command_is_killed_after_its_timeout(cluster: Cluster) -> None:
    with pytest.raises(AssertionError, match="still running after 1 s"):
        cluster.run("node1", ["sleep", "60"], timeout=1)
    assert cluster.processes("node1", containing="sleep 60") == []


def test_error_inside_the_block_leaves_no_trace(cluster: Cluster) -> None:
    before = _machine()
    with pytest.raises(ZeroDivisionError), Cluster(["lone"]) as lone:
        pids = [process.pid for process in lone.processes()]
        assert pids
        raise ZeroDivisionError
    assert not any(map(psutil.pid_exists, pids))
    assert not lone.shared.parent.exists()
    assert _machine() == before


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ended_owner_leaves_no_trace(cluster: Cluster, end: signal.Signals) -> None:
    before = _machine()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert owner.stdout is not None
    with owner.stdout:
        directory, *pids = owner.stdout.readline().split()
    owner.send_signal(end)
    owner.wait(20)
    assert len(pids) >= 2  # sshd may still be ending the session that found it ready
    poll(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), 10, "the hosts' end")
    with Cluster([]):  # any later start removes the leftovers of a killed cluster
        assert not Path(directory).exists()
    assert _machine() == before


def _machine() -> dict[str, object]:
    """State of the machine that a cluster must not change."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True)
    files = {file: Path(file).read_bytes() for file in ("/etc/hosts", "/etc/ssh/ssh_config")}
    directories = ["/run/netns", "/etc/ssh/ssh_config.d", str(Path.home() / ".ssh")]
    listings = {f: sorted(os.listdir(f)) for f in directories if os.path.isdir(f)}
    mounts = Path("/proc/self/mounts").read_text()
    return {"links": links.stdout, "mounts": mounts, **files, **listings}
