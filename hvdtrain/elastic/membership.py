"""This process's place in an elastic job: it asks the driver in horovodrun for it (driver.py)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hvdtrain.elastic import interfaces
from hvdtrain.elastic.beats import Line
from hvdtrain.elastic.failures import ProcessStatus
from hvdtrain.elastic.rendezvous import ask
from hvdtrain.runtime import environment
from hvdtrain.runtime.signals import StopFlag

_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_GENERATION = "HOROVOD_RENDEZVOUS_GENERATION"
_RANKS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_LOST_SECONDS = 20.0
_NEWS_SECONDS = 0.5


class RemovedError(Exception):
    """The job continues, or has ended, without this process."""


class RefusedError(Exception):
    """The job continues without this process, which does not fit it; the message says why."""


class ReplacedError(Exception):
    """This process takes part again only as a new process; the message says why."""


class LostError(Exception):
    """The launcher does not answer any more."""


class Membership:
    """Joins generations, and hears what the driver has to say between them.

    Args:
        address, port: of the launcher's HTTP server.
        number: this process's, as the driver knows it.
        stop: raised when the driver asks the ranks to stop.

    Attributes:
        job, generation: the launcher's number, unlike any other's, and that of this generation.
        hosts_changed: processes wait to join, or are to leave: another rendezvous is due.
        line: on which this process gives signs of life.
        silent: what the driver says of those that fell silent in the last generation.
    """

    def __init__(self, address: str, port: int, number: int, stop: StopFlag) -> None:
        self.address, self.port = address, port
        self.job, self.generation = 0, 0
        self.hosts_changed = False
        self.launcher = f"{address}:{port}"
        self.line = Line(address, port, number)
        self.silent: list[str] = []
        self._number = number
        self._stop = stop
        self._listening = False

    @classmethod
    def of_this_process(cls, stop: StopFlag) -> Membership | None:
        """None where the launcher is not elastic.

        Takes the launcher's other variables out of the environment: until it joins a generation,
        this process is a world of its own for Horovod.

        Raises:
            UserError: this host has no network interface of those that the user named.
        """
        if not environment.elastic():
            return None
        address, port = os.environ.pop(_ADDRESS), int(os.environ.pop(_PORT))
        number = int(os.environ["HOROVOD_RANK"])
        for name in _RANKS:
            os.environ.pop(f"HOROVOD_{name.upper()}", None)
        interfaces.for_rank(address)
        return cls(address, port, number, stop)

    def served(self) -> bool:
        """Whether the launcher is one that answers: not Horovod's own elastic driver.

        Raises:
            LostError: it does not answer at all.
        """
        try:
            return ask(self.address, self.port, "news", self._number) is not None
        except OSError as error:
            raise LostError(f"{self.launcher}: {error}") from None

    def join(
        self, status: Callable[[], ProcessStatus], set_aside: Callable[[], None]
    ) -> dict[str, Any]:
        """Waits until the next generation is formed, and tells Horovod this process's ranks in it.

        Args:
            status: the launcher decides by it who takes part, and what has failed; evaluated for
                each request, as `set_aside` changes it.
            set_aside: called where one is formed without this process, which waits for another.

        Returns:
            As ElasticDriver.join.

        Raises:
            RemovedError: this process is not in it.
            RefusedError: it is not, and that is due to itself.
            LostError: the launcher did not answer for 20 s.
        """
        heard = time.monotonic()
        while True:
            try:
                assignment = ask(self.address, self.port, "join", self._number, asdict(status()))
                heard = time.monotonic()
            except OSError as error:
                if time.monotonic() - heard > _LOST_SECONDS:
                    raise LostError(f"{self.address}:{self.port}: {error}") from None
                time.sleep(0.2)
                continue
            if assignment is not None and assignment.get("spare"):
                set_aside()
            elif assignment is not None:
                break
        if "reason" in assignment:
            raise RefusedError(assignment["reason"])
        if assignment["rank"] < 0:
            raise RemovedError
        for name in _RANKS:
            os.environ[f"HOROVOD_{name.upper()}"] = str(assignment[name])
        os.environ[_GENERATION] = str(assignment["generation"])
        os.environ[_ADDRESS], os.environ[_PORT] = self.address, str(self.port)
        self.job, self.generation = assignment["job"], assignment["generation"]
        self.hosts_changed = False
        self.silent = assignment.get("silent", [])
        self.line.join(assignment["generation"])
        if assignment["rank"] == 0 and not self._listening:
            self._listening = True  # rank 0 stays rank 0 as long as it lives
            threading.Thread(target=self._listen, daemon=True).start()
        return assignment

    def report(self, message: str, step: int | None) -> None:
        """Tells the launcher why this process is about to end, if it hears it.

        Args:
            step: in which it raised an error.
        """
        with suppress(OSError):
            ask(self.address, self.port, "failed", self._number, {"message": message, "step": step})

    def replace(self, message: str) -> None:
        """Asks the launcher for a new process in place of this one, which is about to end.

        Raises:
            OSError: it does not answer.
        """
        ask(self.address, self.port, "replace", self._number, {"message": message})

    def leave(self, message: str) -> None:
        """Tells the launcher that this host is about to be taken away: its ranks leave.

        Raises:
            OSError: it does not hear it now.
        """
        ask(self.address, self.port, "leave", self._number, {"message": message})

    def _listen(self) -> None:
        while True:
            time.sleep(_NEWS_SECONDS)
            try:
                news = ask(self.address, self.port, "news", self._number)
            except OSError:
                continue  # where the launcher is gone, whoever ends its processes ends this one
            if news is not None:
                self.hosts_changed = news["hosts"]
                if news["stop"]:
                    self._stop.raise_()
