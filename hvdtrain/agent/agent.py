"""The agent of a host: starts and ends ranks for the driver, and reports their output and ends.

    keeper   this process. If the agent is killed, it ends what the agent leaves, and starts another
      agent  connects to the driver, and again if the connection breaks
        guard of each rank (guard.py)
          rank
        driver that replaces another one
      driver of the run, in the first task of `hvdtrain launch`

Messages, each with a "type" (see protocol.py for how they are sent):

    agent -> driver  register: agent, host, slots, version, clock, running {number: slot}, ended
                     {number: exit code}, signal (that it has received), launch; beat; output:
                     number, stream, text; exit: number, code; signal: number; leave
    driver -> agent  welcome: driver_timeout; refuse: reason, final; beat; words: words (the first
                     ones of the next command); start: number, slot, command, directory,
                     environment; end: number; over: generation; finish: code; turn: turn, holds
    rank -> agent    RANK, over a Unix socket
    agent -> rank    number of the last generation that is over, in a line of its own
    watchdog -> agent  WATCHDOG, over the same socket: continue this process if it is stopped

The ranks run on while the driver is away. After `driver_timeout` seconds without it they are asked
to end. The agent then exits with 75, unless a driver that it cannot reach renews its token: the run
continues elsewhere, and the agent waits for that driver or for the exit code of the run. While the
run directory cannot be written or does not respond, no driver can begin: the time counts from when
it can be written again. A rank that needs a driver meanwhile ends without one, and an agent without
ranks waits for 10 times `driver_timeout`.

An agent that horovodrun started knows the driver from its invitation (invitation.py), and ends its
ranks when stdin ends. Other agents find the driver through the run directory. If it is away and
does not renew its token there, an agent starts supervise/successor.py, which becomes the driver if
it gets the token. The agents take turns, which the driver assigns (`turn`), so that not all of them
read the token.

A signal asks all ranks of the run to save and end, with one exception: SIGTERM to an agent that is
not a task of the launch, whose launcher would signal all tasks, means that its host leaves the run,
as when a pod is evicted. Its ranks leave between two steps; then the agent exits with 75. So does
the agent of a job that lends its host to the run, shortly before the end of that job.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.agent import driver_file, guard, protocol
from hvdtrain.agent.connections import raise_file_limit
from hvdtrain.agent.driver_file import DriverFile
from hvdtrain.agent.protocol import Channel, Message
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError
from hvdtrain.run_files import owner_token
from hvdtrain.run_files.events_file import last_lines
from hvdtrain.run_files.owner_token import Token, moved
from hvdtrain.runtime.allocation import seconds_left
from hvdtrain.runtime.clock import Clock
from hvdtrain.runtime.environment import launched
from hvdtrain.runtime.queued_output import flush, say
from hvdtrain.runtime.signals import ASKING, PAIR_SECONDS, requests
from hvdtrain.untrusted import real
from hvdtrain.version import __version__

_CONNECT_SECONDS = 1.5  # to one address of the driver
_REPLY_SECONDS = 5.0
_RETRY_SECONDS = (0.05, 0.5)  # after a first failed attempt; longest pause
_LOOK_SECONDS = protocol.BEAT_SECONDS
_GUARDS_SECONDS = 1.0  # between two looks at guards and watchdogs
# Silence of the driver after which its token is watched; how long the token must be unchanged
# before a successor starts, which then waits until the token is stale; the delay from one agent's
# turn to the next one's; and the pause after a driver that was found to be alive.
_QUIET_SECONDS = 0.75
_UNCHANGED_SECONDS = 0.75
_TURN_SECONDS = 0.5
_AGAIN_SECONDS = 2.0
# Without a driver, all agents look whether the run directory can be written: at this interval, and
# at longer ones while it can, but several times in `driver_timeout`.
_DIRECTORY_SECONDS = 4.0
_LOOKS_IN_TIMEOUT = 4
# A run directory that takes longer to answer counts as one that cannot be written; and for how many
# times `driver_timeout` an agent without ranks waits for it.
_ANSWER_SECONDS = 10.0
_IDLE_FACTOR = 10
# How much longer an agent waits whose host has no rank of the current generation: the others have
# the state of the run, and may be cut off from this host.
_WITHOUT_STATE_SECONDS = 8.0
_SUCCESSOR_END_SECONDS = 12.0
# On a host without ranks, a connection must last this long before the time without a driver counts
# from zero again: a driver may end as soon as it finds that it cannot reach any rank.
_SETTLED_SECONDS = 5.0
_RENEWED_SECONDS = 2.0  # a driver renews its token more often
# A signal that arrives while no driver responds waits for the next one, which lets the ranks save.
_SIGNAL_SECONDS = 10.0
# A host that a job lends to the run: how long before the end of the job it leaves at the latest,
# how often the batch system is asked for that, and after how long it leaves without any rank.
_LEAVE_SECONDS = 10.0
_ASK_SECONDS = 60.0
_UNUSED_SECONDS = 60.0
_END_SECONDS = guard.GRACE_SECONDS + 3.0
_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 14  # a longer line is sent in pieces
_KEPT_BYTES = 1 << 20  # of output, while the driver is away or slow
# Variables that describe the agent as a task of its launcher, which the ranks are not.
_OF_THE_TASK = (
    *("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL", "MV2_COMM_WORLD_"),
    *("SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_TASKS_PER_NODE", "SLURM_GTIDS", "SLURM_TASK_PID", "PBS_TASKNUM"),
)
_STREAMS = ("stdout", "stderr")
_CREDENTIALS = struct.Struct("3i")  # pid, user and group, see unix(7)
_T = TypeVar("_T")


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent.

    Args:
        run: the run directory, in which the driver's file is; None: `driver` is known.
        host: name of this host; unique in the job.
        slots: most ranks on this host.
        wait: seconds to wait for the first driver.
        environment: of the ranks.
        driver: the only driver.
        launch: see `Invitation`.
        attached: end when stdin ends.
        guest: this agent is not a task of the launch: its host may leave the run at any time.
        job: of the batch system that lends this host to the run: the host leaves before it ends.
    """

    run: Path | None
    host: str
    slots: int
    wait: float
    environment: Mapping[str, str] = field(repr=False)
    driver: DriverFile | None = None
    launch: str = ""
    attached: bool = False
    guest: bool = False
    job: str | None = None


