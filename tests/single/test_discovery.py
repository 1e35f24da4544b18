"""`hvdtrain discover`: finds the hosts that respond, in bounded time and in a small process."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import UserError
from hvdtrain.launch.discovery import answering, is_this_host, parse_probe
from hvdtrain.launch.hostfile import Host

# An address for documentation (RFC 5737): no ssh there, even if a gateway accepts all.
NOBODY = "198.51.100.1"


def _discover(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvdtrain.cli", "discover", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


@pytest.fixture
def port() -> Iterator[int]:
    """A port of this machine that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_this_host_answers_under_all_of_its_names() -> None:
    hosts = f"localhost:1,127.0.0.1:2,127.0.1.1:3,{socket.gethostname()}:4,{NOBODY}:5"
    done = _discover("--hosts", hosts, "--timeout", "3")
    expected = f"localhost:1\n127.0.0.1:2\n127.0.1.1:3\n{socket.gethostname()}:4\n"
    assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.alone
def test_silent_hosts_cost_no_more_than_the_timeout() -> None:
    hosts = ",".join(f"198.51.100.{number}:8" for number in range(1, 100))
    started = time.monotonic()
    done = _discover("--hosts", hosts, "--timeout", "1", "--probe", "ssh")
    assert time.monotonic() - started < 3  # 1 s and the start of two processes on a busy machine
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_tcp_probe_succeeds_only_on_an_open_port(port: int) -> None:
    deadline = time.monotonic() + 5
    assert parse_probe(f"tcp:{port}")("127.0.0.1", deadline)
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = int(server.getsockname()[1])
    with pytest.raises(OSError):
        parse_probe(f"tcp:{closed}")("127.0.0.1", deadline)
    with pytest.raises(OSError):
        parse_probe("tcp:22")(NOBODY, time.monotonic() + 0.2)


def test_foreign_and_unknown_hosts_do_not_count_as_this_host() -> None:
    assert not is_this_host(NOBODY)
    probe = parse_probe("tcp:22")
    assert answering([Host("no-such-host.invalid", 1), Host(NOBODY, 1)], probe, 1.0) == []


def test_line_added_to_the_hostfile_adds_a_host(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    for text in ("localhost slots=2", "localhost slots=2\n127.0.0.1 slots=4"):
        hostfile.write_text(text)
        done = _discover("--hostfile", str(hostfile))
        assert done.stdout.count(":") == text.count("slots")


@pytest.mark.parametrize("probe", ["tcp", "tcp:", "tcp:0", "tcp:65536", "udp:22", "ssh:22"])
def test_invalid_probe_is_rejected(probe: str) -> None:
    with pytest.raises(UserError, match="--probe"):
        parse_probe(probe)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hosts", "a:b"),
        ("--hostfile", "/no/such/file"),
        ("--hosts", "a:1", "--probe", "x"),
        ("--hosts", "a:1", "--timeout", "0"),
        ("--hosts", "a:1", "--slurm"),
        (),
    ],
)
def test_invalid_input_exits_with_2(arguments: tuple[str, ...]) -> None:
    done = _discover(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_discover_uses_little_cpu_and_imports_nothing_heavy() -> None:
    taken = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _discover("--hosts", "localhost:2").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(taken) < 0.2  # about 0.08 on an idle machine
    trace = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hvdtrain.cli", "discover", "--hosts", "a:1"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    imported = {line.rsplit("|", 1)[-1].strip() for line in trace.stderr.splitlines()}
    assert not imported & {"torch", "horovod", "numpy", "jsonargparse", "yaml", "dataclasses"}
