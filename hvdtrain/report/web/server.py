"""`hvdtrain report --serve`: from the command line to Ctrl-C."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from pathlib import Path
from threading import Thread
from urllib.parse import urlencode

from hvdtrain.errors import UserError
from hvdtrain.report.web.app import make_app
from hvdtrain.report.web.guard import guarded
from hvdtrain.report.web.runs import Runs
from hvdtrain.runtime.signals import leave_on_sigterm
from hvdtrain.telemetry.bounded_server import BoundedServer, listen


def serve(path: Path, host: str, port: int) -> int:
    """Show runs until Ctrl-C.

    Args:
        path: a run, or a directory of runs.
        host: an address or name of this host; if other hosts can reach it, a token is required.
        port: if it is in use, a free port replaces it; 0: any free port.

    Raises:
        UserError: there is no such directory, or the address cannot be listened on.
    """
    runs, name = _runs(path)
    try:
        server = listen(host, port)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(
            f"--host {host} --port {port} cannot be listened on "
            f"({getattr(error, 'strerror', None) or error}); choose others"
        ) from None
    token = "" if _is_loopback(server) else secrets.token_urlsafe(32)
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


def _is_loopback(server: BoundedServer) -> bool:
    return ipaddress.ip_address(str(server.server_address[0])).is_loopback


def _url(server: BoundedServer, host: str, query: dict[str, str]) -> str:
    address = ipaddress.ip_address(str(server.server_address[0]))
    shown = socket.gethostname() if address.is_unspecified else host
    shown = f"[{shown}]" if ":" in shown else shown
    given = urlencode({name: value for name, value in query.items() if value})
    return f"http://{shown}:{server.server_port}/{'?' + given if given else ''}"
