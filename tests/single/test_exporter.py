"""A rank's Prometheus exporter: metrics, access control and targets."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.errors import UserError
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter, ExporterAddress, write_targets
from tests.support import runs

pytestmark = pytest.mark.slow

HOST = "127.0.0.1"


@pytest.fixture
def port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def _scrape(
    port: int, scheme: str = "http", context: ssl.SSLContext | None = None, auth: str = ""
) -> str:
    request = urllib.request.Request(f"{scheme}://{HOST}:{port}/metrics")
    if auth:
        coded = base64.b64encode(auth.encode()).decode()
        request.add_header("Authorization", f"Basic {coded}")
    with urllib.request.urlopen(request, timeout=5, context=context) as page:
        return str(page.read().decode())


def test_port_in_use_is_replaced_by_a_free_one(port: int) -> None:
    with socket.create_server((HOST, port)):
        exporter = Exporter(TelemetryConfig(host=HOST, port=port), 0)
        assert exporter.port != port
        assert "hvdtrain_world_size" in _scrape(exporter.port)
        exporter.close()


def test_unavailable_address_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 203\.0\.113\.1:9855"):
        Exporter(TelemetryConfig(host="203.0.113.1"), 0)
    with pytest.raises(UserError, match=r"cannot listen on no-such-host\.invalid:9855"):
        Exporter(TelemetryConfig(host="no-such-host.invalid"), 0)


@pytest.mark.parametrize("version", ["abc", "", "1.0.0.0.a", "-1", "1"])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_malformed_accept_header_is_answered(
    version: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    exporter = Exporter(TelemetryConfig(host=HOST), 0)
    request = urllib.request.Request(f"http://{HOST}:{exporter.port}/metrics")
    request.add_header("Accept", f"{kind};version={version}")
    with urllib.request.urlopen(request, timeout=5) as page:
        assert "hvdtrain_world_size" in page.read().decode()
    exporter.close()
    assert not capfd.readouterr().err


def test_head_is_answered_like_get_without_a_body() -> None:
    exporter = Exporter(TelemetryConfig(host=HOST), 0)
    client = http.client.HTTPConnection(HOST, exporter.port, timeout=5)
    client.request("HEAD", "/metrics")
    answer = client.getresponse()
    assert answer.status == 200 and int(answer.headers["Content-Length"]) > 0
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.read() == b""
    exporter.close()


@pytest.fixture
def guarded(tmp_path: Path, port: int, certificate: tuple[str, str]) -> Iterator[Exporter]:
    secret = tmp_path / "secret"
    secret.write_text("prometheus:open sesame\n")
    cert, key = certificate
    config = TelemetryConfig(
        host=HOST, port=port, tls_cert_file=cert, tls_key_file=key, auth_file=str(secret)
    )
    exporter = Exporter(config, 0)
    yield exporter
    exporter.close()


def test_metrics_require_password_and_tls(guarded: Exporter, certificate: tuple[str, str]) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    assert "hvdtrain_loss" in _scrape(guarded.port, "https", context, "prometheus:open sesame")
    for wrong in ("", "prometheus:", "prometheus:open sesam", "other:open sesame", ":"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            _scrape(guarded.port, "https", context, wrong)
        assert refused.value.code == 401
    with pytest.raises(OSError):
        _scrape(guarded.port, "http", None, "prometheus:open sesame")


def test_idle_client_does_not_block_others(guarded: Exporter, certificate: tuple[str, str]) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    with socket.create_connection((HOST, guarded.port)):
        assert _scrape(guarded.port, "https", context, "prometheus:open sesame")


@pytest.mark.parametrize(
    ("content", "message"), [("", "user:password"), ("user\n", "user:password"), (None, "read")]
)
def test_invalid_auth_file_is_a_user_error(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "auth"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=f"telemetry.auth_file {file}.*{message}"):
        Exporter(TelemetryConfig(host=HOST, auth_file=str(file)), 0)


def test_invalid_certificate_is_a_user_error(tmp_path: Path) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("nothing")
    config = TelemetryConfig(host=HOST, tls_cert_file=str(file), tls_key_file=str(file))
    with pytest.raises(UserError, match=f"{file}"):
        Exporter(config, 0)


def test_exporter_lingers_for_a_last_scrape_up_to_its_limit(port: int) -> None:
    exporter = Exporter(TelemetryConfig(host=HOST, port=port), 0)
    begin = time.monotonic()
    exporter.linger(30, lambda: False)
    assert time.monotonic() - begin < 1, "it waits although no client scrapes"
    _scrape(exporter.port)
    scraper = threading.Timer(0.5, _scrape, [exporter.port])
    scraper.start()
    exporter.linger(30, lambda: False)
    assert 0.3 < time.monotonic() - begin < 5
    begin = time.monotonic()
    exporter.linger(0.5, lambda: False)
    assert 0.4 < time.monotonic() - begin < 5
    exporter.linger(30, lambda: True)  # asked to stop
    assert time.monotonic() - begin < 5
    exporter.close()


def test_targets_file_lists_every_rank_with_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    file = tmp_path / "targets.json"
    write_targets(
        file,
        "mine",
        [ExporterAddress("node1", 0, 9855), ExporterAddress("node2", 0, 9000)],
        tls=True,
    )
    first, second = json.loads(file.read_text())
    assert first == {
        "targets": ["node1:9855"],
        "labels": {
            "run": "mine",
            "rank": "0",
            "local_rank": "0",
            "host": "node1",
            "job_id": "17",
            "__scheme__": "https",
        },
    }
    assert second["targets"] == ["node2:9000"] and second["labels"]["rank"] == "1"


def test_exporter_secrets_stay_out_of_logs_and_run_files(
    tmp_path: Path, port: int, certificate: tuple[str, str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("prometheus:open-sesame\n")
    flags = ["--telemetry.port", str(port), "--telemetry.auth_file", str(secret)]
    flags += ["--telemetry.tls_cert_file", certificate[0]]
    flags += ["--telemetry.tls_key_file", certificate[1], "--train.duration", "2"]
    directory = runs.train(tmp_path, "run", flags)
    key = Path(certificate[1]).read_text().splitlines()[1]
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 4
    for path in [*files, *(tmp_path / "output").iterdir()]:
        content = path.read_bytes()
        assert b"open-sesame" not in content and key.encode() not in content, path
