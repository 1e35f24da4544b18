"""The driver's side of the agents: their hosts, and the processes that they run for the driver.

The hub is the driver's host discovery (`find_available_hosts_and_slots`) and its way to start and
end processes (`start`, `end`, `end_all`, as elastic.driver.Starter). One thread serves all agents.

An agent whose connection breaks usually returns at once, with the same processes. If it does not
within RETURN_SECONDS, or another agent registers for its host, its processes are lost and the host
is not available. Processes of an agent that returns later are ended before its slots are used.
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import hvdtrain
from hvdtrain.agent import protocol
from hvdtrain.agent.protocol import Channel, Message
from hvdtrain.untrusted import checked, printable

RETURN_SECONDS = 0.5
# Longer than the silence after which the connection of a host that was switched off is given up.
_SAME_HOST_SECONDS = 2 * protocol.SILENT_SECONDS
_LOOK_SECONDS = 0.25
_FINISH_SECONDS = 10.0
_WAITING_CONNECTIONS = 256  # that have not proved that they have the job's secret
_CLOCK_SECONDS = 5.0  # difference of two hosts' clocks that is reported
_KILLED = 128 + 9  # exit code of a process that was lost with its agent
_HOST_CHARACTERS = 253
_PARTS = re.compile(r"([0-9]+)")


class Slot(Protocol):
    """Place of a process: Horovod's SlotInfo. `rank` is the number of the process."""

    hostname: str
    rank: int
    local_rank: int


@dataclass(frozen=True)
class Registration:
    """First message of an agent, see agent.py."""

    agent: str
    host: str
    slots: int
    version: str
    facts: dict[str, Any]
    running: dict[str, int]
    ended: dict[str, int]


@dataclass
class _Process:
    number: int
    on_exit: Callable[[int], None]


@dataclass
class _Agent:
    """An agent; `channel` is None while it is away, since `away_since`.

    Args:
        strays: processes that it runs, but that the driver has given up.
        silent: seconds since its last message.
    """

    registration: Registration
    channel: Channel | None
    address: str
    processes: dict[int, _Process] = field(default_factory=dict)
    strays: set[int] = field(default_factory=set)
    silent: float = 0.0
    away_since: float | None = None
    ends: set[int] = field(default_factory=set)  # asked for while it was away

    def send(self, message: Message) -> None:
        if self.channel is not None:
            self.channel.send(message)


