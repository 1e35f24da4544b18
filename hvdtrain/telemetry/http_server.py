"""The HTTP server of a rank's exporter, with optional TLS and password."""

from __future__ import annotations

import base64
import binascii
import hmac
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app

from hvdtrain.errors import UserError
from hvdtrain.telemetry.bounded_server import TRUST, App, listen
from hvdtrain.telemetry.config import TelemetryConfig


class MetricsServer:
    """HTTP server of a registry's metrics; runs until `close`.

    Args:
        config: address, certificate and password.
        port: replaced by a free port if it is in use.

    Attributes:
        port: on which it listens.
        scrapes: number of answered scrapes.

    Raises:
        UserError: the address cannot be listened on, or a file cannot be used.
    """

    def __init__(self, config: TelemetryConfig, port: int, registry: CollectorRegistry) -> None:
        self.scrapes = 0
        app: App = self._count(make_wsgi_app(registry))
        if config.auth_file is not None:
            app = _require_password(read_password(config.auth_file, "telemetry.auth_file"), app)
        context = _tls(config)
        try:
            self._server = listen(config.host, port)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"telemetry: cannot listen on {config.host}:{port} "
                f"({getattr(error, 'strerror', None) or error}); choose another telemetry.host or "
                "telemetry.port, or telemetry.port 0 for none"
            ) from None
        self._server.set_app(app)
        if context is not None:
            # The request's thread does the handshake, so that a slow client does not block the
            # others.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.port: int = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, name="exporter", daemon=True)
        self._thread.start()

    def _count(self, app: App) -> App:
        def counted(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            environ[TRUST]()
            answer = _answer_any_client(app, environ, start)
            self.scrapes += 1
            return answer

        return counted

    def close(self) -> None:
        self._server.end()
        self._thread.join(timeout=5)


def _answer_any_client(
    app: App, environ: dict[str, Any], start: Callable[..., Any]
) -> Iterable[bytes]:
    """Answer as prometheus_client's application does, also where it would fail.

    That raises if the Accept header is malformed, which is then ignored, and refuses HEAD.
    """
    begun: list[Any] = []

    def begin(*status_and_headers: Any) -> None:
        begun[:] = status_and_headers

    is_head = environ["REQUEST_METHOD"] == "HEAD"
    if is_head:
        environ = {**environ, "REQUEST_METHOD": "GET"}
    try:
        body = b"".join(app(environ, begin))
    except (TypeError, ValueError):
        body = b"".join(app({**environ, "HTTP_ACCEPT": ""}, begin))
    status, headers = begun
    start(status, [*headers, ("Content-Length", str(len(body)))])
    return [] if is_head else [body]


def _tls(config: TelemetryConfig) -> ssl.SSLContext | None:
    if config.tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
    except OSError as error:  # ssl.SSLError is a subclass
        raise UserError(
            f"telemetry.tls_cert_file {config.tls_cert_file} with telemetry.tls_key_file "
            f"{config.tls_key_file} cannot be used ({error.strerror or error})"
        ) from None
    return context


def read_password(path: str, option: str) -> bytes:
    """user:password from a file's first line.

    Args:
        option: that named the file, for messages.

    Raises:
        UserError: it cannot be read, or has no such line.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{option} {path} cannot be read ({error.strerror})") from None
    user, colon, password = (lines[0] if lines else b"").strip().partition(b":")
    if not (user and colon and password):
        raise UserError(f"{option} {path}: its first line must be user:password")
    return user + b":" + password


def _require_password(secret: bytes, app: App) -> App:
    """HTTP basic authentication (RFC 7617) in front of an application."""

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        kind, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        try:
            known = base64.b64decode(given, validate=True) if kind.lower() == "basic" else b""
        except (binascii.Error, ValueError):
            known = b""
        if hmac.compare_digest(known, secret):
            return app(environ, start)
        headers = [("WWW-Authenticate", 'Basic realm="hvdtrain"'), ("Content-Type", "text/plain")]
        start("401 Unauthorized", headers)
        return [b"user and password required\n"]

    return guarded
