"""A real Slurm on the hosts of a test cluster: one controller, and a daemon on each host.

All of its files are in the cluster's directory and its daemons are processes of the hosts, so it
ends with the cluster. A Slurm installation of this machine is not touched.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence

from tests.support.cluster import Cluster
from tests.support.job import Finished, Job, poll
from tests.support.namespaces import ENVIRONMENT

PROGRAMS = ["munged", "sbatch", "scancel", "scontrol", "slurmctld", "slurmd", "srun"]
# KillWait: from a job's SIGTERM to its SIGKILL. GraceTime: from a preemption to that SIGTERM, after
# a SIGTERM for srun's processes only. In seconds, long enough for a busy machine. cred_expire also
# delays the restart of a requeued job: 120 s by default.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=15
OverTimeLimit=0
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
NodeName={nodes} CPUs={cpus} RealMemory=1000
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Return why Slurm cannot be started on this machine; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    return f"not installed: {', '.join(missing)} (slurm-wlm, munge)" if missing else None


class Slurm:
    """Slurm with the partitions `low` (default, may be preempted) and `high`.

    Args:
        cluster: its first host runs the controller and the commands.
        cpus: configured number of processors of each host.

    Raises:
        RuntimeError: a daemon did not start; the message contains its log.
    """

    def __init__(self, cluster: Cluster, cpus: int = 2) -> None:
        self.cluster = cluster
        self._controller = cluster.names[0]
        self._directory = cluster.shared.parent / "slurm"
        self._directory.mkdir()
        self.env = {"SLURM_CONF": str(self._directory / "slurm.conf")}
        self._configure(cpus)
        self._daemons: list[Job] = []
        try:
            self._start_daemons()
        except AssertionError as error:
            logs = "\n".join(daemon.output() for daemon in self._daemons)
            raise RuntimeError(f"Slurm did not come up: {error}\n{logs}") from error

    def run(self, *argv: str, env: Mapping[str, str] | None = None, code: int = 0) -> Finished:
        """Run a Slurm command in the repository's directory; it must end with exit code `code`."""
        done = self.cluster.run(self._controller, argv, self.env | dict(env or {}))
        assert done.returncode == code, done
        return done

    def sbatch(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
        """Submit a job (sbatch's options, the script and its arguments); return its number."""
        return int(self.run("sbatch", "--parsable", *argv, env=env).stdout)

    def field(self, job: int, name: str) -> str:
        """Return a field such as JobState, ExitCode ("75:0"), Restarts or Reason."""
        shown = self.run("scontrol", "show", "job", str(job)).stdout
        found = re.search(rf"\b{name}=(\S*)", shown)
        assert found, f"no {name} in {shown}"
        return found[1]

    def state(self, job: int) -> str:
        """Return the state, such as PENDING, RUNNING, COMPLETED or FAILED."""
        return self.field(job, "JobState")

    def wait(self, job: int, state: str, timeout: float) -> None:
        """Wait until the job is in a state; AssertionError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (now := self.state(job)) != state:
            late = time.monotonic() > deadline
            assert not late, f"job {job} is {now}, not {state}, after {timeout} s"
            time.sleep(0.5)  # not `poll`: each query starts a process

    def _configure(self, cpus: int) -> None:
        for name in self.cluster.names:
            (self._directory / name).mkdir()
        text = CONFIGURATION.format(
            controller=self._controller,
            nodes=",".join(self.cluster.names),
            cpus=cpus,
            directory=self._directory,
        )
        (self._directory / "slurm.conf").write_text(text)
        # Not the machine's cgroups, which the daemons must not change.
        (self._directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
        key = self._directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _start_daemons(self) -> None:
        for name in self.cluster.names:
            # In the host's own /run.
            socket = self.cluster.file(name, "/run/munge/munge.socket.2")
            socket.parent.mkdir(mode=0o755)
            files = {"key": "munge.key", "log": f"{name}/munge.log", "seed": f"{name}/munge.seed"}
            options = [f"--{kind}-file={self._directory / file}" for kind, file in files.items()]
            self._start(name, "munged", "--foreground", *options)
            poll(socket.exists, 20, f"munged on {name}")
        self._start(self._controller, "slurmctld", "-D")
        for name in self.cluster.names:
            self._start(name, "slurmd", "-D", "-N", name)
        poll(self._up, 60, "idle nodes")

    def _start(self, host: str, *argv: str) -> None:
        self._daemons.append(self.cluster.start(host, argv, self.env))

    def _up(self) -> bool:
        argv = ["sinfo", "--noheader", "--states=idle", "--partition=low", "--format=%D"]
        done = self.cluster.run(self._controller, argv, self.env)
        return done.stdout.strip() == str(len(self.cluster.names))
