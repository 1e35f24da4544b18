"""`hvdtrain doctor` between two hosts: each fault is injected, reported, fixed, and then absent.

Three faults cannot be injected on one machine: a wrong clock (hosts in namespaces share the
kernel's clock), a file system without flock, and a faulty GPU. tests/single/test_doctor.py tests
these with simulated facts of hosts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.cluster import REPOSITORY, Cluster
from tests.support.doctored import (
    BASHRC,
    BOTH,
    OF_A_HOST,
    OF_A_LOGIN,
    TOGETHER,
    Examined,
    Fault,
    named,
)
from tests.support.namespaces import ENVIRONMENT

# Load on the hosts, such as another test, is also a finding.
pytestmark = [pytest.mark.alone, pytest.mark.timeout(150)]


@pytest.fixture
def doctor(cluster: Cluster, runs: Path) -> Examined:
    return Examined(cluster, runs)


@contextmanager
def _made(doctor: Examined, fault: Fault) -> Iterator[None]:
    shared = doctor.cluster.shared
    places = {
        "root": doctor.root,
        "package": REPOSITORY / "hvdtrain",
        "bin": Path(sys.prefix, "bin"),
        "shared": shared,
        "directory": shared.parent,
    }

    def do(command: str) -> None:
        for name, path in places.items():
            command = command.replace(f"{{{name}}}", str(path))
        for host in fault.on.split():
            doctor.on(host, command)

    do(fault.make)
    try:
        yield
    finally:
        do(fault.undo)


def _check(doctor: Examined, faults: Sequence[Fault], cwd: Path = REPOSITORY) -> None:
    """Create the faults at once; check that they are reported, fixed and absent."""
    with ExitStack() as fixed, ExitStack() as undone:
        for fault in faults:
            stack = fixed if fault.fixable else undone
            stack.enter_context(_made(doctor, fault))
        path = {"PATH": f"/tmp/other:{ENVIRONMENT['PATH']}"}  # node1 has no such directory
        findings = doctor.findings(hosts=faults[0].hosts, cwd=cwd, env=path)
        for fault in faults:
            found = named(findings, fault.check, fault.where)
            assert fault.says in found["what"] and found["severity"] == fault.severity, found
            assert found["why"] and found["mend"], found
            if fault.fixable:
                for host in fault.on.split():
                    doctor.on(host, found["mend"])
        undone.close()
        if any(fault.fixable for fault in faults):
            assert doctor.findings(cwd=cwd) == []


@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
def test_host_faults_are_named_with_a_fix(doctor: Examined, names: Sequence[str]) -> None:
    _check(doctor, [OF_A_HOST[name] for name in names])


def test_doctor_finds_the_python_that_launchers_start(doctor: Examined) -> None:
    doctor.on("node2", BASHRC.format(line="export PATH=/usr/bin:/bin"))
    show = ["python", "-c", "import os, sys; print(f'{os.uname().nodename} {sys.executable} ')"]
    starts = f"node2 {Path(sys.prefix, 'bin/python')} "
    try:
        for launcher, right in (("horovodrun", True), ("mpirun -x PATH", True), ("mpirun", False)):
            argv = [*launcher.split(), "-np", "2", "-H", BOTH, *show]
            done = doctor.cluster.run("node1", argv, timeout=60)
            assert (starts in done.stdout) == right, done
        (found,) = doctor.findings()
        assert (found["check"], found["severity"]) == ("python", "warning"), found
        assert "mpirun -x PATH" in found["mend"], found
    finally:
        doctor.on("node2", "umount -l ~/.bashrc")


@pytest.fixture
def strict(doctor: Examined) -> Iterator[Examined]:
    """node1 checks host keys, as ssh does by default, and has its own ~/.ssh."""
    config = "grep -v -e StrictHost -e UserKnown -e LogLevel /etc/ssh/ssh_config > /tmp/strict"
    doctor.on(
        "node1",
        "mkdir -p ~/.ssh && mount -t tmpfs tmpfs ~/.ssh",
        f"{config} && mount --bind /tmp/strict /etc/ssh/ssh_config",
    )
    yield doctor
    doctor.on("node1", "umount -l /etc/ssh/ssh_config; umount -l ~/.ssh")


@pytest.mark.parametrize("name", OF_A_LOGIN)
def test_login_fault_is_named_with_a_fix(
    doctor: Examined, request: pytest.FixtureRequest, name: str
) -> None:
    if "host key" in name:
        request.getfixturevalue("strict")
    cwd = doctor.root if name == "no such directory" else REPOSITORY
    _check(doctor, [OF_A_LOGIN[name]], cwd=cwd)


# nft rules of a firewall as distributions configure it.
FIREWALL = (
    "nft add table inet filter; nft 'add chain inet filter input "
    "{ type filter hook input priority 0; policy accept; }'; "
    "nft add rule inet filter input ip saddr 10.207.0.1 tcp dport "
)


@contextmanager
def _firewall(doctor: Examined, rule: str) -> Iterator[None]:
    """Firewall of node2 against node1."""
    doctor.on("node2", FIREWALL + rule)
    try:
        yield
    finally:
        doctor.on("node2", "nft delete table inet filter")


@pytest.mark.parametrize(
    ("ports", "verdict", "name", "how", "severity"),
    [
        ("40000-60999", "drop", "ranks and launchers", "no answer", "error"),
        ("1024-2000", "reject with tcp reset", "MPI", "refused", "error"),
        ("9855-9900", "reject with tcp reset", "metrics", "refused", "warning"),
    ],
)
def test_closed_port_is_named_with_a_fix(
    doctor: Examined, ports: str, verdict: str, name: str, how: str, severity: str
) -> None:
    with _firewall(doctor, f"{ports} {verdict}"):
        found = named(doctor.findings("network"), "ports", "node1 -> node2")
        assert f"({name})" in found["what"] and f"({how})" in found["what"], found
        assert found["severity"] == severity
        doctor.on("node2", found["mend"])
        assert doctor.findings("network") == []


def test_unreachable_ssh_port_is_named(doctor: Examined) -> None:
    for verdict, says in (
        ("drop", "does not respond"),
        ("reject with tcp reset", "nothing listens"),
    ):
        with _firewall(doctor, f"22 {verdict}"):
            assert says in named(doctor.findings(), "ssh", "node2")["what"]


def test_mtu_mismatch_is_named_with_a_fix(doctor: Examined) -> None:
    doctor.on("node2", "ip link set eth0 mtu 1400")
    try:
        findings = doctor.findings("network")
        # The larger of two values counts as the correct one.
        found = named(findings, "mtu", "node2")
        assert "an MTU of 1400" in found["what"] and found["severity"] == "warning"
        doctor.on("node2", found["mend"])
        assert doctor.findings("network") == []
    finally:
        doctor.on("node2", "ip link set eth0 mtu 1500")


def test_path_that_drops_large_packets_is_named(doctor: Examined) -> None:
    doctor.cluster.path_mtu("node2", 1400)
    try:
        findings = doctor.findings("network")
        found = named(findings, "mtu", "node1 -> node2")
        assert {one["check"] for one in findings} == {"mtu"}, findings
        assert "a packet of 1500 bytes" in found["what"] and found["severity"] == "error"
    finally:
        doctor.cluster.path_mtu("node2", 1500)


def test_slow_direction_of_a_link_is_named(doctor: Examined) -> None:
    limit = "tbf rate 100mbit burst 256kb latency 100ms"
    doctor.on("node2", f"tc qdisc replace dev eth0 root {limit}")
    try:
        found = named(doctor.findings("network"), "bandwidth", "node2 -> node1")
        assert found["severity"] == "warning"
        assert 20 < int(found["what"].split()[0]) < 110  # Mbit/s
    finally:
        doctor.on("node2", "tc qdisc del dev eth0 root")


def test_high_latency_of_small_packets_is_named(doctor: Examined) -> None:
    # Packets of less than 128 bytes leave node2 one by one; larger ones are not delayed.
    doctor.on(
        "node2",
        "tc qdisc add dev eth0 root handle 1: htb default 1",
        "tc class add dev eth0 parent 1: classid 1:2 htb rate 100kbit burst 100",
        "tc filter add dev eth0 parent 1: protocol ip u32 match u16 0 0xff80 at 2 flowid 1:2",
    )
    try:
        findings = doctor.findings("network")
        for ends in ("node1 -> node2", "node2 -> node1"):  # there and back
            found = named(findings, "latency", ends)
            assert 2 < float(found["what"].split()[4]) < 100 and found["severity"] == "warning"
    finally:
        doctor.on("node2", "tc qdisc del dev eth0 root")


def test_unreachable_interface_that_nccl_prefers_is_named_with_a_fix(
    doctor: Examined,
) -> None:
    gpu = OF_A_HOST[
        "a GPU with errors"
    ]  # a script in place of nvidia-smi, which is missing here; on node1 no ~/.bashrc is read
    path = {"PATH": f"{ENVIRONMENT['PATH']}:/tmp/gpu"}  # on node1 no ~/.bashrc is read
    doctor.on("node1", gpu.make)
    doctor.on("node2", gpu.make, "ip link add ib0 type bridge; ip addr add 10.99.0.2/24 dev ib0")
    doctor.on("node2", "ip link set ib0 up")
    try:
        # Only ranks on GPUs use it, so node1 without a GPU need not reach it.
        findings = doctor.findings("network")
        assert "interfaces" not in {one["check"] for one in findings}, findings
        found = named(doctor.findings("network", env=path), "interfaces", "node2")
        assert "NCCL begins with ib0" in found["what"] and "10.99.0.2" in found["what"], found
        name, _, value = found["mend"].split()[1].partition("=")
        assert (name, value) == ("NCCL_SOCKET_IFNAME", "eth0")
        findings = doctor.findings("network", env={**path, name: value})
        assert "interfaces" not in {one["check"] for one in findings}, findings
    finally:
        doctor.on("node2", "ip link delete ib0", gpu.undo)
        doctor.on("node1", gpu.undo)


def test_missing_interface_set_by_a_variable_is_named_with_a_fix(doctor: Examined) -> None:
    findings = doctor.findings(env={"HOROVOD_GLOO_IFACE": "ib0"})
    found = named(findings, "interfaces", "node2")
    name, _, value = found["mend"].split()[1].partition("=")
    assert (name, value) == ("HOROVOD_GLOO_IFACE", "eth0")
    assert doctor.findings(env={name: value}) == []


def test_horovod_wheel_that_mismatches_or_fails_to_load_is_named(doctor: Examined) -> None:
    (metadata,) = [
        Path(str(file.locate()))
        for file in importlib.metadata.files("horovod") or ()
        if file.name == "METADATA"
    ]
    package = importlib.util.find_spec("horovod")
    assert package is not None and package.origin is not None
    (library,) = (Path(package.origin).parent / "torch").glob("mpi_lib_v2*.so")
    other = "0.28.1+torch2.6.0.cpu.openmpi5.0.1.gloo.mpi.p0"
    doctor.on(
        "node2",
        f"sed 's/^Version: .*/Version: {other}/' {metadata} > /tmp/metadata",
        f"mount --bind /tmp/metadata {metadata}; mount --bind /dev/null {library}",
    )
    try:
        findings = doctor.findings("libraries")
    finally:
        doctor.on("node2", f"umount -l {metadata} {library}")
    said = [one["what"] for one in findings if one["where"] == "node2"]
    for text in (
        "Horovod was built for torch 2.6.0.cpu",
        "Horovod was built for Open MPI 5.0.1",
        "torch and Horovod cannot be loaded",
        f"horovod {other}",
    ):
        assert [text in one for one in said].count(True) == 1, (text, findings)


def test_different_training_data_on_a_host_is_named(doctor: Examined) -> None:
    directory = doctor.root / "data"
    directory.mkdir()
    (directory / "a.txt").write_text("the same on both hosts " * 200)
    flags = ("--data.train", str(directory), "--data.validation_fraction", "0.2")
    doctor.on(
        "node2", f"mount -t tmpfs tmpfs {directory} && yes other | head -c 9000 > {directory}/a.txt"
    )
    try:
        found = named(doctor.findings(flags=flags), "data", "node2")
        assert "different training data" in found["what"]
    finally:
        doctor.on("node2", f"umount -l {directory}")


def test_slow_host_is_named(doctor: Examined) -> None:
    """Each host has one processor; on node2 other programs compute, too."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.fail("two processors are needed: hosts that share one are equally slow")
    (sshd,) = [p.pid for p in doctor.cluster.processes("node2") if "sshd" in p.command]
    own = os.sched_getaffinity(sshd)
    # Each in a separate session, because the kernel shares a processor among sessions first.
    spin = ["taskset", "-c", str(cores[1]), "sh", "-c", "while :; do :; done"]
    busy = [subprocess.Popen(spin, start_new_session=True) for _ in range(3)]
    os.sched_setaffinity(sshd, {cores[1]})
    try:
        # Other programs of this machine do not keep node1 from its processor.
        first = 'echo -15 > /proc/self/autogroup; exec nice -n -15 "$@"'
        prefix = ["taskset", "-c", str(cores[0]), "sh", "-c", first, "sh"]
        found = doctor.findings("alone", prefix=prefix)
        slow = [one for one in found if (one["check"], one["where"]) == ("slow host", "node2")]
        assert any("processor" in one["what"] for one in slow), found
        assert {one["where"] for one in found} == {"node2"}, found
    finally:
        os.sched_setaffinity(sshd, own)
        for one in busy:
            one.kill()
            one.wait(10)


