"""Agents that horovodrun starts: one on each host, over ssh, and directly on its own host.

The agent reads its invitation from stdin (invitation.py), which then stays open. If horovodrun or
the ssh session ends, however that happens, the agent's stdin ends, and with it the agent.
"""

from __future__ import annotations

import resource
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO

from hvdtrain.agent.hub import Hub
from hvdtrain.agent.invitation import Invitation

# No prompt, and no terminal, which would show what is sent. A session over a cut link ends after
# 12 s: TCP waits twice as long before each resend, so after a cut of 5 s the next one may come 10 s
# after the link went down, and must not find the session ended.
_SSH = (
    *("ssh", "-T", "-o", "PasswordAuthentication=no", "-o", "StrictHostKeyChecking=no"),
    *("-o", "ConnectTimeout=3", "-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=11"),
)
# Until the agent must have registered: it is killed if its host or ssh hangs.
_REGISTER_SECONDS = 60.0


class StartedAgents:
    """The agents of a job.

    Args:
        invitation: of each agent; `host`, `launch` and `attached` are set here.
        ssh: argv before the host's name: `ssh_command`, or a program that passes no stdin on.
        is_local: whether a name means this host.
        say: prints a message for the user.
        files: soft and hard limit on open files of agents on this host.
    """

    def __init__(
        self,
        hub: Hub,
        invitation: Invitation,
        ssh: Sequence[str],
        is_local: Callable[[str], bool],
        say: Callable[[str], None],
        files: tuple[int, int],
    ) -> None:
        self._hub, self._invitation, self._ssh = hub, invitation, list(ssh)
        self._is_local, self._say, self._files = is_local, say, files
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}  # of hosts whose agent has not ended
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ending = False

    def start(self, host: str) -> None:
        """Start the agent of a host, unless the last one has not ended yet."""
        with self._lock:
            if host in self._threads or self._ending:
                return
            launch = secrets.token_hex(8)
            thread = threading.Thread(target=self._serve, args=(host, launch), daemon=True)
            self._threads[host] = thread
        self._hub.expect_agent(host, launch)
        thread.start()

    def end(self, seconds: float) -> None:
        """Wait for the agents, which end with the hub, and kill those that are left."""
        with self._lock:
            self._ending = True
            threads = list(self._threads.values())
        killer = threading.Timer(seconds, self._kill_all)
        killer.daemon = True
        killer.start()
        for thread in threads:
            thread.join(2 * seconds)
        killer.cancel()

    def _kill_all(self) -> None:
        with self._lock:
            for process in self._processes.values():
                process.kill()

    def _serve(self, host: str, launch: str) -> None:
        """Start the agent, pass on what it and ssh write, and report its end."""
        try:
            why = self._run(host, launch)
        except OSError as error:
            why = str(error)
        with self._lock:
            self._processes.pop(host, None)
            del self._threads[host]
        self._hub.agent_ended(host, launch, why)

    def _run(self, host: str, launch: str) -> str:
        invitation = replace(self._invitation, host=host, launch=launch)
        program = [sys.executable, "-X", "utf8", "-m", "hvdtrain.agent"]
        if local := self._is_local(host):
            argv = program
        else:
            argv, invitation = _remote(self._ssh, host, program, invitation)
        # In a session of its own: Ctrl-C in the terminal is for horovodrun, which decides.
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd="/" if local else None,
        )
        with suppress(OSError):  # its ranks must not inherit the driver's limit
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, self._files)
        with self._lock:
            self._processes[host] = process
        limit = threading.Timer(_REGISTER_SECONDS, self._check, [host, launch, process])
        limit.daemon = True
        limit.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(OSError):  # it has ended: its output and exit code say why
                process.stdin.write(invitation.line())
                process.stdin.flush()
            self._pass_on(host, process.stdout)
            code = process.wait()
        finally:
            limit.cancel()
            with suppress(OSError):
                process.stdin.close()
            process.stdout.close()
        return f"{'it' if local else 'ssh'} ended with exit code {code}"

    def _check(self, host: str, launch: str, process: subprocess.Popen[bytes]) -> None:
        """Kill an agent that has not registered in time."""
        if not self._hub.has_registered(launch):
            self._say(f"{host}: no agent has responded for {_REGISTER_SECONDS:.0f} s")
            process.kill()

    def _pass_on(self, host: str, output: IO[bytes]) -> None:
        """Print what the agent and ssh write."""
        for line in output:
            text = line.decode(errors="replace").strip()
            if text.startswith("hvdtrain agent"):
                text = text.partition(": ")[2]
            if text:
                self._say(f"{host}: {text}")


def ssh_command(port: int | None = None, identity: str | None = None) -> list[str]:
    """Return the argv of ssh, before the host's name."""
    options = [] if port is None else ["-p", str(port)]
    return [*_SSH, *options, *([] if identity is None else ["-i", identity])]


def _remote(
    ssh: Sequence[str], host: str, program: Sequence[str], invitation: Invitation
) -> tuple[list[str], Invitation]:
    """Return the argv that starts an agent on another host, and what to write to its stdin."""
    # Not in the home directory: Python would find a directory named hvdtrain there.
    command = f"cd / && exec {shlex.join(program)}"
    if ssh[0] == "ssh":
        return [*ssh, host, command], invitation
    # kubexec.sh of Kubeflow has no stdin; whoever can enter the pod can read its arguments.
    invitation = replace(invitation, attached=False)
    line = shlex.quote(invitation.line().decode())
    return [*ssh, host, f"printf %s {line} | ({command})"], invitation
