"""hvdtrain's part of an elastic horovodrun: the driver, and an agent on each host.

Horovod's launcher loads this module through the entry point horovod.elastic_launcher (patch 0004)
and calls `run` for commands that it `serves`.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from horovod.runner.common.util import env as horovod_env
from horovod.runner.util import network

from hvdtrain.agent import protocol
from hvdtrain.agent.connections import raise_file_limit
from hvdtrain.agent.hub import Hub, Slot
from hvdtrain.agent.invitation import Invitation
from hvdtrain.agent.output import rank_prefix, show
from hvdtrain.agent.started import StartedAgents, ssh_command
from hvdtrain.elastic.command import horovod_script, runs_hvdtrain
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.rendezvous import environment_of
from hvdtrain.elastic.request_server import RequestServer
from hvdtrain.errors import EXIT_CRASH
from hvdtrain.runtime import interfaces
from hvdtrain.runtime.queued_output import Destination, queued, say

# An agent ends its ranks after this time without horovodrun, if its stdin does not end before.
_DRIVER_SECONDS = 60.0
_END_SECONDS = 5.0  # for the agents, at the end of the job


def serves(command: Sequence[str]) -> bool:
    """Whether a command is hvdtrain's: its processes request their ranks from this driver.

    Processes of hvdtrain do so themselves, and unchanged scripts of Horovod's elastic API through
    horovod_script.py. Other commands are left to Horovod's own driver, which a line says: it may
    wait for a second host, and processes of hvdtrain cannot train under it.
    """
    ours = runs_hvdtrain(command) or horovod_script(command) is not None
    if not ours:
        say(
            "Horovod's own elastic driver starts this command, because neither its script nor a "
            "module that the script imports uses hvdtrain.training or hvd.elastic; if it trains "
            "with hvdtrain, set HVDTRAIN_ELASTIC=1"
        )
    return ours


def run(settings: Any, env: Mapping[str, str], command: Sequence[str]) -> int:
    """Run an elastic job; return its exit code.

    Args:
        settings: Horovod's ElasticSettings, with the options of horovodrun.
        env: the environment of the ranks.
        command: argv of a rank.
    """
    with queued():
        return _run(settings, env, command)


def _run(settings: Any, env: Mapping[str, str], command: Sequence[str]) -> int:
    script = horovod_script(command)
    command = script or command
    key, files_before = secrets.token_bytes(32), raise_file_limit()
    rendezvous = RequestServer(protocol.rendezvous_secret(key))
    driver = ElasticDriver(
        rendezvous,
        settings.discovery,
        settings.min_num_proc,
        settings.max_num_proc,
        timeout=settings.elastic_timeout,
        reset_limit=settings.reset_limit,
        cooldown_range=settings.cooldown_range,
        verbose=settings.verbose,
        horovod_script=script is not None,
    )
    port = rendezvous.start(driver)
    driver.wait_for_available_slots(settings.num_proc)
    env, address = driver.choose_interfaces(settings.nics, env)
    driver.handle_signals()
    files = _Files(settings.output_filename, settings.num_proc)
    prefix = _with_time if settings.prefix_output_with_timestamp else rank_prefix
    output = partial(show, prefix=prefix, copy=files.write)
    hub = _HorovodHub(
        key,
        _DRIVER_SECONDS,
        command,
        os.getcwd(),
        output,
        lambda host, number: driver.signal(number, host),
        say,
    )
    hub.shown = command if settings.verbose else None
    hub.environment = lambda slot, _: environment_of(slot, address, port)
    invitation = Invitation(
        interfaces.addresses_from(address),
        hub.port,
        key.hex(),
        os.getcwd(),
        {name: text for name, text in env.items() if horovod_env.is_exportable(name)},
    )
    agents = StartedAgents(hub, invitation, _ssh(settings), _is_local, say, files_before)
    hub.start_agents_with(agents.start)
    code = EXIT_CRASH
    try:
        driver.start(hub, settings.num_proc)
        code = driver.wait()
        driver.stop()
    finally:
        hub.finish(code)
        agents.end(_END_SECONDS)
    return code


class _HorovodHub(Hub):
    """A hub that prints Horovod's messages about processes.

    Attributes:
        shown: command that is printed at each start; None: not printed.
    """

    shown: Sequence[str] | None = None

    def start(self, slot: Slot, on_exit: Callable[[int], None]) -> None:
        if self.shown is not None:
            print(f"{list(self.shown)}\n", end="")

        def ended(code: int) -> None:
            if code:
                print(f"Process {slot.rank} exit with status code {code}.\n", end="")
            on_exit(code)

        super().start(slot, ended)


class _Files:
    """Copies of the ranks' output: DIRECTORY/rank.N/stdout and stderr (--output-filename)."""

    def __init__(self, directory: str | None, ranks: int) -> None:
        self._directory = Path(directory) if directory else None
        self._digits = len(str(ranks - 1))
        self._destinations: dict[tuple[int, str], Destination] = {}
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def write(self, number: int, stream: str, text: str) -> None:
        if self._directory is None:
            return
        if (destination := self._destinations.get((number, stream))) is None:
            of_rank = self._directory / f"rank.{number:0{self._digits}d}"
            destination = self._destinations[number, stream] = Destination(
                partial(_append, of_rank / stream, [])
            )
        destination.put(text.encode())


def _append(path: Path, opened: list[IO[bytes]], content: bytes) -> int:
    """Write to a file that is opened, and emptied, with the first call."""
    if not opened:
        path.parent.mkdir(exist_ok=True)
        opened.append(path.open("wb", buffering=0))
    return opened[0].write(content)


def _with_time(number: int, stream: str, _: str) -> str:
    return f"{time.asctime()}[{number}]<{stream}>:"


def _ssh(settings: Any) -> list[str]:
    if horovod_env.is_kubeflow_mpi():
        return [horovod_env.KUBEFLOW_MPI_EXEC]
    return ssh_command(settings.ssh_port, settings.ssh_identity_file)


def _is_local(host: str) -> bool:
    return network.resolve_host_address(host) in network.get_local_host_addresses()
