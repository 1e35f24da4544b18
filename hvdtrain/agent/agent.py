"""The agent of a host: starts and ends ranks for the driver, and reports their output and ends.

    keeper   this process. If the agent is killed, it ends what the agent leaves, and starts another
      agent  connects to the driver, and again if the connection breaks
        guard of each rank (guard.py)
          rank

Messages, each with a "type" (see protocol.py for how they are sent):

    agent -> driver  register: agent, host, slots, version, facts, running {number: slot}, ended
                     {number: exit code}; beat; output: number, stream, text; exit: number, code;
                     signal: number
    driver -> agent  welcome: driver_timeout; refuse: reason, final; beat; start: number, slot,
                     command, directory, environment; end: number; finish: code

The ranks run on while the driver is away. After `driver_timeout` seconds without it they are asked
to end, and the agent exits with 75.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.agent import driver_file, guard, protocol
from hvdtrain.agent.host import facts
from hvdtrain.agent.protocol import Channel, Message
from hvdtrain.errors import EXIT_CRASH, EXIT_PREEMPTED, UserError

_CONNECT_SECONDS = 1.5  # to one address of the driver
_REPLY_SECONDS = 5.0
_RETRY_SECONDS = (0.05, 1.0)  # after a first failed attempt; longest pause
_LOOK_SECONDS = 0.25
# A batch system sends signals in pairs, and to the keeper as well as to the agent.
_PAIR_SECONDS = 1.0
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


@dataclass(frozen=True)
class AgentSettings:
    """Settings of an agent.

    Args:
        run: the run directory, in which the driver's file is.
        host: name of this host; unique in the job.
        slots: most ranks on this host.
        wait: seconds to wait for the first driver.
    """

    run: Path
    host: str
    slots: int
    wait: float


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

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._id = secrets.token_hex(8)
        self._facts = facts()
        self._ranks: dict[int, _Rank] = {}
        self._ended: dict[int, int] = {}  # number -> exit code, of all ranks that have ended
        self._channel: Channel | None = None
        self._secret = b""
        self._kept: deque[Message] = deque()  # output that could not be sent yet
        self._kept_bytes = self._dropped = 0
        self._timeout = settings.wait
        self._ever = False  # a driver has accepted this agent
        self._away = self._silent = 0.0  # seconds without a driver; since its last message
        self._signalled: float | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._code: asyncio.Future[int]

    async def run(self) -> int:
        """Serve drivers until one ends the job; return the exit code."""
        loop = asyncio.get_running_loop()
        self._code = loop.create_future()
        guard.adopt_orphans()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = [asyncio.create_task(work()) for work in (self._serve_drivers, self._watch)]
        for task in tasks:
            task.add_done_callback(self._on_task_end)
        try:
            return await self._code
        finally:
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
            channel = await self._find_driver()
            if channel is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS[1])
                continue
            pause = _RETRY_SECONDS[0]
            with suppress(OSError):
                await self._obey(channel)
            self._channel = None
            channel.abort()

    async def _find_driver(self) -> Channel | None:
        """Return a connection to a driver that has accepted this agent, or None."""
        try:
            driver = driver_file.read(self._settings.run)
        except OSError:
            return None
        if driver is None:
            return None
        own_launch = driver_file.launch_identity()
        if own_launch and driver.launch and driver.launch != own_launch:
            return None  # of an earlier launch; this one's driver has not written it yet
        if driver.exit_code is not None:
            if own_launch and driver.launch == own_launch:
                self._finish(driver.exit_code)
            return None
        for address in driver.addresses:
            with suppress(OSError):
                channel = await protocol.connect(address, driver.port, driver.key, _CONNECT_SECONDS)
                try:
                    if await self._register(channel):
                        self._secret = driver.key
                        return channel
                except OSError:
                    channel.abort()
                    raise
                channel.close()
                return None
        return None

    async def _register(self, channel: Channel) -> bool:
        import hvdtrain

        channel.send(
            {
                "type": "register",
                "agent": self._id,
                "host": self._settings.host,
                "slots": self._settings.slots,
                "version": hvdtrain.__version__,
                "facts": self._facts | {"clock": time.time()},
                "running": {str(rank.number): rank.slot for rank in self._ranks.values()},
                "ended": {str(number): code for number, code in self._ended.items()},
            }
        )
        try:
            answer = await asyncio.wait_for(channel.receive(), _REPLY_SECONDS)
        except asyncio.TimeoutError:
            raise TimeoutError("the driver does not answer") from None
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
        self._channel, self._ever, self._away, self._silent = channel, True, 0.0, 0.0
        self._send_kept()
        while True:
            message = await channel.receive()
            self._silent = 0.0
            match message.get("type"):
                case "start":
                    self._start(message)
                case "end":
                    self._end(int(message["number"]))
                case "finish":
                    self._finish(int(message["code"]))

    async def _watch(self) -> None:
        """Beat, and measure for how long the driver has been silent or away."""
        seen = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            # Time in which this process was suspended does not count.
            passed = min(time.monotonic() - seen, 2 * _LOOK_SECONDS)
            seen = time.monotonic()
            self._send({"type": "beat"})
            self._send_kept()
            if self._channel is not None:
                self._silent += passed
                if self._silent > protocol.SILENT_SECONDS:
                    self._channel.abort()
                continue
            self._away += passed
            if self._away > self._timeout and self._finishing is None:
                self._give_up()

    def _give_up(self) -> None:
        run, seconds = self._settings.run, f"{self._timeout:.0f} s"
        if not self._ever:
            _say(f"error: no driver of {run} was found for {seconds} (--wait)")
            self._finish(EXIT_CRASH)
            return
        _say(f"the driver of {run} has been away for {seconds}: the ranks of this host end")
        self._finish(EXIT_PREEMPTED)

    def _send(self, message: Message) -> bool:
        """Send a message if there is a driver."""
        if self._channel is None:
            return False
        self._channel.send(message)
        return True

    # Ranks.

    def _start(self, message: Message) -> None:
        number = int(message["number"])
        if number in self._ranks or number in self._ended:
            return
        if self._finishing is not None:
            self._report_exit(number, 128 + signal.SIGTERM)
            return
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_TASK)
        }
        environment |= {str(name): str(value) for name, value in message["environment"].items()}
        environment["HOROVOD_RENDEZVOUS_SECRET"] = protocol.rendezvous_secret(self._secret)
        command = [str(word) for word in message["command"]]
        try:
            started = guard.start(guard.Program(command, environment, str(message["directory"])))
        except OSError as error:
            _say(f"rank {number} cannot be started: {error.strerror}")
            self._report_exit(number, EXIT_CRASH)
            return
        rank = self._ranks[number] = _Rank(number, int(message["slot"]), started)
        loop = asyncio.get_running_loop()
        for stream in rank.open:
            loop.add_reader(rank.descriptor(stream), self._read, rank, stream)

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
        """Kill what a rank has left whose guard was killed: only guards are children otherwise."""
        guards = {rank.guard.pid for rank in self._ranks.values()}
        for child in set(guard.children()) - guards:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)

    def _report_exit(self, number: int, code: int) -> None:
        self._ended[number] = code
        self._send({"type": "exit", "number": number, "code": code})

    # Signals and the end.

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        again = self._signalled is not None and now - self._signalled > _PAIR_SECONDS
        if self._signalled is None:
            self._signalled = now
        elif not again:
            return
        if not self._send({"type": "signal", "number": number}):
            self._finish(EXIT_PREEMPTED)

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
        if not self._code.done():
            self._code.set_result(code)


# --- keeper -----------------------------------------------------------------------------------

_KEPT_SECONDS = 10.0  # an agent that lived so long was not killed by what kills each of them
_MOST_DEATHS = 5  # of agents that did not, in a row
_ORPHAN_SECONDS = 8.0
_SPARED_SECONDS = 1.0  # for guards, which end their ranks


def keep(settings: AgentSettings) -> int:
    """Run an agent, and another one if it is killed; return the exit code.

    Raises:
        UserError: the driver refuses the agent, or its file cannot be trusted.
    """
    guard.adopt_orphans()
    guard.set_name("hvdtrain-keeper")
    deaths = 0
    while True:
        began = time.monotonic()
        status = _run_one(settings)
        if not os.WIFSIGNALED(status):
            return os.WEXITSTATUS(status)
        guard.end_children(_ORPHAN_SECONDS, _SPARED_SECONDS)
        deaths = 1 if time.monotonic() - began > _KEPT_SECONDS else deaths + 1
        number = os.WTERMSIG(status)
        if deaths >= _MOST_DEATHS:
            _say(f"error: the agent was ended by signal {number} {deaths} times in a row")
            return 128 + number
        _say(f"the agent was ended by signal {number}; another one starts")


def _run_one(settings: AgentSettings) -> int:
    """Return the status of an agent, as of waitpid; pass signals on to it."""
    agent = os.fork()
    if agent == 0:
        code = EXIT_CRASH
        try:
            guard.set_name("hvdtrain-agent")
            code = _run_agent(settings)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)

    def pass_on(number: int, _: object) -> None:
        with suppress(OSError):
            os.kill(agent, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == agent:
            return status


def _run_agent(settings: AgentSettings) -> int:
    try:
        return asyncio.run(Agent(settings).run())
    except UserError as error:
        _say(f"error: {error}")
        return error.exit_code


def _say(message: str) -> None:
    with suppress(OSError):
        print(f"hvdtrain agent on {socket.gethostname()}: {message}", file=sys.stderr, flush=True)
