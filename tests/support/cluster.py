"""Several hosts on this machine, for tests that run the real launchers between them.

A host is a set of Linux namespaces (network, mount, process, name, IPC) with its own name, address,
sshd, /tmp, /run and /dev/shm. A "switch" is one more network namespace with the bridge that
connects the hosts. Nothing is written to the machine's /etc, ~/.ssh or network: files are covered
by mounts that only the host sees. Only processes keep all of this alive, so the kernel removes it
when they end, and they end with this process, however it ends. Only a directory in /var/tmp can be
left; the next start removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import psutil

from tests.support import warm
from tests.support.job import Finished, Job, poll
from tests.support.namespaces import ENVIRONMENT, NAMESPACES, check, pid_namespace

# Not /tmp, which each host has for itself; all hosts see this directory.
PARENT = Path("/var/tmp")
PREFIX = "hvdtrain-cluster-"

SSHD_CONFIG = """\
HostKey {directory}/{name}/host_key
AuthorizedKeysFile {directory}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
# A launcher opens one session per rank at once; by default sshd drops some beyond ten.
MaxStartups 200
MaxSessions 200
SetEnv PATH={path}
"""
SSH_CONFIG = """\
Host {names}
    User root
    IdentityFile {directory}/key
    IdentitiesOnly yes
    BatchMode yes
    ConnectTimeout 10
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
"""


class ClusterDirectory:
    """A new directory with everything that `host.sh` needs.

    A lock that the kernel releases with its owner distinguishes the directory of a live cluster
    from a leftover. Leftovers are removed before a directory is created.

    Attributes:
        path: the directory; it contains a directory for each host, with the host's name.
        shared: a directory in it for the tests' files.
    """

    def __init__(self, hosts: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Create it for `hosts` (name -> IPv4 address); ssh sessions get PATH of `environment`."""
        with _directories_lock():
            remove_leftovers()
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=PARENT))
            self._lock = _try_lock(self.path)
        self.shared = self.path / "shared"
        self.shared.mkdir()
        self.write_names(hosts)
        ssh_config = SSH_CONFIG.format(names=" ".join(hosts), directory=self.path)
        (self.path / "ssh_config").write_text(ssh_config)
        # Without PAM sshd rejects an account whose password is locked, as root's often is.
        (self.path / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        (self.path / "empty").touch()
        _make_key(self.path / "key", environment)
        for name in hosts:
            own = self.path / name
            own.mkdir()
            _make_key(own / "host_key", environment)
            config = SSHD_CONFIG.format(directory=self.path, name=name, path=environment["PATH"])
            (own / "sshd_config").write_text(config)

    def write_names(self, hosts: Mapping[str, str]) -> None:
        """Write the names that hosts can resolve (name -> IPv4 address)."""
        names = "".join(f"{address} {name}\n" for name, address in hosts.items())
        text = f"127.0.0.1 localhost\n{names}".encode()
        # In place, because hosts have mounted this file; in one write, because they read it
        # meanwhile.
        descriptor = os.open(self.path / "hosts", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            os.pwrite(descriptor, text.ljust(size, b"\n"), 0)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the directory; may be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.path)
            os.close(self._lock)
            self._lock = None


def remove_leftovers() -> None:
    """Remove the directories of clusters whose process was killed; their hosts ended with it."""
    for directory in PARENT.glob(f"{PREFIX}*"):
        lock = _try_lock(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def _directories_lock() -> Iterator[None]:
    """Prevent another cluster's start from removing a directory that is being created."""
    descriptor = os.open(PARENT, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the directory's lock; None if a live process holds it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _make_key(file: Path, environment: Mapping[str, str]) -> None:
    command = [
        "ssh-keygen",
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        "hvdtrain-test",
        "-f",
        str(file),
    ]
    subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, timeout=20)


REPOSITORY = Path(__file__).resolve().parents[2]
RANK = r"\S*python\S* -m hvdtrain\.train\b"
SUBNET = "10.207.0"
_WARM = Path("/run/warm")  # of each host


@dataclass(frozen=True)
class Process:
    """A process on a host; `pid` is this machine's number for it, not the host's."""

    pid: int
    host: str
    command: str


class Cluster:
    """Hosts with the given names, running inside the `with` block.

    Args:
        sshd: whether each host runs sshd.

    Attributes:
        shared: a directory that all hosts and this process see at the same path. They also share
            the repository and the virtual environment, but not /tmp.
        python: on every host, a `python` whose ranks start immediately, see warm.py.

    Raises:
        RuntimeError: a host did not start; the message contains its log.
    """

    def __init__(self, names: Sequence[str], sshd: bool = True) -> None:
        self.names = list(names)
        self._sshd = sshd
        self._inits: dict[str, psutil.Process] = {}
        self._holders: list[subprocess.Popen[bytes]] = []
        self._jobs: list[Job] = []
        self._warm = False

    def __enter__(self) -> Cluster:
        hosts = {name: self._address(name) for name in self.names}
        self._directory = ClusterDirectory(hosts, ENVIRONMENT)
        self.shared = self._directory.shared
        atexit.register(self.close)
        try:
            self._start_switch()
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the cluster and remove its directory; may be called twice."""
        atexit.unregister(self.close)
        for name in list(self._inits):
            self.kill_host(name)
        for job in self._jobs:
            job.kill()
        for holder in self._holders:
            holder.kill()
            holder.wait(10)
        self._directory.remove()

    def start(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
    ) -> Job:
        """Start a command on a host; `env` is added to ENVIRONMENT."""
        # setsid: inside the namespace, a session led from outside would have the number 0.
        prefix = [*self._enter(host), "setsid", "--wait", "env", f"--chdir={cwd}"]
        output = self._directory.path / f"job{len(self._jobs)}"
        argv = [self._shared_copy(word) for word in argv]
        job = Job(prefix, argv, ENVIRONMENT | dict(env or {}), output)
        self._jobs.append(job)
        return job

    def _shared_copy(self, word: str) -> str:
        """Return a path that hosts see in place of one in the memory of this process."""
        if not word.startswith(f"/proc/{os.getpid()}/fd/"):
            return word
        copy = self.shared / word.replace("/", "_")
        copy.write_bytes(Path(word).read_bytes())
        return str(copy)

    @property
    def python(self) -> str:
        path = self._directory.path / "python"
        if not self._warm:
            self._warm = True
            warm.write_command(path, _WARM, 1)
            for host in self._inits:
                self._warm_up(host)
        return str(path)

    @property
    def forked(self) -> str:
        """On every host, a command that precedes `python -m MODULE`, see warm.prefix."""
        path = self._directory.path / "forked"
        if not path.exists():
            warm.write_prefix(path, self.python)
        return str(path)

    def run(
        self,
        host: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        timeout: float = 60,
    ) -> Finished:
        """Call `start` and `Job.wait`; AssertionError if it takes more than `timeout` seconds."""
        return self.start(host, argv, env, cwd).wait(timeout)

    def processes(self, host: str | None = None, containing: str = "") -> list[Process]:
        """Return the live processes of one host, or of all hosts, oldest first, without zombies.

        Args:
            containing: only processes with this text in their command line.
        """
        found = [p for name in ([host] if host else self.names) for p in self._processes(name)]
        return [process for process in found if containing in process.command]

    def ranks(self, host: str | None = None) -> list[Process]:
        """Return the processes that train, without launchers and shells, which only name it."""
        return [p for p in self.processes(host) if re.match(RANK, p.command)]

    def kill(self, processes: Iterable[Process]) -> None:
        """Kill processes with SIGKILL; it is not an error if one has already ended."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def file(self, host: str, path: str) -> Path:
        """Return this process's path of a file that only the host sees, such as one in /tmp."""
        return Path(f"/proc/{self._inits[host].pid}/root") / path.lstrip("/")

    def link(self, host: str, up: bool) -> None:
        """Cut a host's link, or restore it: packets are lost, and nothing is refused."""
        self._switch("ip", "link", "set", self._port(host), "up" if up else "down")

    def path_mtu(self, host: str, size: int) -> None:
        """Set the largest packet that reaches a host: larger ones are lost without notification."""
        self._switch("ip", "link", "set", self._port(host), "mtu", str(size))

    def connections(self, host: str, to: str, port: int, leave: bool) -> None:
        """Block a host's connections to a TCP port of another host, or allow them again."""
        self._firewall(host, leave, "to", self._address(to), "ipproto", "tcp", "dport", str(port))

    def part(self, host: str, other: str, leave: bool) -> None:
        """Drop all packets between two hosts, or let them pass again."""
        for one, peer in ((host, other), (other, host)):
            self._firewall(one, leave, "to", self._address(peer))

    def resolve(self, names: Iterable[str]) -> None:
        """Set the hosts whose names all hosts can resolve; initially all of them."""
        self._directory.write_names({name: self._address(name) for name in names})

    def _address(self, host: str) -> str:
        return f"{SUBNET}.{self.names.index(host) + 1}"

    def _firewall(self, host: str, leave: bool, *what: str) -> None:
        rule = ["rule", "delete" if leave else "add", *what, "blackhole", "pref", "10"]
        check(["nsenter", "--target", str(self._inits[host].pid), "--net", "ip", *rule])

    def cable(self, ends: Mapping[str, str], subnet: str) -> None:
        """Connect two hosts directly; deleting one end removes both.

        Args:
            ends: host -> name of its interface.
            subnet: such as "10.209.0"; addresses are otherwise the same as in `SUBNET`.
        """
        own, peer = ((name, str(self._inits[host].pid)) for host, name in ends.items())
        names = ["name", own[0], "netns", own[1], "type", "veth"]
        names += ["peer", "name", peer[0], "netns", peer[1]]
        self._switch("ip", "link", "add", *names)
        for host, name in ends.items():
            address = f"{subnet}.{self.names.index(host) + 1}/24"
            target = ["nsenter", "--target", str(self._inits[host].pid), "--net", "ip"]
            check([*target, "addr", "add", address, "dev", name])
            check([*target, "link", "set", name, "up"])
        # Each interface has a carrier once both are up; the kernel reports it up to a second later.
        for host, name in ends.items():
            poll(partial(self._has_carrier, host, name), 10, f"the carrier of {name}")

    def _has_carrier(self, host: str, interface: str) -> bool:
        return "state UP" in self.run(host, ["ip", "link", "show", "dev", interface]).stdout

    def kill_host(self, host: str) -> None:
        """End all processes of a host at once, like a power failure; `boot` starts it again."""
        init = self._inits.pop(host)
        # Cut the link first: ending processes close their connections, a power failure does not.
        with contextlib.suppress(RuntimeError):
            self._switch("ip", "link", "delete", self._port(host))
        with contextlib.suppress(psutil.NoSuchProcess):
            init.kill()
            init.wait(10)

    def is_up(self, host: str) -> bool:
        return host in self._inits

    def boot(self, host: str) -> None:
        """Start a host and wait until it responds, to ssh if it runs sshd."""
        log = self._directory.path / host / "log"
        visible = [str(REPOSITORY), sys.prefix, sys.base_prefix]
        script = [str(Path(__file__).with_name("host.sh")), host, str(self._directory.path)]
        script += ["sshd" if self._sshd else "none"]
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child=KILL", "--mount-proc"]
        holder = self._hold([*unshare, "sh", *script, *visible], log)
        try:
            self._inits[host] = _only_child(holder)
            self._plug_in(host)
            poll(lambda: self._answers(host), 20, f"an answer of {host}")
            if self._warm:
                self._warm_up(host)
        except (AssertionError, psutil.Error, subprocess.SubprocessError) as error:
            raise RuntimeError(f"{host} did not come up: {error}\n{log.read_text()}") from error

    def _warm_up(self, host: str) -> None:
        """Start the parent of its ranks, which ends with the host or with this process."""
        sockets = self.file(host, str(_WARM))
        sockets.mkdir()
        prefix = [*self._enter(host), "env", f"--chdir={REPOSITORY}"]
        self._holders.append(warm.start_parent(sockets / "0", ENVIRONMENT, prefix))

    def _start_switch(self) -> None:
        self._bridge = self._hold(["unshare", "--net", "sleep", "infinity"], Path(os.devnull))
        # Until unshare has run, the process is still in this machine's network namespace.
        ours = os.readlink("/proc/self/ns/net")
        theirs = f"/proc/{self._bridge.pid}/ns/net"
        poll(lambda: os.readlink(theirs) != ours, 10, "the switch's namespace")
        self._switch("ip", "link", "add", "name", "br0", "type", "bridge")
        self._switch("ip", "link", "set", "br0", "up")

    def _plug_in(self, host: str) -> None:
        port, pid = self._port(host), str(self._inits[host].pid)
        number = self.names.index(host) + 1
        address = f"{SUBNET}.{number}/24"
        # A fixed hardware address: after a reboot the other hosts still know the old one.
        peer = ["peer", "name", "eth0", "address", f"02:00:00:00:00:{number:02x}", "netns", pid]
        self._switch("ip", "link", "add", "name", port, "type", "veth", *peer)
        self._switch("ip", "link", "set", port, "master", "br0", "up")
        for command in (["addr", "add", address, "dev", "eth0"], ["link", "set", "eth0", "up"]):
            check(["nsenter", "--target", pid, "--net", "ip", *command])

    def _answers(self, host: str) -> bool:
        # Without sshd: the last thing that host.sh does before it waits.
        command = ["ssh", host, "true"] if self._sshd else ["pgrep", "-x", "sleep"]
        return self.run(host, command, cwd=Path("/"), timeout=20).returncode == 0

    def _processes(self, host: str) -> list[Process]:
        namespace = pid_namespace(self._inits[host].pid) if host in self._inits else None
        if namespace is None:
            return []
        found = []
        # Tests call this often, so nothing else is read of other processes.
        for pid in filter(lambda pid: pid_namespace(pid) == namespace, psutil.pids()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    command = " ".join(process.cmdline()).rstrip()
                    found.append((process.create_time(), Process(pid, host, command)))
        return [process for _, process in sorted(found, key=itemgetter(0))]

    def _enter(self, host: str) -> list[str]:
        return ["nsenter", "--target", str(self._inits[host].pid), *NAMESPACES, "--"]

    def _switch(self, *command: str) -> None:
        check(["nsenter", "--target", str(self._bridge.pid), "--net", *command])

    def _port(self, host: str) -> str:
        # By number, because a link's name has at most 15 characters and a host's may have more.
        return f"port{self.names.index(host) + 1}"

    def _hold(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process that is killed when this process ends, even by SIGKILL."""
        with log.open("wb") as output:
            holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._holders.append(holder)
        return holder


def _only_child(holder: subprocess.Popen[bytes]) -> psutil.Process:
    parent = psutil.Process(holder.pid)
    poll(lambda: bool(parent.children()) or holder.poll() is not None, 10, "the first process")
    return parent.children()[0]
