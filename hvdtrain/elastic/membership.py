"""Client of the elastic driver (driver.py): requests this process's ranks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hvdtrain.agent.protocol import RANK, connect_to_agent
from hvdtrain.elastic.rendezvous import RANKS, DriverAddress
from hvdtrain.elastic.status import ProcessStatus
from hvdtrain.log import logger
from hvdtrain.runtime import environment, interfaces
from hvdtrain.runtime.signals import StopFlag

_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_GENERATION = "HOROVOD_RENDEZVOUS_GENERATION"
_LOST_SECONDS = 20.0
_NEWS_SECONDS = 0.5
_ABORT_SECONDS = 0.25  # a collective may begin just after the first abort


class RemovedError(Exception):
    """The job continues, or has ended, without this process."""


class RefusedError(Exception):
    """The job continues without this process, which does not fit the job; see the message."""


class ReplacedError(Exception):
    """This process must end and be replaced by a new process; the message gives the reason."""


class LostError(Exception):
    """The launcher no longer responds."""


class Membership:
    """Joins generations and polls the driver during them.

    Args:
        address, port: of the launcher's HTTP server, at first.
        number: the driver's number of this process.
        stop: raised when the driver asks the ranks to stop.

    Attributes:
        job, generation: unique number of the job, and number of this generation.
        hosts_changed: processes wait to join or must leave: another rendezvous is due.
        silent: the driver's messages about processes that fell silent in the last generation.
        places: host -> where a rank of it listens, if the last rendezvous has failed, too; on one
            rank of each host.
    """

    def __init__(self, address: str, port: int, number: int, stop: StopFlag) -> None:
        self._driver = DriverAddress(address, port)
        self.job, self.generation = 0, 0
        self.hosts_changed = False
        self.launcher = str(self._driver)
        self.silent: list[str] = []
        self.places: dict[str, tuple[str, int]] = {}
        self._number = number
        self._stop = stop
        self._listening = False
        self._entering = threading.Lock()
        self._entered: int | None = None  # the generation, if this process has entered one

    @classmethod
    def of_this_process(cls, stop: StopFlag) -> Membership | None:
        """Return this process's membership; None if the launcher is not elastic.

        Removes the launcher's other variables from the environment: until the process joins a
        generation, Horovod runs it as a world of one rank.

        Raises:
            UserError: this host has none of the network interfaces that the user named.
        """
        if not environment.elastic():
            return None
        address, port = os.environ.pop(_ADDRESS), int(os.environ.pop(_PORT))
        number = int(os.environ["HOROVOD_RANK"])
        for name in RANKS:
            os.environ.pop(f"HOROVOD_{name.upper()}", None)
        interfaces.for_rank(address)
        return cls(address, port, number, stop)

    def served(self) -> bool:
        """Whether the launcher is this driver; Horovod's own elastic driver does not answer.

        Raises:
            LostError: the launcher does not respond at all.
        """
        try:
            return self._driver.ask("news", self._number) is not None
        except OSError as error:
            raise LostError(f"{self._driver}: {error}") from None

    def join(
        self, status: Callable[[], ProcessStatus], set_aside: Callable[[], None]
    ) -> dict[str, Any]:
        """Wait until the next generation is formed, and set this process's ranks for Horovod.

        Args:
            status: status of this process, from which the launcher decides which processes take
                part and what has failed; evaluated for each request, because `set_aside` changes
                it.
            set_aside: called, perhaps repeatedly, if a generation is formed without this process,
                which then waits for another one as a spare.

        Returns:
            As ElasticDriver.join.

        Raises:
            RemovedError: the generation excludes this process.
            RefusedError: the generation excludes this process because it does not fit the run.
            LostError: the launcher did not respond for 20 s; under `hvdtrain launch` without hosts,
                whose driver can be replaced, for elastic.driver_timeout.
        """
        with self._entering:
            self._entered = None
        limit = self._driver.timeout or _LOST_SECONDS
        self._driver.follow()  # before a request waits for a host that is gone
        responded_at = time.monotonic()
        while True:
            try:
                assignment = self._driver.ask("join", self._number, asdict(status()))
                responded_at = time.monotonic()
            except OSError as error:
                if time.monotonic() - responded_at > limit:
                    raise LostError(f"{self._driver}: {error}") from None
                time.sleep(0.2)
                continue
            if assignment is None:
                continue
            if assignment.get("spare"):
                set_aside()
            if assignment["rank"] >= 0 or not assignment.get("spare"):
                break
        if "reason" in assignment:
            raise RefusedError(assignment["reason"])
        if assignment["rank"] < 0:
            raise RemovedError
        for name in RANKS:
            os.environ[f"HOROVOD_{name.upper()}"] = str(assignment[name])
        os.environ[_GENERATION] = str(assignment["generation"])
        os.environ[_ADDRESS], os.environ[_PORT] = map(str, self._driver.place)
        self.job, self.generation = assignment["job"], assignment["generation"]
        self.hosts_changed = False
        self.silent = assignment.get("silent", [])
        self.places = assignment.get("places", {})
        with self._entering:
            self._entered = self.generation
        if assignment["rank"] == 0 and not self._listening:
            self._listening = True  # rank 0 stays rank 0 until it ends
            threading.Thread(target=self._listen, daemon=True).start()
        return assignment

    def listen(self, on_over: Callable[[], None]) -> None:
        """Start a thread that calls `on_over` while this process's generation is over."""
        threading.Thread(target=self._listen_to_agent, args=(on_over,), daemon=True).start()

    def _listen_to_agent(self, on_over: Callable[[], None]) -> None:
        try:
            with connect_to_agent(RANK) as agent:
                self._wait_for_ends(agent, on_over)
        except OSError as error:
            logger.warning(
                "this host's agent is not reached (%s): this rank notices the loss of another "
                "host only after elastic.timeout_seconds",
                error.strerror or error,
            )

    def _wait_for_ends(self, agent: socket.socket, on_over: Callable[[], None]) -> None:
        over = -1
        while True:
            with self._entering:
                ended = self._entered is not None and over >= self._entered
                waits = self._entered is not None and not ended
                if ended:
                    on_over()
            agent.settimeout(None if waits else _ABORT_SECONDS)
            with suppress(TimeoutError):
                lines = agent.recv(4096).split()
                if not lines:
                    raise ConnectionResetError("it has closed the connection")
                over = int(lines[-1])

    def report(self, message: str, step: int | None) -> None:
        """Report to the launcher, if it can be reached, why this process is about to end.

        Args:
            step: the step in which it raised an error.
        """
        with suppress(OSError):
            self._driver.ask("failed", self._number, {"message": message, "step": step})

    def replace(self, message: str) -> None:
        """Request a new process in place of this one, which is about to end.

        Raises:
            OSError: the launcher does not respond.
        """
        self._driver.ask("replace", self._number, {"message": message})

    def leave(self, message: str, cause: str = "") -> None:
        """Report to the launcher that this host is about to be taken away: its ranks leave.

        Args:
            cause: recorded as an incident of this host, see run_files/host_records.py; "": none.

        Raises:
            OSError: the launcher cannot be reached now.
        """
        self._driver.ask("leave", self._number, {"message": message, "cause": cause})

    def _listen(self) -> None:
        while True:
            time.sleep(_NEWS_SECONDS)
            try:
                news = self._driver.ask("news", self._number)
            except OSError:
                continue  # if the launcher is gone, the watchdog ends this process (watchdog.py)
            if news is not None:
                self.hosts_changed = news["hosts"]
                if news["stop"]:
                    self._stop.raise_()
