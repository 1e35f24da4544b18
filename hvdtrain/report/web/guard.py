"""Access control: browsers must use a known name of this host and present the token."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from hvdtrain.telemetry.bounded_server import TRUST, App

_COOKIE = "hvdtrain-token-"  # and the port: cookies know hosts only


def guarded(app: App, names: Iterable[str], token: str, port: int) -> App:
    """Wrap an application in the two checks.

    A foreign page can make a browser contact this server by a name of the page's own that resolves
    to this host (DNS rebinding), but not by an address.

    Args:
        names: names of this host; addresses and localhost are always allowed in a URL.
        token: a browser presents it once in the URL and then as a cookie; other clients use the
            header "Authorization: Bearer".
    """
    known = {"localhost", *(name.lower() for name in names)}
    cookie = f"{_COOKIE}{port}"

    def checked(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not _is_known(environ.get("HTTP_HOST", ""), known):
            return refuse(start, HTTPStatus.FORBIDDEN, "unknown host name for this server")
        if _same(_query(environ).get("token", ""), token):
            return _redirect_without_token(environ, start, f"{cookie}={token}")
        if not any(_same(given, token) for given in _given_tokens(environ, cookie)):
            return refuse(
                start,
                HTTPStatus.FORBIDDEN,
                "a token is required: open the URL that hvdtrain report --serve printed",
            )
        environ[TRUST]()
        return app(environ, start)

    return checked


def refuse(start: Callable[..., Any], status: HTTPStatus, why: str) -> list[bytes]:
    """Send an error response with a reason."""
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
    start(f"{status.value} {status.phrase}", [*headers, ("X-Content-Type-Options", "nosniff")])
    return [f"{why}\n".encode()]


def _is_known(host: str, known: set[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name.rstrip(".") in known:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _query(environ: dict[str, Any]) -> dict[str, str]:
    try:
        return dict(parse_qsl(environ.get("QUERY_STRING", ""), max_num_fields=64))
    except ValueError:
        return {}


def _given_tokens(environ: dict[str, Any], cookie: str) -> Iterable[str]:
    kind, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
    if kind.lower() == "bearer":
        yield given.strip()
    for part in environ.get("HTTP_COOKIE", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == cookie:
            yield value


def _same(given: str, token: str) -> bool:
    """Compare in constant time, so that timing does not reveal where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _redirect_without_token(
    environ: dict[str, Any], start: Callable[..., Any], cookie: str
) -> list[bytes]:
    """Redirect to the same address without the token, to keep the token out of histories."""
    environ[TRUST]()
    rest = parse_qsl(environ.get("QUERY_STRING", ""), max_num_fields=64)
    query = urlencode([(name, value) for name, value in rest if name != "token"])
    headers = [
        ("Location", f"?{query}" if query else "/"),
        ("Set-Cookie", f"{cookie}; HttpOnly; SameSite=Strict; Path=/"),
        ("Cache-Control", "no-store"),
        ("Referrer-Policy", "no-referrer"),
    ]
    start(f"{HTTPStatus.SEE_OTHER.value} {HTTPStatus.SEE_OTHER.phrase}", headers)
    return [b""]