def test_failing_all_reduce_is_named(doctor: Examined) -> None:
    """Open MPI's daemon cannot be started on node2, which only a real start detects."""
    daemon = "$(readlink -f $(command -v orted))"
    doctor.on("node2", f"mount --bind /dev/null {daemon}")
    try:
        found = named(doctor.findings("libraries", "all-reduce"), "all-reduce", BOTH)
        assert "ranks over mpi fail" in found["what"], found
    finally:
        doctor.on("node2", f"umount -l {daemon}")


def test_healthy_hosts_have_no_findings(doctor: Examined) -> None:
    began = time.monotonic()
    command = ["hvdtrain", "doctor", "--hosts", BOTH, "--format", "json"]
    done = doctor.cluster.run(
        "node1", [*command, "--", "--run.root", str(doctor.root)], timeout=100
    )
    found = json.loads(done.stdout)
    # Both hosts are this machine, so other programs slow down one of them.
    findings = [finding for finding in found["findings"] if finding["check"] != "slow host"]
    assert (done.returncode, findings, found["left_out"]) == (0, [], []), done
    assert time.monotonic() - began < 90
    links = {(link["from"], link["to"]): link for link in found["measured"]["links"]}
    assert set(links) == {("node1", "node2"), ("node2", "node1")}
    assert all(link["packet"] == "arrives" and link["bandwidth"] > 1e7 for link in links.values())
    sums = {one["controller"]: one for one in found["measured"]["all_reduce"]}
    assert set(sums) == {"mpi", "gloo"} and all(one["seconds"] > 0 for one in sums.values())
    assert set(found["measured"]["speeds"]) == {"node1", "node2"}
