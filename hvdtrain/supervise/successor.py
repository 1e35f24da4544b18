"""Driver that replaces another one; an agent starts it: python -m ... RUN TOKEN SINCE.

It ends with exit code 75 if the driver is alive after all, or another one replaces it first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hvdtrain.agent import driver_file, guard
from hvdtrain.agent.agent import DRIVER_NAME
from hvdtrain.errors import EXIT_PREEMPTED, UserError
from hvdtrain.run_files.owner_token import Token
from hvdtrain.runtime.queued_output import queued, say
from hvdtrain.supervise.allocation import AllocationDriver, AllocationRun
from hvdtrain.untrusted import checked, parse_json


def main(arguments: list[str]) -> int:
    run, token, since = arguments
    guard.set_name(DRIVER_NAME)
    with queued():
        return _take_over(Path(run), token, float(since))


def _take_over(run: Path, token: str, since: float) -> int:
    try:
        state = driver_file.read_state(run)
        if state is None:
            return EXIT_PREEMPTED
        hosts, directory = int(state["hosts"]), str(state["directory"])
        plan = AllocationRun(**state["plan"] | {"run": Path(state["plan"]["run"])})
        driver = AllocationDriver(plan, hosts, directory)
        return driver.take_over(checked(Token, parse_json(token)), since)
    except (UserError, OSError) as error:
        say(f"no driver is replaced: {error}", "hvdtrain agent")
        return EXIT_PREEMPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