def environment_of_ranks(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a launcher's task without the variables of the task itself."""
    return {name: value for name, value in env.items() if not name.startswith(_OF_THE_TASK)}


# --- output of a rank -------------------------------------------------------------------------


class _Lines:
    """Complete lines of a stream; ends of lines are \\n and \\r, as of a progress bar."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> str:
        """Return the text up to the last end of a line so far."""
        text = self._rest + block
        whole = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - whole > _LONGEST_LINE:
            whole = len(text)
        self._rest = text[whole:]
        return text[:whole].decode(errors="replace")

    def end(self) -> str:
        text, self._rest = self._rest, b""
        return text.decode(errors="replace")


@dataclass
class _Rank:
    """A rank of this host; `guard`: its parent."""

    number: int
    slot: int
    guard: guard.Started
    lines: tuple[_Lines, _Lines] = field(default_factory=lambda: (_Lines(), _Lines()))
    open: set[int] = field(default_factory=lambda: {0, 1})

    def descriptor(self, stream: int) -> int:
        return (self.guard.stdout, self.guard.stderr)[stream]


# --- agent ------------------------------------------------------------------------------------


class Agent:
    """One agent; see the top of this file."""

    def __init__(self, settings: AgentSettings, first_driver: int | None = None) -> None:
        """`first_driver`: pid of the driver that the task of this agent has forked."""
        self._settings, self._first_driver = settings, first_driver
        self._id = secrets.token_hex(8)
        self._socket_name = f"hvdtrain-{self._id}"
        self._ranks: dict[int, _Rank] = {}
        self._ended: dict[int, int] = {}  # number -> exit code, of all ranks that have ended
        self._channel: Channel | None = None
        self._secret = b""
        self._kept: deque[Message] = deque()  # output that could not be sent yet
        self._kept_bytes = self._dropped = 0
        self._timeout = settings.wait
        self._ever = False  # a driver has accepted this agent
        self._away = self._silent = 0.0  # seconds without a driver; since its last message
        self._connected = 0.0  # seconds since the driver accepted this agent
        self._refusal = ""  # why no driver can begin now
        self._signalled: float | None = None  # time of the first signal
        self._signal = 0  # the last one
        self._registering = False  # the driver may have accepted this agent already
        self._deferred = 0  # a signal of that time
        self._turn: int | None = None  # to replace the driver; None: it cannot be replaced
        self._holds: set[int] | None = None  # own ranks with the run's state; None: there is none
        self._giving_up: asyncio.Task[None] | None = None
        self._guards_due = 0.0
        self._leaving = False
        self._finishing: asyncio.Task[None] | None = None
        self._driver: DriverFile | None = None  # of the last connection
        self._known: DriverFile | None = None  # the same, if it is the first to try
        self._unconfirmed = False  # the file may name another driver than that of the connection
        self._distrusts = False  # the driver's file, which another user may have changed
        self._successor: int | None = None  # pid of a driver that this agent started
        self._over: int | None = None  # last generation that is over
        self._files_of_ranks = raise_file_limit()  # an agent needs five for each rank
        self._listeners: set[asyncio.StreamWriter] = set()  # to ranks
        self._watchdogs: set[int] = set()  # pids
        self._code: asyncio.Future[int]

    async def run(self) -> int:
        """Serve drivers until one ends the job; return the exit code."""
        loop = asyncio.get_running_loop()
        self._code = loop.create_future()
        guard.adopt_orphans()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in requests():
            loop.add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
        # An abstract name: there is no file to remove, or for others to replace.
        server = await asyncio.start_unix_server(self._serve_rank, f"\0{self._socket_name}")
        works: list[Coroutine[Any, Any, None]] = [self._serve_drivers(), self._watch()]
        if (path := self._settings.run) is not None:
            works += [self._leave_silent_drivers(path), self._replace_drivers(path)]
            works.append(self._watch_directory(path))
            if (job := self._settings.job) is not None:
                works.append(self._leave_before_end(path, job))
        if self._settings.attached:
            loop.add_reader(0, self._on_input)
        tasks = [asyncio.create_task(work) for work in works]
        for task in tasks:
            task.add_done_callback(self._on_task_end)
        try:
            return await self._code
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._channel is not None:
                self._channel.close()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self._code.done():
            self._code.set_exception(error)

    # The connection to the driver.

    async def _serve_drivers(self) -> None:
        pause = _RETRY_SECONDS[0]
        while True:
            # Without the file at first: a driver waits a moment only, and the disk may be slow.
            known, self._known = self._known, None
            channel = None if known is None else await self._reach(known)
            self._unconfirmed = channel is not None
            channel = channel or await self._find_driver()
            if channel is None:
                self._act_on_deferred()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS[1])
                continue
            pause, self._known = _RETRY_SECONDS[0], self._driver
            with suppress(OSError):
                await self._obey(channel)
            self._channel = None
            channel.abort()
            if self._silent > _QUIET_SECONDS:
                self._known = None

    async def _read_driver(self) -> DriverFile | None:
        """Return where the driver is; raises as `driver_file.read`."""
        if self._settings.run is None:
            return self._settings.driver
        return await _aside(driver_file.read, self._settings.run)

    async def _find_driver(self) -> Channel | None:
        """Return a connection to a driver that has accepted this agent, or None."""
        try:
            driver = await self._read_driver()
        except OSError:
            return None
        except UserError as error:
            if not self._ever:
                raise
            if not self._distrusts:
                _say(f"another driver cannot be found: {error}")
            self._distrusts, driver = True, self._driver  # the ranks do not end by it
        if driver is None:
            return None
        own_launch = "" if self._settings.guest else driver_file.launch_identity()
        if own_launch and driver.launch and driver.launch != own_launch:
            return None  # of an earlier launch; this one's driver has not written it yet
        if driver.exit_code is not None:
            if self._ever or (own_launch and driver.launch == own_launch):
                self._finish(driver.exit_code)
            return None
        return await self._reach(driver)

    async def _reach(self, driver: DriverFile) -> Channel | None:
        """Return a connection to this driver that has accepted this agent, or None."""
        if driver.key != self._secret:  # of another job, whose processes have the same numbers
            self._over = None
            self._ended.clear()
        for address in driver.addresses:
            with suppress(OSError):
                channel = await self._connect(driver, address)
                try:
                    if await self._register(channel):
                        self._secret, self._driver = driver.key, driver
                        return channel
                except OSError:
                    channel.abort()
                    raise
                channel.close()
                return None
        return None

    async def _connect(self, driver: DriverFile, address: str) -> Channel:
        """Connect to the driver; raise OSError also as soon as another driver replaces it."""
        attempt = asyncio.ensure_future(
            protocol.connect(address, driver.port, driver.key, _CONNECT_SECONDS, driver.certificate)
        )
        replaced = asyncio.ensure_future(self._replaced(driver))
        try:
            await asyncio.wait({attempt, replaced}, return_when=asyncio.FIRST_COMPLETED)
            if not attempt.done():
                raise ConnectionAbortedError("another driver has replaced it")
        finally:
            attempt.cancel()
            replaced.cancel()
        return attempt.result()

    async def _replaced(self, driver: DriverFile) -> None:
        """Wait until the driver's file names another driver."""
        found: DriverFile | None = driver
        while found == driver:
            await asyncio.sleep(_LOOK_SECONDS)
            with suppress(OSError, UserError):
                found = await self._read_driver()

    async def _register(self, channel: Channel) -> bool:
        channel.send(
            {
                "type": "register",
                "agent": self._id,
                "host": self._settings.host,
                "slots": self._settings.slots,
                "version": __version__,
                "clock": time.time(),
                "running": {str(rank.number): rank.slot for rank in self._ranks.values()},
                "ended": {str(number): code for number, code in self._ended.items()},
                "signal": self._signal,
                "launch": self._settings.launch,
            }
        )
        self._registering = True
        try:
            answer = await asyncio.wait_for(channel.receive(), _REPLY_SECONDS)
        except asyncio.TimeoutError:
            raise TimeoutError("the driver does not answer") from None
        finally:
            self._registering = False
        if answer.get("type") == "refuse":
            if answer.get("final"):
                raise UserError(str(answer.get("reason")))
            return False
        if answer.get("type") != "welcome":
            raise protocol.ProtocolError("the driver's first message is not an answer")
        self._timeout = float(answer["driver_timeout"])
        return True

    async def _obey(self, channel: Channel) -> None:
        """Do what the driver asks until the connection breaks."""
        self._channel, self._ever, self._silent, self._connected = channel, True, 0.0, 0.0
        if self._ranks:
            self._away = 0.0
        self._send_kept()
        if self._leaving:
            self._send({"type": "leave"})
        self._act_on_deferred()
        words: list[object] = []  # the first ones of a long command
        while True:
            message = await channel.receive()
            self._silent = 0.0
            match message.get("type"):
                case "words":
                    words += message["words"]
                case "start":
                    self._start(message, [str(word) for word in [*words, *message["command"]]])
                    words = []
                    await asyncio.sleep(0)  # hundreds of starts must not delay heartbeats
                case "end":
                    self._end(int(message["number"]))
                case "over":
                    self._over = int(message["generation"])
                    for listener in self._listeners:
                        self._send_over(listener)
                case "finish":
                    self._finish(int(message["code"]))
                case "turn":
                    turn, holds = message["turn"], message["holds"]
                    self._turn = None if turn is None else int(turn)
                    self._holds = None if holds is None else {int(number) for number in holds}

    async def _watch(self) -> None:
        """Beat, and measure for how long the driver has been silent or away."""
        clock = Clock(2 * _LOOK_SECONDS)
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            passed = clock.look()
            self._send({"type": "beat"})
            self._send_kept()
            self._continue_stopped(clock.now)
            self._end_left_host()
            if self._channel is not None:
                self._connected += passed
                if self._connected > _SETTLED_SECONDS:
                    self._away = 0.0
                self._silent += passed
                if self._silent > protocol.SILENT_SECONDS:
                    self._channel.abort()
                continue
            self._away += passed
            timeout = self._timeout
            if self._refusal and self._signalled is None:
                if self._ranks:  # if one needs a driver, it ends itself without one
                    self._away = 0.0
                timeout *= _IDLE_FACTOR
            if self._signalled is not None and self._channel is None:
                waited = time.monotonic() - self._signalled
                if waited > _SIGNAL_SECONDS and self._away > _SIGNAL_SECONDS:
                    self._finish(EXIT_PREEMPTED)
            ends = self._giving_up is not None or self._finishing is not None
            if self._away > timeout and not ends:
                self._giving_up = asyncio.create_task(self._give_up())

    def _continue_stopped(self, now: float) -> None:
        """Continue stopped guards, which report the ends of ranks, and watchdogs."""
        if now < self._guards_due:
            return
        self._guards_due = now + _GUARDS_SECONDS
        guards = {
            rank.guard.pid: f"the guard of rank {number}" for number, rank in self._ranks.items()
        }
        for pid, name in {**dict.fromkeys(self._watchdogs, "a rank's watchdog"), **guards}.items():
            if guard.is_stopped(pid):
                _say(f"{name} (process {pid}) was stopped; it is continued")
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    # Another driver.

    def _alone(self) -> bool:
        """Whether a driver that had accepted this agent does not respond now."""
        silent = self._channel is None or self._silent > _QUIET_SECONDS
        stays = self._finishing is None and not self._leaving
        return silent and self._ever and stays and self._successor is None

    async def _replace_drivers(self, run: Path) -> None:
        """Start another driver when this agent's driver is gone."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._alone():
                continue
            try:
                gone = await asyncio.wait_for(self._driver_is_gone(run), 2 * self._timeout)
            except (OSError, UserError, asyncio.TimeoutError):
                gone = None
            if gone is not None and self._alone():
                _say("the driver does not respond: this host tries to replace it")
                self._successor = _start_successor(run, *gone)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _driver_is_gone(self, run: Path) -> tuple[Token, float] | None:
        """Wait for this agent's turn; return the unchanged token and since when, or None.

        Raises:
            OSError: the run directory cannot be read.
        """
        if self._turn is None:
            return None
        delay = _TURN_SECONDS * self._turn
        if self._holds is not None and not self._ranks.keys() & self._holds:
            delay += _WITHOUT_STATE_SECONDS
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
            if not self._alone():
                return None
        known, since = await self._token(run), owner_token.now()
        while owner_token.now() - since < _UNCHANGED_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            token = await self._token(run)
            if token is None or token.ended or token != known or not self._alone():
                return None
        assert known is not None
        if await _aside(owner_token.obstacle, owner_token.of_launch(run)):
            return None
        found = await _aside(driver_file.read, run)
        return None if found is not None and found.exit_code is not None else (known, since)

    async def _watch_directory(self, run: Path) -> None:
        """While there is no driver, find out whether another one could write its token."""
        pause = due = 0.0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._channel is not None or not self._ever:
                self._refusal, pause = "", 0.0
                continue
            longest = self._timeout / _LOOKS_IN_TIMEOUT
            if not pause:
                pause = min(_DIRECTORY_SECONDS, longest)
                due = time.monotonic() + random.uniform(0, pause)
            if time.monotonic() < due:
                continue
            look = asyncio.ensure_future(_aside(owner_token.obstacle, owner_token.of_launch(run)))
            limit = min(_ANSWER_SECONDS, self._timeout / 2)
            if look not in (await asyncio.wait({look}, timeout=limit))[0]:
                self._note_refusal(run, "no response")
            self._note_refusal(run, await look)  # one thread at most waits for a disk
            pause = min(_DIRECTORY_SECONDS if self._refusal else 2 * pause, longest)
            due = time.monotonic() + random.uniform(pause / 2, pause)

    def _note_refusal(self, run: Path, reason: str) -> None:
        before, self._refusal = self._refusal, reason
        if reason and not before:
            _say(
                f"{run} cannot be written ({reason}), so no host can replace the driver; ranks "
                "continue to train"
            )
        elif before and not reason:
            _say(f"{run} can be written again")
            self._away = 0.0

    async def _token(self, run: Path) -> Token | None:
        return await _aside(owner_token.read, owner_token.of_launch(run))

    async def _leave_silent_drivers(self, run: Path) -> None:
        """Close the connection to a silent driver as soon as another one has replaced it."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            channel, driver = self._channel, self._driver
            doubtful = self._silent > _QUIET_SECONDS or self._unconfirmed
            if channel is None or driver is None or not doubtful:
                continue
            with suppress(OSError, UserError):
                found = await _aside(driver_file.read, run)
                if channel is not self._channel:
                    continue
                self._unconfirmed = False
                if found is not None and found.exit_code is None and found.port != driver.port:
                    self._known = None
                    channel.abort()

    async def _give_up(self) -> None:
        """End this host's ranks, and this agent unless a driver that it cannot reach is alive."""
        driver, run, seconds = self._settings.driver, self._settings.run, f"{self._timeout:.0f} s"
        if not self._ever:
            if driver is not None:
                places = f"{' or '.join(driver.addresses)}, port {driver.port}"
                _say(f"error: horovodrun was not reached for {seconds} at {places}")
            else:
                _say(f"error: no driver of {self._settings.run} was found for {seconds} (--wait)")
            self._finish(EXIT_CRASH)
            return
        if self._ranks:
            whose = "horovodrun" if driver else f"the driver of {run}"
            _say(f"{whose} has been away for {seconds}: the ranks of this host end")
        for number in tuple(self._ranks):
            self._end(number)
        alive = False
        if run is not None:
            with suppress(OSError, asyncio.TimeoutError):
                alive = await asyncio.wait_for(self._driver_is_elsewhere(run), self._timeout)
        if alive:
            _say(f"{run} continues on other hosts, which this host cannot reach")
            self._away = 0.0
        elif self._channel is None:
            self._finish(EXIT_PREEMPTED)
        self._giving_up = None  # a driver that has just accepted this agent may go away, too

    async def _driver_is_elsewhere(self, run: Path) -> bool:
        """Whether a driver renews its token for longer than one that finds no ranks and ends."""
        token = await self._token(run)
        deadline = time.monotonic() + _SETTLED_SECONDS
        while token is not None and time.monotonic() < deadline:
            await asyncio.sleep(_RENEWED_SECONDS)
            before, token = token, await self._token(run)
            if not moved(before, token):
                return False
        return token is not None

    def _send(self, message: Message) -> bool:
        """Send a message if there is a driver."""
        if self._channel is None:
            return False
        self._channel.send(message)
        return True

    # Ranks.

    def _start(self, message: Message, command: list[str]) -> None:
        number = int(message["number"])
        if number in self._ranks or number in self._ended:
            return
        if self._finishing is not None:
            self._report_exit(number, 128 + signal.SIGTERM)
            return
        environment = dict(self._settings.environment)
        environment |= {str(name): str(value) for name, value in message["environment"].items()}
        environment["HOROVOD_RENDEZVOUS_SECRET"] = protocol.rendezvous_secret(self._secret)
        environment[protocol.AGENT_VARIABLE] = self._socket_name
        try:
            program = guard.Program(
                command, environment, str(message["directory"]), self._files_of_ranks
            )
            started = guard.start(program)
        except OSError as error:
            _say(f"rank {number} cannot be started: {error.strerror}")
            self._report_exit(number, EXIT_CRASH)
            return
        rank = self._ranks[number] = _Rank(number, int(message["slot"]), started)
        loop = asyncio.get_running_loop()
        for stream in rank.open:
            loop.add_reader(rank.descriptor(stream), self._read, rank, stream)

    async def _serve_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Notify a rank of each generation that is over, or note a watchdog, until it ends."""
        connection: socket.socket = writer.get_extra_info("socket")
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, user, _ = _CREDENTIALS.unpack(credentials)
        if user == os.getuid():
            with suppress(OSError, asyncio.CancelledError):
                if await reader.read(1) == protocol.RANK:
                    self._listeners.add(writer)
                    self._send_over(writer)
                else:
                    self._watchdogs.add(pid)
                await reader.read(1)
        self._listeners.discard(writer)
        self._watchdogs.discard(pid)
        writer.close()

    def _send_over(self, listener: asyncio.StreamWriter) -> None:
        if self._over is not None:
            listener.write(f"{self._over}\n".encode())

    def _end(self, number: int) -> None:
        rank = self._ranks.get(number)
        if rank is not None:
            with suppress(OSError):  # it has just ended
                os.write(rank.guard.control, guard.END)

    def _read(self, rank: _Rank, stream: int) -> bool:
        """Send what a rank has written; return whether there may be more."""
        try:
            block = os.read(rank.descriptor(stream), _READ_BYTES)
        except BlockingIOError:
            return False
        text = rank.lines[stream].feed(block) if block else rank.lines[stream].end()
        if text:
            self._send_output(rank.number, stream, text)
        if not block:
            self._close(rank, stream)
        return bool(block)

    def _close(self, rank: _Rank, stream: int) -> None:
        if stream in rank.open:
            rank.open.discard(stream)
            asyncio.get_running_loop().remove_reader(rank.descriptor(stream))
            os.close(rank.descriptor(stream))

    def _send_output(self, number: int, stream: int, text: str) -> None:
        message = {"type": "output", "number": number, "stream": _STREAMS[stream], "text": text}
        self._kept.append(message)
        self._kept_bytes += len(text)
        self._send_kept()
        while self._kept_bytes > _KEPT_BYTES:  # never wait: the rank would stop at a full pipe
            dropped = len(self._kept.popleft()["text"])
            self._kept_bytes -= dropped
            self._dropped += dropped

    def _send_kept(self) -> None:
        while self._kept and self._channel is not None:
            if self._channel.waiting_bytes() > _KEPT_BYTES:
                return
            if self._dropped:
                _say(f"{self._dropped} characters of the ranks' output were dropped")
                self._dropped = 0
            message = self._kept.popleft()
            self._kept_bytes -= len(message["text"])
            self._send(message)

    def _reap(self) -> None:
        """Report ranks that have ended."""
        ranks = {rank.guard.pid: rank for rank in self._ranks.values()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._successor:
                self._successor = None
            if (rank := ranks.get(pid)) is None:
                self._kill_orphans()  # a process that a killed guard left has left its children
                continue
            for stream in tuple(rank.open):
                while stream in rank.open and self._read(rank, stream):
                    pass
                if text := rank.lines[stream].end():
                    self._send_output(rank.number, stream, text)
                self._close(rank, stream)
            os.close(rank.guard.control)
            del self._ranks[rank.number]
            if os.WIFSIGNALED(status):
                self._kill_orphans()
                self._report_exit(rank.number, 128 + os.WTERMSIG(status))
            else:
                self._report_exit(rank.number, os.WEXITSTATUS(status))

    def _kill_orphans(self) -> None:
        """Kill what a rank has left whose guard was killed.

        Otherwise only guards and a driver are children.
        """
        guards = {rank.guard.pid for rank in self._ranks.values()}
        for child in set(guard.children()) - guards - {self._successor}:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)

    def _report_exit(self, number: int, code: int) -> None:
        self._ended[number] = code
        self._send({"type": "exit", "number": number, "code": code})
        self._end_left_host()

    def _end_left_host(self) -> None:
        if self._leaving and not self._ranks:
            self._finish(EXIT_PREEMPTED)

    # Signals and the end.

    def _on_input(self) -> None:
        try:
            ended = not os.read(0, _READ_BYTES)
        except OSError:
            ended = True
        if ended:
            asyncio.get_running_loop().remove_reader(0)
            self._finish(EXIT_PREEMPTED)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        again = self._signalled is not None and now - self._signalled > PAIR_SECONDS
        if self._signalled is None:
            self._signalled = now
        elif not again:
            return
        if self._registering and not again and number != signal.SIGINT:
            self._deferred = number
        else:
            self._act_on_signal(number, again)

    def _act_on_deferred(self) -> None:
        """Act on a signal of the last registration, whose result is known now."""
        number, self._deferred = self._deferred, 0
        if number:
            self._act_on_signal(number, again=False)

    def _act_on_signal(self, number: int, again: bool) -> None:
        if number == signal.SIGTERM and not again and self._may_leave():
            self._leaving = True
            self._send({"type": "leave"})
            return
        self._signal = number
        if not self._leaving and self._send({"type": "signal", "number": number}):
            return
        if (
            self._leaving
            or again
            or number == signal.SIGINT
            or not self._ever
            or self._turn is None
        ):
            self._finish(EXIT_PREEMPTED)

    def _may_leave(self) -> bool:
        """Whether a driver on another host can continue the run without this host."""
        if self._successor is not None or self._settings.attached:
            return False
        if self._settings.guest:
            return True  # a driver that is away is notified when it returns
        here = self._first_driver is not None and os.path.exists(f"/proc/{self._first_driver}")
        return self._channel is not None and not here and not launched()

    async def _leave_before_end(self, run: Path, job: str) -> None:
        """Leave before the job ends that lends this host: in time for two of the slowest steps.

        Also leave if the run has had no use for this host for a while: others can use it.
        """
        now, end, needed, due, used_at = 0.0, math.inf, _LEAVE_SECONDS, 0.0, 0.0
        while end - now > needed and now - used_at < _UNUSED_SECONDS:
            if now >= due:
                left = await _aside(seconds_left, job)
                end = end if left is None else now + left
                needed = max(_LEAVE_SECONDS, 2 * await _aside(_slowest_step, run))
                due = now + _ASK_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)
            now += _LOOK_SECONDS  # stands still while the job is suspended
            used_at = now if self._ranks or not self._ever else used_at
        if end - now <= needed:
            _say(f"job {job} ends in {end - now:.0f} s: this host leaves the run")
        else:
            _say(f"the run has had no rank here for {_UNUSED_SECONDS:.0f} s: this host leaves it")
        self._on_signal(signal.SIGTERM)

    def _finish(self, code: int) -> None:
        """End all ranks, then this agent with an exit code."""
        if self._finishing is None:
            self._finishing = asyncio.create_task(self._end_all(code))

    async def _end_all(self, code: int) -> None:
        for number in tuple(self._ranks):
            self._end(number)
        deadline = time.monotonic() + _END_SECONDS
        while self._ranks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._successor is not None:
            if self._channel is None:  # it does not drive this agent, so it has no job
                with suppress(OSError):
                    os.kill(self._successor, signal.SIGKILL)
            else:
                self._channel.close()  # it waits for this
            deadline = time.monotonic() + _SUCCESSOR_END_SECONDS
            while self._successor is not None and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        if not self._code.done():
            self._code.set_result(code)


async def _aside(function: Callable[..., _T], *arguments: object) -> _T:
    """Call a function that reads a disk in a thread, which a disk without response blocks.

    The thread ends with the call: ranks are forked from a process with one thread.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def settle(set_result: Callable[[Any], None], value: object) -> None:
        if not result.done():
            set_result(value)

    def run() -> None:
        done: tuple[Callable[[Any], None], object]
        try:
            done = (result.set_result, function(*arguments))
        except Exception as error:
            done = (result.set_exception, error)
        with suppress(RuntimeError):  # the agent has ended
            loop.call_soon_threadsafe(settle, *done)

    threading.Thread(target=run, daemon=True).start()
    return await result


def _slowest_step(run: Path) -> float:
    """Return the longest duration, in seconds, of the run's last steps; 0 if there is none."""
    lines = last_lines(run / "metrics.jsonl")
    return max((real(line.get("step_seconds")) or 0.0 for line in lines), default=0.0)


def _start_successor(run: Path, token: Token, since: float) -> int:
    """Start another driver; return its pid."""
    program = [sys.executable, "-m", "hvdtrain.supervise.successor"]
    argv = [*program, str(run), json.dumps(asdict(token)), str(since)]
    no_input = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    return os.posix_spawn(sys.executable, argv, os.environ, file_actions=no_input)


# --- keeper -----------------------------------------------------------------------------------

_KEPT_SECONDS = 10.0  # an agent that lived so long was not killed by what kills each of them
_MOST_DEATHS = 5  # of agents that did not, in a row
_ORPHAN_SECONDS = 8.0
_SPARED_SECONDS = 1.0  # for guards, which end their ranks
_LAST_SECONDS = 2  # for an agent to end after the end of a driver that has ended the job
_DRIVER_END_SECONDS = 15.0  # it may still write output
DRIVER_NAME = "hvdtrain-driver"  # in ps; has at most 15 characters


def keep(settings: AgentSettings, driver: int | None = None) -> int:
    """Run an agent, and another one if it is killed; return the exit code.

    Args:
        driver: pid of the run's driver if this process has forked it.

    Raises:
        UserError: the driver refuses the agent, or its file cannot be trusted.
    """
    guard.adopt_orphans()
    guard.set_name("hvdtrain-keeper")
    first_driver, deaths = _FirstDriver(driver), 0
    while True:
        began = time.monotonic()
        status = _run_one(settings, first_driver)
        if not os.WIFSIGNALED(status):
            _end_drivers()
            return os.WEXITSTATUS(status)
        for child in guard.end_children(_ORPHAN_SECONDS, _SPARED_SECONDS, DRIVER_NAME).items():
            first_driver.ended(*child)
        if first_driver.result is not None:
            return first_driver.result
        deaths = 1 if time.monotonic() - began > _KEPT_SECONDS else deaths + 1
        number = os.WTERMSIG(status)
        if deaths >= _MOST_DEATHS:
            _say(f"error: the agent was ended by signal {number} {deaths} times in a row")
            _end_drivers()
            return 128 + number
        _say(f"the agent was ended by signal {number}; another one starts")


@dataclass
class _FirstDriver:
    """The driver in the first task of a launch, which is a child of the keeper.

    Args:
        pid: its pid, or None.
        result: its exit code, if that is the run's. If it was killed, or has stepped down (75),
            another driver continues the run.
    """

    pid: int | None
    result: int | None = None

    def ended(self, pid: int, status: int) -> None:
        """Note the end of a child of the keeper."""
        if pid == self.pid and os.WIFEXITED(status) and os.WEXITSTATUS(status) != EXIT_PREEMPTED:
            self.result = os.WEXITSTATUS(status)


def _end_drivers() -> None:
    """Wait for a driver on this host, which ends with its job; end it if it does not."""
    began = time.monotonic()
    while drivers := [pid for pid, name in guard.children().items() if name == DRIVER_NAME]:
        late = time.monotonic() - began
        for pid in drivers:
            with suppress(OSError):
                if late > _DRIVER_END_SECONDS:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def _run_one(settings: AgentSettings, driver: _FirstDriver) -> int:
    """Return the status of an agent, as of waitpid; pass signals on to it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)  # until each has its own handlers
    keeper, agent = os.getpid(), os.fork()
    if agent == 0:
        code = EXIT_CRASH
        try:
            guard.set_name("hvdtrain-agent")
            guard.end_with(keeper)
            code = _run_agent(settings, driver.pid)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            flush()
            os._exit(code)

    def pass_on(number: int, _: object) -> None:
        with suppress(OSError):
            os.kill(agent, signal.SIGKILL if number == signal.SIGALRM else number)

    for number in (*requests(), signal.SIGALRM):
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == agent:
            signal.alarm(0)
            return status
        driver.ended(pid, status)
        if driver.result is not None:
            signal.alarm(_LAST_SECONDS)  # the driver has asked all agents to end, if it had any


def _run_agent(settings: AgentSettings, first_driver: int | None) -> int:
    try:
        return asyncio.run(Agent(settings, first_driver).run())
    except UserError as error:
        _say(f"error: {error}")
        return error.exit_code


def _say(message: str) -> None:
    say(message, f"hvdtrain agent on {socket.gethostname()}")
