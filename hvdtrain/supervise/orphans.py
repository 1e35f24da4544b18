"""Cleanup of processes that an earlier start of a run may have left on its hosts.

When ranks are started again, no old rank may hold the run's files, a port or a GPU.
"""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Sequence

from hvdtrain.launch.commands import SSH_OPTIONS
from hvdtrain.launch.discovery import is_this_host

# Run directory, in the environment of all ranks of a supervised run and of their children.
VARIABLE = "HVDTRAIN_LAUNCH_ID"
_SECONDS = 6.0
_SCRIPT = """\
for attempt in 1 2 3 4 5 6 7 8 9 10; do
  pids=$(grep -lzsFx -e {entry} /proc/[0-9]*/environ | cut -d/ -f3)
  [ -z "$pids" ] && exit 0
  kill -9 $pids 2>/dev/null
  sleep 0.3
done
exit 1"""


def end_orphans(hosts: Sequence[str], launch_id: str) -> list[str]:
    """Kill every process of a launch, on all hosts in parallel.

    Returns:
        The hosts on which this failed or could not be tried.
    """
    script = _SCRIPT.format(entry=shlex.quote(f"{VARIABLE}={launch_id}"))
    clean: set[str] = set()

    def sweep(host: str) -> None:
        try:
            here = is_this_host(host)
            # ssh passes the script to a login shell as one string; here sh gets it unchanged.
            argv = ["sh", "-c", script] if here else ["ssh", *SSH_OPTIONS, host, script]
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        if done.returncode == 0:
            clean.add(host)

    threads = [threading.Thread(target=sweep, args=(host,), daemon=True) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    return [host for host in hosts if host not in clean]
