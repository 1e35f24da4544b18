"""The elastic driver inside horovodrun: which processes run, and who meets in which round.

Horovod's launcher finds it by the entry point horovod.elastic_driver and lets it serve
hvdtrain's commands. A process is started in a slot of a host and goes through

    starting -> waiting -> running -> waiting -> running ... -> gone
                  |  asks for its rank: GET /join/NUMBER
                  v
    a round: all that wait get their ranks and meet, once nobody runs in the last one any more

After a failure the survivors meet at once. A process for the free slot is started meanwhile;
when it is ready to train it waits, rank 0 hears of it (GET /news/NUMBER), and all meet again
at the next step boundary. So nobody ever waits for a process to start. A slot whose process
died is used again after a pause that grows while it goes on dying; its host stays in use.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

from horovod.runner.common.util.hosts import SlotInfo

from hvdtrain.elastic.host_list import HostList
from hvdtrain.elastic.process import Process, assign, describe, in_order
from hvdtrain.elastic.rendezvous import interface_towards, make_handler
from hvdtrain.elastic.slots import Slots
from hvdtrain.errors import EXIT_CRASH, EXIT_NOT_FINITE, EXIT_PREEMPTED, EXIT_USER

# Seconds between discoveries: while ranks are missing, and while all are there. Most of what a
# script costs is its start.
_DISCOVERY_SECONDS = (1.0, 5.0)
_LOOK_SECONDS = 0.25  # the driver is woken besides whenever a process asks or ends
# Connections that the server's system keeps until they are accepted. Python's 5 are too few
# when all ranks meet: a refused one is tried again after 1, 2, 4 s (horovod#3556).
_BACKLOG = 1024
# New processes wait this long for each other, so that one meeting takes in all of them.
_GATHER_SECONDS = 2.0
# A process that was told to leave, or outlives the end of the others.
_LEAVE_SECONDS = 2.0
_END_SECONDS = 30.0
_END_OF_START_SECONDS = 1.0  # the same, where no round was formed: they wait to be ended
_PATIENCE_SECONDS = 3.0  # before people are told that there are too few slots
_DEFAULT_TIMEOUT = 600
_FINAL = (0, EXIT_USER, EXIT_NOT_FINITE, EXIT_PREEMPTED)  # the ranks agreed on these

CreateWorker = Callable[[SlotInfo, list[threading.Event]], tuple[int, float]]


class Results(NamedTuple):
    """What horovodrun reads at the end."""

    error_message: str | None
    worker_results: dict[str, tuple[int, float]]


class ElasticDriver:
    """See the top of this file. The arguments are those of Horovod's driver.

    Args:
        rendezvous: the HTTP server through which ranks of a round find each other.
        discovery: find_available_hosts_and_slots() -> {host: slots}.
        min_num_proc, max_num_proc: the fewest and the most processes of a round.
        timeout: seconds for which fewer than `min_num_proc` may be waited with.
        reset_limit: rounds after failures before the job ends.
        cooldown_range: seconds before a slot is used again: after a first failure, at most.
    """

    def __init__(
        self,
        rendezvous: Any,
        discovery: Any,
        min_num_proc: int,
        max_num_proc: int | None,
        timeout: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        verbose: int = 0,
    ) -> None:
        self._rendezvous = rendezvous
        self._min = min_num_proc
        self._max = max_num_proc or sys.maxsize
        self._timeout = timeout or int(os.environ.get("HOROVOD_ELASTIC_TIMEOUT", _DEFAULT_TIMEOUT))
        self._reset_limit = reset_limit
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # For those that wait for their ranks: a thousand of them must not wake at each change.
        self._formed = threading.Condition(lock)
        self._hosts = HostList(discovery)
        self._slots = Slots(cooldown_range)
        self._processes: list[Process] = []
        self._threads: list[threading.Thread] = []
        self._create: CreateWorker | None = None
        self._next_number = 0
        self._plan: list[SlotInfo] = []  # of this round
        self._rounds = 0
        self._job = secrets.randbits(62)  # no other job's
        self._failed = False  # a process died since the last round was formed
        self._failed_rounds = 0
        self._most_ranks = 0  # that ran at once so far
        self._short_since: float | None = None  # fewer than min_num_proc since then
        self._stop_requested = False
        self._ending: float | None = None  # since the ranks ended as agreed
        self._told_to_end: float | None = None
        self._exit_code = 0
        self._results: dict[str, tuple[int, float]] = {}
        self._shutdown = threading.Event()
        self._finished = threading.Event()
        self._discoverer = threading.Thread(target=self._discover, daemon=True)
        self._discoverer.start()

    # --- what horovodrun calls --------------------------------------------

    @classmethod
    def serves(cls, command: Sequence[str]) -> bool:
        """Whether a command is one of hvdtrain's: only its processes ask for their ranks.

        HVDTRAIN_ELASTIC=1 says so of a script that starts it.
        """
        names = {os.path.basename(word) for word in command}
        return bool(names & {"hvdtrain", "hvdtrain.train", "hvdtrain.cli"}) or (
            os.environ.get("HVDTRAIN_ELASTIC") == "1"
        )

    def create_rendezvous_handler(self) -> type:
        return make_handler(self)

    def wait_for_available_slots(self, min_num_proc: int, min_hosts: int = 1) -> HostList:
        """Waits until discovery has found so many slots; ends the launcher where it does not."""
        began, said = time.monotonic(), ""
        with self._changed:
            while (count := self._hosts.count()) < max(1, min_num_proc):
                if self._shutdown.is_set():
                    sys.exit(EXIT_USER)  # it said why
                state = f"discovery finds {count} slots, and -np is {min_num_proc}"
                if time.monotonic() - began > self._timeout:
                    _say(f"error: after {self._timeout} s {state}")
                    sys.exit(EXIT_CRASH)
                if time.monotonic() - began > _PATIENCE_SECONDS and state != said:
                    _say(f"{state}: waiting for hosts")
                    said = state
                self._changed.wait(0.2)
            return self._hosts

    def get_common_interfaces(self) -> set[str]:
        """The network interface of this host that leads to the others.

        Ranks look for their own by the same means.
        """
        with self._changed:
            return {interface_towards(self._hosts.slots)}

    def register_shutdown_event(self) -> threading.Event:
        """SIGTERM and SIGUSR1: the ranks write a checkpoint and end; again, or SIGINT: at once."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self._shutdown

    def start(self, num_proc: int, create_worker: CreateWorker) -> None:
        """Starts `num_proc` processes and lets the driver do its work."""
        with self._changed:
            self._create = create_worker
            self._rendezvous._httpd.socket.listen(_BACKLOG)
            self._start_processes(num_proc)
        threading.Thread(target=self._direct, daemon=True).start()

    def get_results(self) -> Results:
        """Waits for the end of the job."""
        while not self._finished.wait(0.2):
            pass
        for thread in self._threads:
            thread.join(timeout=15)
        return Results(None, self._results)

    def stop(self) -> None:
        self._shutdown.set()
        self._rendezvous.stop()

    # --- what processes ask, through rendezvous.py -------------------------

    def join(self, number: int, seconds: float) -> dict[str, int] | None:
        """A process asks for its ranks in the next round; None: not yet, ask again.

        Returns:
            rank, size, local_rank, local_size, cross_rank, cross_size, and whose run it is: job,
            generation. A rank of -1: it does not take part any more.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            process = next((p for p in self._processes if p.number == number), None)
            if process is None or process.state == "gone" or self._ending is not None:
                return {"rank": -1}
            if process.state != "waiting" and not process.assignment:
                process.become("waiting")
                self._changed.notify_all()
            while not process.assignment and (left := deadline - time.monotonic()) > 0:
                self._formed.wait(left)
            assignment, process.assignment = process.assignment, {}
            return assignment or None

    def news(self) -> dict[str, bool]:
        """What the running ranks have to know at their next step."""
        with self._changed:
            return {"stop": self._stop_requested, "hosts": self._others_come_or_go()}

    def ranks_of(self, host: str, local_rank: int) -> str | None:
        """What Horovod asks for when it starts: the ranks of this round, in its own form."""
        with self._changed:
            for slot in self._plan:
                if (slot.hostname, slot.local_rank) == (host, local_rank):
                    return str(slot.to_response_string())
            return None

    # --- the driver's own threads ------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or self._stop_requested:
            self._exit_code = self._exit_code or 128 + number
            self._shutdown.set()
        self._stop_requested = True

    def _discover(self) -> None:
        first = True
        while not self._shutdown.is_set():
            try:
                found = self._hosts.find()
            except Exception as error:
                _say(f"{'error: ' * first}discovery failed: {error}")
                if first:
                    self._shutdown.set()
                    return
            else:
                first = False
                with self._changed:
                    self._take_over(found)
                    self._changed.notify_all()
            with self._changed:
                ranks = sum(p.state == "running" for p in self._processes)
                self._most_ranks = max(self._most_ranks, ranks)
                complete = self._rounds > 0 and ranks == self._most_ranks
            self._shutdown.wait(_DISCOVERY_SECONDS[complete])

    def _take_over(self, found: dict[str, int]) -> None:
        for change in self._hosts.take_over(found):
            if self._rounds:
                _say(change)
        for process in self._alive():
            process.leaving = process.slot >= self._hosts.slots.get(process.host, 0)

    def _direct(self) -> None:
        while not self._finished.is_set():
            with self._changed:
                try:
                    self._consider()
                except Exception:  # a defect of ours must not leave the job without a driver
                    _say(f"error in the elastic driver:\n{traceback.format_exc()}")
                    self._exit_code = self._exit_code or EXIT_CRASH
                    self._shutdown.set()
                    self._finished.set()
                self._changed.wait(_LOOK_SECONDS)

    def _consider(self) -> None:
        """One look at all processes: ends, begins and forms what has to be."""
        alive = self._alive()
        if not alive:
            # Where none has ended as agreed, the last ones went with their hosts.
            lost = self._ending is None and self._exit_code == 0
            self._finish(EXIT_CRASH if lost else self._exit_code)
            return
        if self._shutdown.is_set():
            self._told_to_end = self._told_to_end or time.monotonic()
            if time.monotonic() - self._told_to_end > _END_SECONDS:
                self._finish(self._exit_code or EXIT_CRASH)  # killed, and still there
            return
        if self._ending is not None:
            limit = _END_SECONDS if self._rounds else _END_OF_START_SECONDS
            if time.monotonic() - self._ending > limit:
                self._shutdown.set()
            return
        running = [p for p in alive if p.state == "running"]
        waiting = [p for p in alive if p.state == "waiting"]
        survivors = [p for p in waiting if p.rounds]
        if running:
            if not survivors:
                self._start_processes(self._max)
            elif all(p.leaving for p in running):
                self._end_leaving(running)
            return
        self._form_round(waiting, survivors, [p for p in alive if p.state == "starting"])

    def _form_round(
        self, waiting: list[Process], survivors: list[Process], starting: list[Process]
    ) -> None:
        taking_part = [p for p in waiting if not p.leaving][: self._max]
        still_starting = any(p.lasted() < self._timeout for p in starting)
        if still_starting and not survivors:
            return  # a first start, or everybody died: nobody loses time by waiting for all
        if self._stop_requested and len(taking_part) < self._min:
            self._exit_code = EXIT_PREEMPTED
            self._shutdown.set()
        elif len(taking_part) < self._min:
            self._wait_for_more(len(taking_part))
        elif self._reset_limit is not None and self._failed_rounds > self._reset_limit:
            self._give_up(f"ranks failed more than {self._reset_limit} times (--reset-limit)")
        else:
            for process in waiting:
                if process.leaving:
                    process.become("removed")
                    process.assignment = {"rank": -1}
            self._begin_round(taking_part)

    def _begin_round(self, taking_part: list[Process]) -> None:
        self._plan = plan = assign(taking_part)
        self._rendezvous.init(plan)
        for slot_info, process in zip(plan, in_order(taking_part), strict=True):
            process.become("running")
            process.rounds += 1
            process.assignment = {
                "rank": slot_info.rank,
                "size": slot_info.size,
                "local_rank": slot_info.local_rank,
                "local_size": slot_info.local_size,
                "cross_rank": slot_info.cross_rank,
                "cross_size": slot_info.cross_size,
                "job": self._job,
                "generation": self._rounds + 1,
            }
        if self._rounds:
            count = Counter(process.host for process in taking_part)
            where = ", ".join(f"{host}:{ranks}" for host, ranks in count.items())
            _say(f"going on with {len(plan)} ranks ({where})")
        self._rounds += 1
        self._failed_rounds += self._failed
        self._failed = False
        self._short_since = None
        self._formed.notify_all()

    def _wait_for_more(self, count: int) -> None:
        if self._short_since is None:
            self._short_since = time.monotonic()
            _say(f"{count} ranks are left and {self._min} are needed (--min-np): waiting for hosts")
        self._start_processes(self._max)
        if time.monotonic() - self._short_since > self._timeout:
            self._give_up(
                f"fewer than {self._min} ranks for {self._timeout} s (--min-np, --elastic-timeout)"
            )

    def _give_up(self, reason: str) -> None:
        _say(f"error: {reason}")
        self._exit_code = self._exit_code or EXIT_CRASH
        self._shutdown.set()

    def _start_processes(self, most: int) -> None:
        """Starts a process in each free slot that may be used, up to `most` in all."""
        taken = {(p.host, p.slot) for p in self._alive()}
        for host, count in self._hosts.slots.items():
            for slot in range(count):
                free = (host, slot) not in taken and self._slots.usable(host, slot)
                if free and len(taken) < min(most, self._max):
                    taken.add((host, slot))
                    self._start_process(Process(self._next_number, host, slot), len(taken))
                    self._next_number += 1

    def _start_process(self, process: Process, count: int) -> None:
        self._processes.append(process)
        # Ranks are given out later; these figures are its name (see Process).
        slots = self._hosts.slots[process.host]
        slot_info = SlotInfo(process.host, process.number, process.slot, 0, count, slots, 1)

        def run() -> None:
            assert self._create is not None
            code, _ = self._create(slot_info, [self._shutdown, process.end])
            with self._changed:
                self._on_exit(process, code)
                self._changed.notify_all()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _on_exit(self, process: Process, code: int) -> None:
        was_starting, removed = process.state == "starting", process.state == "removed"
        pause = self._slots.failed(process)
        process.become("gone")
        if removed or process.leaving or self._shutdown.is_set():
            return
        agreed = code in _FINAL and not (was_starting and self._rounds)
        if agreed or self._ending is not None:
            self._ending = self._ending or time.monotonic()
            self._exit_code = self._exit_code or code
            return
        self._failed |= not was_starting
        _say(f"{process} ended ({describe(code)}); its slot is used again in {pause:.0f} s")
        if not self._alive():
            self._exit_code = code

    def _finish(self, code: int) -> None:
        self._results["job"] = (code if code >= 0 else 128 - code, time.time())
        self._finished.set()

    def _end_leaving(self, leaving: list[Process]) -> None:
        for process in leaving:
            if process.lasted() > _LEAVE_SECONDS:
                process.end.set()

    def _others_come_or_go(self) -> bool:
        alive = self._alive()
        if not any(p.state == "running" for p in alive):
            return False
        joining = [p for p in alive if p.state == "waiting" and not p.rounds]
        coming = any(p.state == "starting" for p in alive)
        ready = joining and (not coming or max(p.lasted() for p in joining) > _GATHER_SECONDS)
        return bool(ready) or any(p.leaving and p.state == "running" for p in alive)

    def _alive(self) -> list[Process]:
        return [p for p in self._processes if p.state != "gone"]


def _say(message: str) -> None:
    print(f"hvdtrain: {message}", file=sys.stderr, flush=True)
