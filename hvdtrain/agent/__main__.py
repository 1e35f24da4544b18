"""`python -m hvdtrain.agent`: the agent that horovodrun starts on each host, see invitation.py."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from hvdtrain.agent import invitation
from hvdtrain.agent.agent import AgentSettings, keep
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.errors import UserError
from hvdtrain.runtime.queued_output import queued, say

# To connect to the driver, which waits for this agent.
_WAIT_SECONDS = 30.0


def main() -> int:
    try:
        invited = invitation.parse(sys.stdin.buffer.readline())
        # The directory may exist on the driver's host only.
        for directory in (str(Path.home()), invited.directory):
            with suppress(OSError):
                os.chdir(directory)
        settings = AgentSettings(
            run=None,
            host=invited.host,
            slots=1,  # the driver knows how many there are
            wait=_WAIT_SECONDS,
            environment={**os.environ, **invited.environment},
            driver=DriverFile(invited.addresses, invited.port, invited.secret),
            launch=invited.launch,
            attached=invited.attached,
        )
        with queued():
            return keep(settings)
    except UserError as error:
        say(f"error: {error}", "hvdtrain agent")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
