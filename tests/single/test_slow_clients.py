"""A thousand slow connections to the metrics port of a training process."""

from __future__ import annotations

import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.telemetry import bounded_server
from hvdtrain.telemetry.bounded_server import BoundedConnections
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter
from tests.support.job import Job, poll, running_children
from tests.support.runs import start

HOST = "127.0.0.1"
CLIENTS = 1000
FILES = 256  # that the training process may have open; 1,024 is what a login gives
# How long it takes a busy machine to close what is late.
GRACE_SECONDS = 5.0
FLAGS = (
    "--task tests.support.tasks:Slow --train.duration 99999 --checkpoint.every 2 --eval.every 0"
    " --batch.global_size 8 --batch.micro_size 8 --run.id case"
)


@pytest.fixture
def port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def training(tmp_path: Path, port: int) -> Iterator[Job]:
    """A process that trains and serves HTTPS."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = shlex.split(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=node1"
        f" -out {cert} -keyout {key}"
    )
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    flags = [*FLAGS.split(), "--run.root", str(tmp_path), "--telemetry.port", str(port)]
    flags += ["--telemetry.tls_cert_file", cert, "--telemetry.tls_key_file", key]
    limited = ["sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh"]
    train = [*limited, sys.executable, "-m", "hvdtrain.train"]
    job = start(tmp_path / "output", flags, command=train)
    path = tmp_path / "case/metrics.jsonl"
    poll(lambda: path.exists() and bool(path.read_text()), 60, f"a step: {job.output()}")
    yield job
    job.kill()


def test_slow_handshakes_do_not_exhaust_files_or_block_prometheus(training: Job, port: int) -> None:
    (trainer,) = running_children(lambda process: str(port) in process.cmdline())
    slow = [_connect(port) for _ in range(CLIENTS)]
    try:
        for _ in range(3):
            for client in slow:
                with suppress(OSError):
                    client.send(b"\x16")
            assert "hvdtrain_step" in _scrape(port)
            assert trainer.num_fds() < FILES / 2
        seconds = bounded_server.UNAUTHORIZED_SECONDS + GRACE_SECONDS
        poll(lambda: not any(map(_is_open, slow)), seconds, "the end of the late connections")
    finally:
        for client in slow:
            client.close()
    trainer.send_signal(signal.SIGUSR1)
    done = training.wait(60)
    assert done.returncode == EXIT_PREEMPTED and "could not be written" not in done.stderr, done


def test_slow_sender_is_disconnected_after_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(bounded_server, "UNAUTHORIZED_SECONDS", 1.0)
    exporter = Exporter(TelemetryConfig(host=HOST, port=port), 0)
    client, began = _connect(port), time.monotonic()
    with client, pytest.raises(OSError):
        while time.monotonic() - began < 1 + GRACE_SECONDS:
            client.send(b"G")
            time.sleep(0.1)
    assert time.monotonic() - began > 0.9
    exporter.close()


def _connect(port: int) -> socket.socket:
    client = socket.socket()
    client.settimeout(5)
    with suppress(OSError):
        client.connect((HOST, port))
    client.setblocking(False)
    return client


def _is_open(client: socket.socket) -> bool:
    try:
        return bool(client.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _scrape(port: int) -> str:
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(
        f"https://{HOST}:{port}/metrics", timeout=5, context=context
    ) as page:
        return str(page.read().decode())


def test_full_server_drops_untrusted_connections_of_the_busiest_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded_server, "MOST", 4)
    monkeypatch.setattr(bounded_server, "_ROOM_SECONDS", 0.0)  # no thread serves them here
    pairs = [socket.socketpair() for _ in range(6)]
    open_ = BoundedConnections()
    for (client, _), host in zip(pairs[:4], ["friend", "lonely", "crowd", "crowd"], strict=True):
        assert open_.admit(client, host)
    open_.trust(pairs[0][0])
    assert not open_.admit(pairs[4][0], "crowd"), "more than MOST"
    assert [not _cut(there) for _, there in pairs[:4]] == [True, True, False, True]
    open_.closed(pairs[2][0])
    assert open_.admit(pairs[5][0], "crowd")
    for pair in pairs:
        for end in pair:
            end.close()


def _cut(there: socket.socket) -> bool:
    there.setblocking(False)
    return not _is_open(there)
