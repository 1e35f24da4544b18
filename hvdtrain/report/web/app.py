"""Responses of the server: three files, the list of runs, a run, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from hvdtrain.errors import UserError
from hvdtrain.report.web.guard import refuse
from hvdtrain.report.web.pages import Reports
from hvdtrain.report.web.runs import Runs
from hvdtrain.telemetry.bounded_server import App

_STATIC = {
    "/": ("view.html", "text/html"),
    "/view.js": ("view.js", "text/javascript"),
    "/view.css": ("view.css", "text/css"),
}
_OWN = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
_REPORT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_NEVER = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_WAIT = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="2"><meta name="color-scheme" content="light dark">
<title>hvdtrain report</title></head>
<body><p>The report is being made; of a long run that takes some seconds.</p></body></html>"""


@dataclass(frozen=True)
class _Answer:
    content: bytes
    kind: str
    status: HTTPStatus = HTTPStatus.OK
    policy: str = _OWN


def make_app(runs: Runs) -> App:
    """The WSGI application (PEP 3333)."""
    reports = Reports()
    static = {path: (_static(name), kind) for path, (name, kind) in _STATIC.items()}

    def answer(path: str, query: Mapping[str, list[str]]) -> _Answer | None:
        if path in static:
            return _Answer(*static[path])
        name = query.get("name", [""])[0]
        if path == "/api/runs":
            return _json({"runs": runs.rows()})
        if path == "/api/run":
            return _json(runs.run(name))
        if path == "/report":
            page = reports.page(runs.path(name))
            return _Answer((page or _WAIT).encode(), "text/html", policy=_REPORT)
        return None

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return refuse(start, HTTPStatus.METHOD_NOT_ALLOWED, "this server only shows")
        try:
            query = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=64)
            found = answer(environ.get("PATH_INFO", ""), query)
        except ValueError:
            found = _problem(HTTPStatus.BAD_REQUEST, "the address is not one of this server")
        except KeyError:
            found = _problem(HTTPStatus.NOT_FOUND, "there is no such run, or no longer")
        except UserError as error:
            found = _problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except OSError as error:
            what = f"{error.filename or 'a file'} cannot be read ({error.strerror})"
            found = _problem(HTTPStatus.INTERNAL_SERVER_ERROR, what)
        return _send(start, found or _problem(HTTPStatus.NOT_FOUND, "there is no such page"))

    return app


def _send(start: Callable[..., Any], found: _Answer) -> list[bytes]:
    headers = [
        ("Content-Type", f"{found.kind}; charset=utf-8"),
        ("Content-Length", str(len(found.content))),
        ("Content-Security-Policy", found.policy + _NEVER),
        ("Cache-Control", "no-store"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Content-Type-Options", "nosniff"),
    ]
    start(f"{found.status.value} {found.status.phrase}", headers)
    return [found.content]


def _json(content: Any) -> _Answer:
    return _Answer(json.dumps(content, allow_nan=False).encode(), "application/json")


def _problem(status: HTTPStatus, why: str) -> _Answer:
    return _Answer(json.dumps({"problem": why}).encode(), "application/json", status)


def _static(name: str) -> bytes:
    return files("hvdtrain.report.web").joinpath("static").joinpath(name).read_bytes()
