"""What an agent reads from stdin if horovodrun starts it: one line of JSON, an `Invitation`.

Other users can read the arguments of a process, so neither the job's secret nor the environment of
the ranks, which may contain passwords, is an argument. stdin then stays open: its end means that
horovodrun or the ssh session is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from hvdtrain.errors import crash
from hvdtrain.untrusted import checked, parse_json


@dataclass(frozen=True)
class Invitation:
    """Invitation of one agent.

    Args:
        addresses: IPv4 addresses of the driver's host, the most likely one first.
        port: where the driver listens for agents.
        secret: the job's secret, in hex.
        directory: working directory of the ranks.
        environment: variables of the ranks, in addition to the agent's own.
        host: name of the agent's host in the job.
        launch: identifies this agent among all that were started on the host.
        attached: stdin stays open.
    """

    addresses: list[str]
    port: int
    secret: str = field(repr=False)
    directory: str
    environment: dict[str, str] = field(repr=False)
    host: str = ""
    launch: str = ""
    attached: bool = True

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def parse(line: bytes) -> Invitation:
    """Return the invitation of a line.

    Raises:
        UserError: it is incomplete: horovodrun or the ssh session has ended.
    """
    try:
        return checked(Invitation, parse_json(line))
    except (ValueError, AttributeError) as error:
        raise crash(f"stdin has no invitation of horovodrun: {error}") from None
