"""`hvdtrain report --serve`: the server, its responses, and reports made in the background.

The responses are an HTML file, the list of runs, a page of one or several runs, and a report.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlencode

from hvdtrain.errors import UserError
from hvdtrain.report import html
from hvdtrain.report.web import pages
from hvdtrain.report.web.guard import guarded, refuse
from hvdtrain.report.web.runs import Runs
from hvdtrain.runtime.signals import leave_on_sigterm
from hvdtrain.telemetry.bounded_server import App, BoundedServer, listen

_KEPT = 4
_MOST_COMPARED = 8
_POLICY_SUFFIX = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_WAIT = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta http-equiv="refresh" content="2"><meta name="color-scheme" content="light dark">
<title>hvdtrain report</title></head>
<body><p>The report is being generated; for a long run this takes several seconds.</p>
</body></html>"""


@dataclass
class _Report:
    stamp: tuple[float, ...]
    page: str = ""
    problem: str = ""


class Reports:
    """Pages as written by `hvdtrain report RUN`, made one at a time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._made: dict[Path, _Report] = {}
        self._making = False

    def page(self, path: Path) -> str | None:
        """Return the report of a run for its current files; None: it is being made, ask again.

        Raises:
            UserError: it cannot be made.
        """
        stamp = _stamp(path)
        with self._lock:
            report = self._made.get(path)
            if report is not None and (report.stamp == stamp or not self._making):
                # The report of an active run is outdated at once: return it, and make a new one at
                # the next request.
                del self._made[path]
                if report.problem:
                    raise UserError(report.problem)
                if report.stamp == stamp:
                    self._made[path] = report
                return report.page
            if not self._making:
                self._making = True
                Thread(target=self._make, args=(path, stamp), daemon=True).start()
        return None

    def _make(self, path: Path, stamp: tuple[float, ...]) -> None:
        report = _Report(stamp)
        try:
            from hvdtrain.report.metrics import run_metrics
            from hvdtrain.report.page import one
            from hvdtrain.report.run import read

            run = read(path)
            report.page = html.document(one(run, run_metrics(run)))
        except UserError as error:
            report.problem = str(error)
        except Exception as error:
            # Files may be damaged, or change while they are read.
            report.problem = f"the report of {path.name} cannot be generated ({error!r})"
        with self._lock:
            self._making = False
            self._made[path] = report
            while len(self._made) > _KEPT:
                del self._made[next(iter(self._made))]


def _stamp(path: Path) -> tuple[float, ...]:
    """Value that changes when a file of the run changes."""
    names = ("metrics.jsonl", "events.jsonl", "ranks.jsonl", "manifest.json")
    files = [path / name for name in names]
    return tuple(file.stat().st_mtime_ns if file.exists() else 0 for file in files)


@dataclass(frozen=True)
class _Answer:
    content: str
    kind: str
    status: HTTPStatus = HTTPStatus.OK
    policy: str = "default-src 'none'"


def make_app(runs: Runs) -> App:
    """The WSGI application (PEP 3333)."""
    reports = Reports()

    def answer(path: str, query: Mapping[str, list[str]]) -> _Answer | None:
        if path == "/":
            return _Answer(html.live_document(), "text/html", policy=html.policy(live=True))
        names = query.get("name", [""])
        if path == "/api/runs":
            return _json(pages.runs(runs.rows()))
        if path == "/api/run":
            if len(names) > _MOST_COMPARED:
                raise ValueError(f"at most {_MOST_COMPARED} runs can be compared")
            return _json(pages.make({runs.path(name): runs.run(name) for name in names}))
        if path == "/report":
            page = reports.page(runs.path(names[0]))
            return _Answer(page or _WAIT, "text/html", policy=html.policy())
        return None

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET":
            return refuse(start, HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported")
        try:
            query = parse_qs(environ.get("QUERY_STRING", ""), max_num_fields=64)
            found = answer(environ.get("PATH_INFO", ""), query)
        except ValueError as error:
            found = _problem(HTTPStatus.BAD_REQUEST, f"invalid address ({error})")
        except KeyError:
            found = _problem(HTTPStatus.NOT_FOUND, "no such run, or it was removed")
        except UserError as error:
            found = _problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except OSError as error:
            what = f"{error.filename or 'a file'} cannot be read ({error.strerror})"
            found = _problem(HTTPStatus.INTERNAL_SERVER_ERROR, what)
        return _send(start, found or _problem(HTTPStatus.NOT_FOUND, "no such page"))

    return app


def _send(start: Callable[..., Any], found: _Answer) -> list[bytes]:
    content = found.content.encode()
    headers = [
        ("Content-Type", f"{found.kind}; charset=utf-8"),
        ("Content-Length", str(len(content))),
        ("Content-Security-Policy", found.policy + _POLICY_SUFFIX),
        ("Cache-Control", "no-store"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
        ("X-Content-Type-Options", "nosniff"),
    ]
    start(f"{found.status.value} {found.status.phrase}", headers)
    return [content]


def _json(content: Any) -> _Answer:
    return _Answer(html.dumps(content), "application/json")


def _problem(status: HTTPStatus, why: str) -> _Answer:
    return _Answer(html.dumps({"problem": why}), "application/json", status)


def serve(path: Path, host: str, port: int) -> int:
    """Show runs until Ctrl-C.

    Args:
        path: a run, or a directory of runs.
        host: an address or name of this host.
        port: if it is in use, a free port replaces it; 0: any free port.

    Raises:
        UserError: there is no such directory, or the address cannot be listened on.
    """
    runs, name = _runs(path)
    try:
        server = listen(host, port)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"cannot listen on --host {host} --port {port} "
            f"({getattr(error, 'strerror', None) or error}); choose another host or port"
        ) from None
    token = secrets.token_urlsafe(32)  # every user of this host can connect
    full = socket.gethostname()
    names = {host, full, full.partition(".")[0]}
    server.set_app(guarded(make_app(runs), names, token, server.server_port))
    leave_on_sigterm()
    thread = Thread(target=server.serve_forever, name="web view", daemon=True)
    thread.start()
    try:
        url = _url(server, host, {"token": token, "run": name})
        print(f"hvdtrain: {url} shows {path} until Ctrl-C", flush=True)
        thread.join()
    except KeyboardInterrupt:
        print()
    finally:
        server.end()
    return 0


def _runs(path: Path) -> tuple[Runs, str]:
    """Return (the runs, the name of the requested run or "")."""
    if not path.is_dir():
        raise UserError(
            f"{path} is not a directory; name a run, or a directory of runs such as run.root"
        )
    if (path / "manifest.json").exists():
        whole = path.resolve()
        return Runs(whole.parent, whole.name), whole.name
    return Runs(path), ""


def _url(server: BoundedServer, host: str, query: dict[str, str]) -> str:
    address = ipaddress.ip_address(str(server.server_address[0]))
    shown = socket.gethostname() if address.is_unspecified else host
    shown = f"[{shown}]" if ":" in shown else shown
    given = urlencode({name: value for name, value in query.items() if value})
    return f"http://{shown}:{server.server_port}/?{given}"