class Hub:
    """Serves the agents of one job.

    Args:
        secret: of the job.
        driver_timeout: seconds without a driver after which an agent ends its ranks.
        command: argv of a rank.
        directory: working directory of the ranks.
        on_output: called with (process number, "stdout" or "stderr", lines).
        on_signal: called with (host, signal number) when an agent receives a signal.
        say: prints a message for the user.

    Attributes:
        certain: a host that `find_available_hosts_and_slots` does not return is gone.
        port: TCP port for agents.
    """

    certain = True

    def __init__(
        self,
        secret: bytes,
        driver_timeout: float,
        command: Sequence[str],
        directory: str,
        on_output: Callable[[int, str, str], None],
        on_signal: Callable[[str, int], None],
        say: Callable[[str], None],
    ) -> None:
        self._secret, self._driver_timeout = secret, driver_timeout
        self._command, self._directory = list(command), directory
        self._on_output, self._on_signal, self._say = on_output, on_signal, say
        self._on_hosts: Callable[[], None] = lambda: None
        self._environment: Callable[[Slot, str], Mapping[str, str]] = lambda *_: {}
        self._agents: dict[str, _Agent] = {}  # by host
        self._of_process: dict[int, _Agent] = {}
        self._refused: dict[str, float] = {}  # agent -> time of its first refusal
        self._pending = 0
        self._finished: int | None = None
        self._hosts = threading.Condition()  # of _slots
        self._slots: dict[str, int] = {}
        self._socket = socket.create_server(("", 0), backlog=1024)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    # --- called by the driver's threads ------------------------------------------------------

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return host -> slots of all agents that may start processes, node2 before node10."""
        with self._hosts:
            return dict(sorted(self._slots.items(), key=lambda item: _natural(item[0])))

    def on_hosts(self, changed: Callable[[], None]) -> None:
        """Set what is called when a host comes or goes."""
        self._on_hosts = changed

    def on_start(self, environment: Callable[[Slot, str], Mapping[str, str]]) -> None:
        """Set the function that returns the environment of a process.

        It is called with the process's slot and the driver's address as seen from its host.
        """
        self._environment = environment

    def wait_for(self, enough: Callable[[dict[str, int]], bool], seconds: float) -> bool:
        """Wait until `enough` of host -> slots is true; return whether it is."""
        with self._hosts:
            return self._hosts.wait_for(lambda: enough(self._slots), seconds)

    def start(self, slot: Slot, on_exit: Callable[[int], None]) -> None:
        """Start a process; `on_exit` is called in the hub's thread with its exit code."""
        self._call(self._start, slot, _Process(slot.rank, on_exit))

    def end(self, number: int) -> None:
        """End a process: SIGTERM, and SIGKILL 5 s later."""
        self._call(self._end, number)

    def end_all(self) -> None:
        """End all processes."""
        self._call(self._end_all)

    def finish(self, code: int) -> None:
        """End all agents, which exit with `code`, and the hub."""
        self._call(self._finish, code)
        self._thread.join(_FINISH_SECONDS)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the hub has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- the hub's thread --------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._serve_connection, sock=self._socket)
        seen, left = time.monotonic(), _FINISH_SECONDS - 1
        async with server:
            while True:
                await asyncio.sleep(_LOOK_SECONDS if self._finished is None else 0.02)
                # Time in which this process was suspended does not count.
                passed = min(time.monotonic() - seen, 2 * _LOOK_SECONDS)
                seen = time.monotonic()
                for agent in tuple(self._agents.values()):
                    self._look(agent, passed)
                if self._finished is not None:
                    left -= passed
                    if left < 0 or all(a.channel is None for a in self._agents.values()):
                        return

    def _look(self, agent: _Agent, passed: float) -> None:
        """Notice an agent that is silent or stays away."""
        if agent.channel is not None:
            agent.send({"type": "beat"})
            agent.silent += passed
            if agent.silent > protocol.SILENT_SECONDS:
                agent.channel.abort()
                self._lost(agent, f"no message for {protocol.SILENT_SECONDS:.0f} s")
        elif agent.away_since is not None and time.monotonic() - agent.away_since > RETURN_SECONDS:
            self._lost(agent, "its connection was closed")

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one agent until its connection breaks."""
        if self._pending >= _WAITING_CONNECTIONS:
            writer.transport.abort()
            return
        self._pending += 1
        try:
            channel = await protocol.accept(reader, writer, self._secret)
            first = await asyncio.wait_for(channel.receive(), protocol.HANDSHAKE_SECONDS)
        except (OSError, asyncio.TimeoutError):
            writer.transport.abort()
            return
        finally:
            self._pending -= 1
        with suppress(OSError):
            agent = self._register(channel, first)
            if agent is not None:
                await self._listen(agent, channel)
        if (agent := self._of_channel(channel)) is not None:
            agent.channel, agent.away_since = None, time.monotonic()
            self._loop.call_later(RETURN_SECONDS, self._look, agent, 0.0)
        writer.close()

    def _of_channel(self, channel: Channel) -> _Agent | None:
        return next((a for a in self._agents.values() if a.channel is channel), None)

    def _register(self, channel: Channel, first: Message) -> _Agent | None:
        """Accept an agent, or refuse it with a reason."""
        problem, final = "", True
        try:
            found = checked(Registration, first)
            known = self._agents.get(found.host)
            if found.version != hvdtrain.__version__:
                problem = f"the driver's hvdtrain is {hvdtrain.__version__}, not {found.version}"
            elif not 0 < len(found.host) <= _HOST_CHARACTERS or found.slots < 1:
                problem = "a host name and at least one slot are expected"
            elif known is not None and known.registration.agent != found.agent:
                if known.channel is not None:
                    # Either a second agent on the host, or the host was switched off and on.
                    since = self._refused.setdefault(found.agent, time.monotonic())
                    problem = f"{found.host} already has an agent; start one per host"
                    final = time.monotonic() - since > _SAME_HOST_SECONDS
                else:
                    self._lost(known, "another agent has replaced it")
        except ValueError as error:
            problem = f"the registration is wrong: {error}"
        if self._finished is not None:
            channel.send({"type": "welcome", "driver_timeout": self._driver_timeout})
            channel.send({"type": "finish", "code": self._finished})
            return None
        if problem:
            final = final and not problem.startswith("the registration")
            channel.send({"type": "refuse", "reason": problem, "final": final})
            return None
        channel.send({"type": "welcome", "driver_timeout": self._driver_timeout})
        return self._accept(channel, found)

    def _accept(self, channel: Channel, found: Registration) -> _Agent:
        agent = self._agents.get(found.host)
        if agent is None:
            agent = self._agents[found.host] = _Agent(found, channel, channel.own_address)
        if agent.channel is not None and agent.channel is not channel:
            agent.channel.abort()
        agent.registration, agent.channel = found, channel
        agent.address, agent.silent, agent.away_since = channel.own_address, 0.0, None
        running = {int(number) for number in found.running}
        for ended, code in found.ended.items():
            self._exited(agent, int(ended), code)
        for number in set(agent.processes) - running:
            self._exited(agent, number, _KILLED)  # its start was lost with the connection
        agent.strays = running - set(agent.processes)
        for number in agent.strays | (agent.ends & running):
            agent.send({"type": "end", "number": number})
        agent.ends.clear()
        skew = abs(float(found.facts.get("clock", 0.0)) - time.time())
        if skew > _CLOCK_SECONDS:
            self._say(f"the clock of {found.host} differs from the driver's by {skew:.0f} s")
        self._show_hosts()
        return agent

    async def _listen(self, agent: _Agent, channel: Channel) -> None:
        while True:
            message = await channel.receive()
            agent.silent = 0.0
            try:
                self._handle(agent, message)
            except (KeyError, TypeError, ValueError) as error:
                raise protocol.ProtocolError(f"a wrong message: {error}") from None

    def _handle(self, agent: _Agent, message: Message) -> None:
        match message.get("type"):
            case "output":
                number, text = int(message["number"]), str(message["text"])
                self._on_output(number, str(message["stream"]), text)
            case "exit":
                self._exited(agent, int(message["number"]), int(message["code"]))
            case "signal":
                self._on_signal(agent.registration.host, int(message["number"]))

    def _exited(self, agent: _Agent, number: int, code: int) -> None:
        if number in agent.strays:
            agent.strays.discard(number)
            self._show_hosts()
        process = agent.processes.pop(number, None)
        if process is not None:
            self._of_process.pop(number, None)
            process.on_exit(code)

    def _lost(self, agent: _Agent, why: str) -> None:
        """Give up an agent, its processes and its host."""
        host = agent.registration.host
        if self._agents.get(host) is not agent:
            return
        del self._agents[host]
        if self._finished is None:
            count = len(agent.processes)
            ranks = f"; its {count} rank{'s are' if count > 1 else ' is'} lost" if count else ""
            self._say(f"the agent of {printable(host)} is gone ({why}){ranks}")
        for number in tuple(agent.processes):
            self._exited(agent, number, _KILLED)
        self._show_hosts()

    def _show_hosts(self) -> None:
        slots = {
            host: agent.registration.slots
            for host, agent in self._agents.items()
            if not agent.strays
        }
        with self._hosts:
            changed, self._slots = slots != self._slots, slots
            self._hosts.notify_all()
        if changed:
            self._on_hosts()

    def _start(self, slot: Slot, process: _Process) -> None:
        agent = self._agents.get(slot.hostname)
        if agent is None or agent.channel is None:
            process.on_exit(_KILLED)  # it has just gone
            return
        agent.processes[process.number] = process
        self._of_process[process.number] = agent
        agent.send(
            {
                "type": "start",
                "number": process.number,
                "slot": slot.local_rank,
                "command": self._command,
                "directory": self._directory,
                "environment": dict(self._environment(slot, self._address_for(agent))),
            }
        )

    def _address_for(self, agent: _Agent) -> str:
        """Return the driver's address for an agent's host: the one that it connected to.

        The driver's own host has all addresses; ranks there must use the one that others reach.
        """
        if agent.channel is None or agent.channel.peer_address != agent.address:
            return agent.address
        others = (a.address for a in self._agents.values() if a is not agent)
        return next(others, agent.address)

    def _end(self, number: int) -> None:
        agent = self._of_process.get(number)
        if agent is None:
            return
        if agent.channel is None:
            agent.ends.add(number)
        agent.send({"type": "end", "number": number})

    def _end_all(self) -> None:
        for number in tuple(self._of_process):
            self._end(number)

    def _finish(self, code: int) -> None:
        self._finished = code
        for agent in self._agents.values():
            agent.send({"type": "finish", "code": code})


def _natural(host: str) -> list[tuple[int, str]]:
    """Sort key by which the numbers in host names count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _PARTS.split(host)]
