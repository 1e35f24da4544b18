"""The driver's side of the agents: their hosts, and the processes that they run for the driver.

The hub is the driver's host discovery (`find_available_hosts_and_slots`) and its way to start and
end processes (`start`, `end`, `end_all`). One thread serves all agents.

An agent whose connection breaks usually returns at once, with the same processes. If it does not
within RETURN_SECONDS, if it falls silent (failure_detector.py), or if another agent registers for
its host, its processes are lost and the host is not available. Processes of an agent that returns
later are ended before its slots are used.

The hub of horovodrun starts agents itself (`start_agents_with`): a process on a host without an
agent waits for one. The end of what started the agent (ssh) ends its processes.

The hub of a driver that replaces another one expects the agents of the job with their processes
(`adopt`), and gives up those that do not register (`give_up_missing`): at once if a process needs
the driver, because it may have lost one of theirs. `set_order` sends the agents
when each of them may replace this driver.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from hvdtrain.agent import protocol
from hvdtrain.agent.connections import DriverConnections, ServerThread
from hvdtrain.agent.failure_detector import FailureDetector, Silence
from hvdtrain.agent.protocol import Channel, Message
from hvdtrain.runtime.clock import Clock
from hvdtrain.untrusted import checked, printable
from hvdtrain.version import __version__

RETURN_SECONDS = 0.5
# The same for an agent that the hub has started: its end is noticed before.
_STARTED_RETURN_SECONDS = 5.0
# Longer than the silence after which the connection of a host that was switched off is given up.
_SAME_HOST_SECONDS = 2 * protocol.SILENT_SECONDS
_LOOK_SECONDS = 0.25
_QUIET_SECONDS = 1.0  # longer than between two beats of an agent
_LAST_TURN = 16  # after all others in their part of the network, however many there are
_FINISH_SECONDS = 10.0
_BACKLOG = 4096
_CLOCK_SECONDS = 5.0  # difference of two hosts' clocks that is reported
_KILLED = 128 + 9  # exit code of a process that was lost with its agent
_UNREACHABLE = 255  # the same if the hub started the agent; ssh's exit code for a lost connection
_TERMINATED = 128 + 15  # of a process that was to end before it was started
_HOST_CHARACTERS = 253
_PIECE_BYTES = protocol.MAX_FRAME_BYTES // 4  # Linux allows words of at most 128 KiB
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
    clock: float
    running: dict[str, int]
    ended: dict[str, int]
    signal: int = 0
    launch: str = ""


_OnExit = Callable[[int], None]  # called with the exit code of a process


@dataclass
class _Agent:
    """An agent; `channel` is None while it is away, since `away_since`.

    Args:
        strays: processes that it runs, but that the driver has given up.
    """

    registration: Registration
    channel: Channel | None
    address: str
    processes: dict[int, _OnExit] = field(default_factory=dict)
    strays: set[int] = field(default_factory=set)
    away_since: float | None = None
    ends: set[int] = field(default_factory=set)  # asked for while it was away
    turn: tuple[Channel | None, Message] | None = None  # that it has been sent, on which channel

    def send(self, message: Message) -> None:
        if self.channel is not None:
            self.channel.send(message)


class Hub(ServerThread):
    """Serves the agents of one job.

    Args:
        secret: of the job.
        driver_timeout: seconds without a driver after which an agent ends its ranks.
        command: argv of a rank.
        directory: working directory of the ranks.
        on_output: called with (process number, "stdout" or "stderr", lines).
        on_signal: called with (host, signal number) when an agent receives a signal.
        say: prints a message for the user.
        tls: for encrypted connections.

    Attributes:
        removals_are_final: a host that `find_available_hosts_and_slots` does not return is gone.
        port: TCP port for agents.
        misplaced: the launcher started several agents on one host.
        lost_hosts: an agent there has not responded and had processes: this host may be cut off.
        environment: returns the environment of a process, given its slot and the driver's address
            as seen from its host.
        on_hosts: called when a host comes or goes.
        on_isolation: called with the hosts that respond and have processes before another host is
            given up although nothing shows that this host is not cut off; see `postpone`.
        on_leave: called with a host that leaves the run, and its processes.
        on_silence: called with the processes of a silent host, and a description of the silence,
            before they are given up.
        detector: judges the agents' silences.
    """

    removals_are_final = True

    def __init__(
        self,
        secret: bytes,
        driver_timeout: float,
        command: Sequence[str],
        directory: str,
        on_output: Callable[[int, str, str], None],
        on_signal: Callable[[str, int], None],
        say: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__("agents")
        self._secret, self._driver_timeout, self._tls = secret, driver_timeout, tls
        self._command, self._directory = _pieces(command), directory
        self._on_output, self._on_signal, self._say = on_output, on_signal, say
        self.environment: Callable[[Slot, str], Mapping[str, str]] = lambda *_: {}
        self.on_hosts: Callable[[], None] = lambda: None
        self.on_isolation: Callable[[Set[str]], None] = lambda _: None
        self.on_leave: Callable[[str, Sequence[int]], None] = lambda *_: None
        self.on_silence: Callable[[Sequence[int], str], None] = lambda *_: None
        self.detector = FailureDetector(protocol.SILENT_SECONDS)
        self._over: int | None = None  # last generation that has ended
        self._alone = False  # no host with processes responds
        self._agents: dict[str, _Agent] = {}  # by host
        self._refused: dict[str, float] = {}  # agent -> time of its first refusal
        self._signalled: set[str] = set()  # hosts whose agents have reported a signal
        # Host -> its turn to replace this driver; None: no agent can. Host -> its processes that
        # have the run's state; None: no process has one.
        self._turns: dict[str, int] | None = None
        self._holders: Mapping[str, Sequence[int]] | None = None
        self._connections = DriverConnections(4, say)
        # Of hosts whose agents have not registered since this driver took over.
        self._expected: dict[str, dict[int, _OnExit]] = {}
        # Starts an agent on a host; host -> launch of the only agent that may register for it;
        # host -> processes that wait for the agent.
        self._start_agent: Callable[[str], None] | None = None
        self._return_seconds, self._lost_code = RETURN_SECONDS, _KILLED
        self._launches: dict[str, str] = {}
        self._registered: set[str] = set()  # launches
        self._waiting: dict[str, list[tuple[Slot, _OnExit]]] = {}
        self._finished: int | None = None
        self.lost_hosts: frozenset[str] = frozenset()
        self.misplaced = False
        self._hosts = threading.Condition()  # of _slots
        self._slots: dict[str, int] = {}
        self._socket = socket.create_server(("", 0), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._thread.start()

    # --- called by the driver's threads ------------------------------------------------------

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return host -> slots of all agents that may start processes, node2 before node10."""
        with self._hosts:
            return dict(sorted(self._slots.items(), key=lambda item: _natural(item[0])))

    def start_agents_with(self, start: Callable[[str], None]) -> None:
        """Set the function that starts an agent on a host; the hub's thread calls it as needed.

        It returns at once, and does nothing while an agent that it started has not ended.
        """
        self._start_agent = start
        self._return_seconds, self._lost_code = _STARTED_RETURN_SECONDS, _UNREACHABLE

    def expect_agent(self, host: str, launch: str) -> None:
        """Accept only this agent for a host from now on."""
        self._call(self._launches.__setitem__, host, launch)

    def has_registered(self, launch: str) -> bool:
        """Whether an agent has registered so far."""
        return launch in self._registered

    def agent_ended(self, host: str, launch: str, why: str) -> None:
        """Give up an agent, its processes, and the processes that wait for it."""
        self._call(self._agent_ended, host, launch, why)

    def adopt(
        self,
        hosts: Mapping[str, int],
        processes: Mapping[int, str],
        on_exit: Callable[[int, int], None],
    ) -> None:
        """Expect the agents of a job that another driver began; call it before they can connect.

        Args:
            hosts: host -> slots; these hosts count as available until `give_up_missing`.
            processes: process -> host.
            on_exit: called with a process and its exit code.
        """
        for host in {*hosts, *processes.values()}:
            self._expected[host] = {}
        for number, host in processes.items():
            self._expected[host][number] = partial(on_exit, number)
        with self._hosts:
            self._slots = dict(hosts)

    def give_up_missing(
        self,
        seconds: float,
        patience: float = 0.0,
        well: Callable[[], bool] = lambda: True,
        gone: str = "",
    ) -> None:
        """Wait for the agents that `adopt` expects, then give up the others and their processes.

        Args:
            seconds: from one agent to the next one. A thousand agents do not return at once.
            patience: seconds in all, while processes run that no missing host can have left.
            well: whether no process has ended or requests anything: the processes of missing
                hosts run, too, and their agents are only late, such as on a slow disk.
            gone: host that is not waited for so long if it had processes.
        """
        deadline = time.monotonic() + patience
        while count := len(self._expected):
            with self._hosts:
                if self._hosts.wait_for(lambda: len(self._expected) != count, seconds):
                    continue
            late = {host for host, processes in tuple(self._expected.items()) if processes}
            runs = any(agent.processes for agent in tuple(self._agents.values()))
            waits = late and gone not in late and runs and well()
            if not waits or time.monotonic() > deadline:
                break
            seconds = _LOOK_SECONDS
        done = threading.Event()
        self._call(self._give_up_missing, done)
        done.wait(_FINISH_SECONDS)

    def wait_for(self, enough: Callable[[dict[str, int]], bool], seconds: float) -> bool:
        """Wait until `enough` of host -> slots is true; return whether it is."""
        with self._hosts:
            return self._hosts.wait_for(lambda: enough(self._slots), seconds)

    def start(self, slot: Slot, on_exit: _OnExit) -> None:
        """Start a process; `on_exit` is called in the hub's thread with its exit code."""
        self._call(self._start, slot, on_exit)

    def end(self, number: int) -> None:
        """End a process: SIGTERM, and SIGKILL 5 s later."""
        self._call(self._end, {number})

    def end_all(self) -> None:
        """End all processes."""
        self._call(self._end, None)

    def set_witnesses(self, hosts: Set[str]) -> None:
        """Set the hosts that can continue the run without other hosts."""
        self._call(setattr, self.detector, "witnesses", hosts)

    def end_generation(self, generation: int) -> None:
        """Notify all ranks that a generation is over."""
        self._call(self._end_generation, generation)

    def set_order(
        self, order: Sequence[str] | None, holders: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Send all agents their turns: whether and when they may replace this driver.

        Args:
            order: hosts in their order, other hosts follow; None: no agent can replace it.
            holders: host -> its processes that have the run's state; None: no process has one.
        """
        turns = None if order is None else {host: turn for turn, host in enumerate(order)}
        self._call(self._set_order, turns, holders)

    def finish(self, code: int) -> None:
        """End all agents, which exit with `code`, and the hub."""
        self._call(self._finish, code)
        self._thread.join(_FINISH_SECONDS)

    # --- the hub's thread --------------------------------------------------------------------

    async def _serve(self) -> None:
        serving = self._connections.serve(self._socket, self._serve_connection, self._tls)
        server = self._loop.create_task(serving)
        clock, left = Clock(2 * _LOOK_SECONDS), _FINISH_SECONDS - 1
        while not server.done():
            began = time.monotonic()
            await asyncio.sleep(_LOOK_SECONDS if self._finished is None else 0.02)
            passed, now = clock.look(), time.monotonic()
            self.detector.excuse(now - began - passed, now)
            for silence in self.detector.look(now):
                self._give_up_silent(silence, now)
            for agent in tuple(self._agents.values()):
                agent.send({"type": "beat"})
                self._give_up_away(agent)
            if self._finished is not None:
                left -= passed
                if left < 0 or all(a.channel is None for a in self._agents.values()):
                    return
        await server  # it raises the error by which it has ended

    def postpone(self, hosts: Set[str]) -> None:
        """Let the agents of these hosts be the last to replace this driver; in the hub's thread."""
        for host in hosts:
            self._agents[host].send({"type": "turn", "turn": _LAST_TURN, "holds": None})

    def _responding(self, now: float) -> frozenset[str]:
        """Return the hosts with processes that have responded lately."""
        hosts = [host for host, agent in self._agents.items() if agent.processes]
        return frozenset(h for h in hosts if self.detector.silence(h, now) <= _QUIET_SECONDS)

    def _give_up_silent(self, silence: Silence, now: float) -> None:
        agent, why = self._agents[silence.host], f"no message for {silence.seconds:.2f} s"
        if silence.confirmed:
            why += f", bound {silence.bound:.2f} s"
        elif agent.processes:
            responding = self._responding(now)
            if self._start_agent is None:
                self.on_isolation(responding)
            elif not responding:  # the end of the agent (of ssh) decides
                if not self._alone:
                    self._say("no host responds: the network of this host may have failed")
                self._alone = True
                return
        if agent.channel is not None:
            agent.channel.abort()
        self.detector.give_up(silence.host)
        self.on_silence(tuple(agent.processes), why)
        self._lost(agent, why)

    def _give_up_away(self, agent: _Agent) -> None:
        """Give up an agent that stays away."""
        if (since := agent.away_since) and time.monotonic() - since > self._return_seconds:
            self._lost(agent, "its connection was closed")

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one agent until its connection breaks."""
        try:
            channel = await protocol.accept(reader, writer, self._secret)
            first = await asyncio.wait_for(channel.receive(), protocol.HANDSHAKE_SECONDS)
            self._connections.proven()
        except (OSError, asyncio.TimeoutError):
            writer.transport.abort()
            return
        with suppress(OSError):
            agent = self._register(channel, first)
            if agent is not None:
                await self._listen(agent, channel)
        if (agent := self._of_channel(channel)) is not None:
            agent.channel, agent.away_since = None, time.monotonic()
            self.detector.disconnected(agent.registration.host)
            self._loop.call_later(self._return_seconds, self._give_up_away, agent)
        writer.close()

    def _give_up_missing(self, done: threading.Event) -> None:
        expected, self._expected = self._expected, {}
        for host, processes in expected.items():
            if processes:
                self.lost_hosts |= {host}
                self._say(f"the agent of {printable(host)} has not responded: its ranks are lost")
            for on_exit in processes.values():
                on_exit(_KILLED)
        self._show_hosts()
        done.set()

    def _of_channel(self, channel: Channel) -> _Agent | None:
        return next((a for a in self._agents.values() if a.channel is channel), None)

    def _register(self, channel: Channel, first: Message) -> _Agent | None:
        """Accept an agent, or refuse it with a reason."""
        problem, final = "", True
        try:
            found = checked(Registration, first)
            if not all(number.isdecimal() for number in (*found.running, *found.ended)):
                raise ValueError("processes have numbers")
            known = self._agents.get(found.host)
            if found.version != __version__:
                problem = f"the driver's hvdtrain is {__version__}, not {found.version}"
            elif self._start_agent and found.launch != self._launches.get(found.host):
                problem = "another agent has replaced it"
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
            self.misplaced |= final
            channel.send({"type": "refuse", "reason": problem, "final": final})
            return None
        channel.send({"type": "welcome", "driver_timeout": self._driver_timeout})
        return self._accept(channel, found)

    def _accept(self, channel: Channel, found: Registration) -> _Agent:
        self._registered.add(found.launch)
        agent = self._agents.get(found.host)
        if agent is None:
            agent = self._agents[found.host] = _Agent(found, channel, channel.own_address)
            agent.processes = self._expected.get(found.host, {})
        if agent.channel is not None and agent.channel is not channel:
            agent.channel.abort()
        agent.registration, agent.channel = found, channel
        agent.address, agent.away_since = channel.own_address, None
        local = channel.own_address == channel.peer_address
        self.detector.connected(found.host, local, time.monotonic())
        running = {int(number) for number in found.running}
        for ended, code in found.ended.items():
            self._exited(agent, int(ended), code)
        for number in set(agent.processes) - running:
            self._exited(agent, number, self._lost_code)  # its start was lost
        with self._hosts:
            self._expected.pop(found.host, None)
            self._hosts.notify_all()
        agent.strays = running - set(agent.processes)
        for number in agent.strays | (agent.ends & running):
            agent.send({"type": "end", "number": number})
        agent.ends.clear()
        if self._over is not None:
            agent.send({"type": "over", "generation": self._over})
        self._send_turn(agent)
        if found.signal:  # its message may have been lost with a connection or a driver
            self._signal(found.host, found.signal, again=False)
        self._start_waiting(agent)
        skew = abs(found.clock - time.time())
        if skew > _CLOCK_SECONDS:
            self._say(f"the clock of {found.host} differs from the driver's by {skew:.0f} s")
        self._show_hosts()
        return agent

    async def _listen(self, agent: _Agent, channel: Channel) -> None:
        while True:
            message = await channel.receive()
            heartbeat = message.get("type") == "beat"
            self.detector.heard(agent.registration.host, time.monotonic(), heartbeat)
            if self._alone and agent.processes:
                self._alone = False
                self._say("hosts respond again")
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
                self._signal(agent.registration.host, int(message["number"]), again=True)
            case "leave":
                self.on_leave(agent.registration.host, tuple(agent.processes))

    def _signal(self, host: str, number: int, again: bool) -> None:
        if again or host not in self._signalled:
            self._signalled.add(host)
            self._on_signal(host, number)

    def _end_generation(self, generation: int) -> None:
        self._over = generation
        for agent in self._agents.values():
            agent.send({"type": "over", "generation": generation})

    def _set_order(
        self, turns: dict[str, int] | None, holders: Mapping[str, Sequence[int]] | None
    ) -> None:
        self._turns, self._holders = turns, holders
        for agent in self._agents.values():
            self._send_turn(agent)

    def _send_turn(self, agent: _Agent) -> None:
        """Send an agent its turn to replace this driver, if that has changed."""
        host = agent.registration.host
        turn = None
        if self._turns is not None:
            later = len(self._turns) + len(self._agents)
            turn = self._turns.get(host, later)
        holds = None if self._holders is None else list(self._holders.get(host, ()))
        message = {"type": "turn", "turn": turn, "holds": holds}
        if agent.turn != (agent.channel, message):
            agent.turn = (agent.channel, message)
            agent.send(message)

    def _exited(self, agent: _Agent, number: int, code: int) -> None:
        if number in agent.strays:
            agent.strays.discard(number)
            self._show_hosts()
            self._start_waiting(agent)
        if (on_exit := agent.processes.pop(number, None)) is not None:
            on_exit(code)

    def _lost(self, agent: _Agent, why: str) -> None:
        """Give up an agent, its processes and its host."""
        host = agent.registration.host
        if self._agents.get(host) is not agent:
            return
        del self._agents[host]
        self.detector.disconnected(host)
        if self._finished is None:
            count = len(agent.processes)
            self.lost_hosts |= {host} if count else set()
            ranks = f"; its {count} rank{'s are' if count > 1 else ' is'} lost" if count else ""
            self._say(f"the agent of {printable(host)} is gone ({why}){ranks}")
        for number in tuple(agent.processes):
            self._exited(agent, number, self._lost_code)
        self._show_hosts()

    def _agent_ended(self, host: str, launch: str, why: str) -> None:
        if self._launches.get(host) != launch:
            return
        del self._launches[host]
        if (agent := self._agents.get(host)) is not None:
            if agent.channel is not None:
                agent.channel.abort()
            self._lost(agent, why)
        for _, on_exit in self._waiting.pop(host, ()):
            on_exit(_UNREACHABLE)

    def _show_hosts(self) -> None:
        slots = {
            host: agent.registration.slots
            for host, agent in self._agents.items()
            if not agent.strays
        }
        if self._expected:
            return  # all hosts of the job count as available
        with self._hosts:
            changed, self._slots = slots != self._slots, slots
            self._hosts.notify_all()
        if changed:
            self.on_hosts()

    def _start(self, slot: Slot, on_exit: _OnExit) -> None:
        agent = self._agents.get(slot.hostname)
        if agent is None or agent.channel is None or (agent.strays and self._start_agent):
            if self._start_agent is None:
                on_exit(_KILLED)  # it has just gone
            else:
                self._waiting.setdefault(slot.hostname, []).append((slot, on_exit))
                self._start_agent(slot.hostname)
            return
        agent.processes[slot.rank] = on_exit
        *first, last = self._command
        for words in first:
            agent.send({"type": "words", "words": words})
        agent.send(
            {
                "type": "start",
                "number": slot.rank,
                "slot": slot.local_rank,
                "command": last,
                "directory": self._directory,
                "environment": dict(self.environment(slot, self._address_for(agent))),
            }
        )

    def _start_waiting(self, agent: _Agent) -> None:
        """Start the processes that wait for an agent, if its host is free for them."""
        if not agent.strays:
            for waiting in self._waiting.pop(agent.registration.host, ()):
                self._start(*waiting)

    def _address_for(self, agent: _Agent) -> str:
        """Return the driver's address for an agent's host: the one that it connected to.

        The driver's own host has all addresses; ranks there must use the one that others reach.
        """
        if agent.channel is None or agent.channel.peer_address != agent.address:
            return agent.address
        others = (a.address for a in self._agents.values() if a is not agent)
        return next(others, agent.address)

    def _end(self, numbers: Set[int] | None) -> None:
        """End processes, also those that wait for an agent; None: all of them."""
        for agent in self._agents.values():
            for number in agent.processes if numbers is None else numbers & agent.processes.keys():
                if agent.channel is None:
                    agent.ends.add(number)
                agent.send({"type": "end", "number": number})
        for host, waiting in tuple(self._waiting.items()):
            ended = [one for one in waiting if numbers is None or one[0].rank in numbers]
            self._waiting[host] = [one for one in waiting if one not in ended]
            for _, on_exit in ended:
                on_exit(_TERMINATED)

    def _finish(self, code: int) -> None:
        self._finished = code
        for agent in self._agents.values():
            agent.send({"type": "finish", "code": code})


def _pieces(command: Sequence[str]) -> list[list[str]]:
    """Return the words of a command in lists, each of which fits into a message."""
    pieces: list[list[str]] = [[]]
    size = 0
    for word in command:
        size += len(json.dumps(word))
        if size > _PIECE_BYTES and pieces[-1]:
            pieces.append([])
            size = len(json.dumps(word))
        pieces[-1].append(word)
    return pieces


def _natural(host: str) -> list[tuple[int, str]]:
    """Sort key by which the numbers in host names count as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _PARTS.split(host)]
