"""Decisions of the elastic driver, the watchdog and the rendezvous, without processes."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, replace
from typing import Any

import pytest
from horovod.runner.common.util.hosts import SlotInfo
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.agent.failure_detector import FailureDetector
from hvdtrain.elastic import decisions, watchdog
from hvdtrain.elastic import driver as driver_module
from hvdtrain.elastic.driver import ElasticDriver
from hvdtrain.elastic.processes import TrainingProcess, assign, describe, in_order
from hvdtrain.elastic.status import (
    RENDEZVOUS,
    STATE_TRANSFER,
    TRAINING,
    Identity,
    ProcessStatus,
)
from hvdtrain.process.generation import RankStatus, all_equal, most_advanced
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from tests.support.driver_fakes import Rendezvous, SteppedDriver

IDENTITY = Identity("cpu", "digest", 100, None)
PLACES = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 5)), min_size=1, unique=True
)


def _processes(places: list[tuple[str, int]]) -> list[TrainingProcess]:
    return [TrainingProcess(n, host, slot) for n, (host, slot) in enumerate(places)]


@given(PLACES)
def test_ranks_are_contiguous_and_grouped_by_host(places: list[tuple[str, int]]) -> None:
    plan = assign(_processes(places))
    assert [slot.rank for slot in plan] == list(range(len(places)))
    hosts = [slot.hostname for slot in plan]
    assert hosts == sorted(hosts, key=hosts.index), "the ranks of a host are not neighbors"
    for slot in plan:
        assert slot.size == len(places)
        assert slot.local_size == hosts.count(slot.hostname)
        across = [s.rank for s in plan if s.local_rank == slot.local_rank]
        assert (slot.cross_size, slot.cross_rank) == (len(across), across.index(slot.rank))
    for host in set(hosts):
        local = [slot.local_rank for slot in plan if slot.hostname == host]
        assert local == list(range(len(local)))


@given(PLACES, st.randoms())
def test_rank_0_stays_with_the_oldest_process(
    places: list[tuple[str, int]], random: object
) -> None:
    processes = _processes(places)
    random.shuffle(processes)  # type: ignore[attr-defined]
    assert in_order(processes)[0].number == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1))
def test_most_advanced_trained_rank_is_the_source(found: list[tuple[bool, int]]) -> None:
    statuses = [RankStatus(*one) for one in found]
    source = most_advanced(statuses)
    trained = [s.step for s in statuses if s.trained]
    if not trained:
        assert source is None and not all_equal(statuses)
    else:
        assert source is not None and statuses[source] == RankStatus(True, max(trained))
        assert all_equal(statuses) == (len(set(statuses)) == 1)


class Job:
    """A driver whose processes are functions: `exits[number] = code` ends one.

    Attributes:
        unkillable: numbers of processes that cannot be ended for now.
    """

    on_silence: Callable[[Sequence[int], str], None]
    detector = FailureDetector(3.0)

    def __init__(self, hosts: dict[str, int], np: int, min_np: int = 1) -> None:
        self.hosts = hosts
        self.exits: dict[int, int] = {}
        self.unkillable: set[int] = set()
        self.ends: dict[int, threading.Event] = {}  # of processes that the driver ends
        self.rendezvous = Rendezvous()
        self.driver = ElasticDriver(self.rendezvous, self, min_np, None, cooldown_range=(1, 1))
        self.driver.wait_for_available_slots(np)
        self.driver.start(self, np)

    def news(self) -> dict[str, bool]:
        return self.driver.news(0)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict(self.hosts)

    def start(self, slot: SlotInfo, on_exit: Callable[[int], None]) -> None:
        self.ends[slot.rank] = threading.Event()
        threading.Thread(target=lambda: on_exit(self._code(slot.rank)), daemon=True).start()

    def end(self, number: int) -> None:
        self.ends[number].set()

    def end_all(self) -> None:
        for end in self.ends.values():
            end.set()

    def set_witnesses(self, hosts: Set[str]) -> None:
        pass

    def end_generation(self, generation: int) -> None:
        pass

    def _code(self, number: int) -> int:
        """Return the exit code of a process when it has ended."""
        while number not in self.exits:
            if number not in self.unkillable and self.ends[number].is_set():
                return 143
            time.sleep(0.01)
        return self.exits[number]

    def join(self, *numbers: int, **status: object) -> dict[int, dict[str, Any]]:
        """Let all processes request their ranks at once; return their answers, {} for none.

        Args:
            status: as failures.ProcessStatus; omitted values are a healthy rank's, and a
                process that has not been in a generation yet is not `trained`.
        """
        got: dict[int, dict[str, Any]] = {}

        def ask(number: int) -> None:
            state = self.driver._state
            old = state.processes[number].first_generation is not None
            trained = old and number not in state.newcomers
            said = ProcessStatus(IDENTITY, **{"trained": trained} | status)  # type: ignore[arg-type]
            got[number] = self.answer(number, said)

        threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return got

    def answer(self, number: int, status: ProcessStatus) -> dict[str, Any]:
        """Request a process's ranks as the request server does; return the answer, {} for none."""
        deadline = time.monotonic() + 1.5
        while not self.driver.request(number, asdict(status)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.driver.join(number, asdict(status)) or {}

    def ranks(self, *numbers: int) -> list[int | None]:
        got = self.join(*numbers)
        return [got[number].get("rank") for number in numbers]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    """Make jobs whose hosts are discovered more often than a real job's."""
    monkeypatch.setattr(driver_module, "_DISCOVERY_SECONDS", (0.2, 0.5))
    return Job


def _until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_slow_replacement_does_not_take_rank_0_from_a_trained_process(
    job: Callable[..., Job],
) -> None:
    running = job({"a": 3}, np=3)
    running.join(0, 1, 2)
    running.exits |= {0: 137, 1: 137}
    assert running.ranks(2) == [0]
    _until(lambda: len(running.driver._state.processes) == 5)
    assert running.ranks(4) == [None], "process 3 is still starting"
    _until(lambda: running.news()["hosts"])
    assert running.ranks(2, 4) == [0, 1]
    running.exits[2] = 137
    assert running.ranks(3) == [None]
    assert running.ranks(3, 4) == [1, 0], "process 4 trains, and 3 has never done so"


def test_incomplete_replica_is_a_spare_and_complete_ones_continue(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    running = job({"a": 2, "b": 2}, np=4)

    def join(shards: dict[int, int | None], step: int = 9) -> dict[int, dict[str, Any]]:
        threads = {}
        got: dict[int, dict[str, Any]] = {}
        for number, shard in shards.items():
            fields = {"replica_size": 2, "shard": shard, "step": step, "reachable_step": step}
            ask = functools.partial(lambda n, f: got.update(running.join(n, **f)), number, fields)
            threads[number] = threading.Thread(target=ask)
            threads[number].start()
        for thread in threads.values():
            thread.join()
        return got

    given = join(dict.fromkeys(range(4)))
    assert sorted(ranks["size"] for ranks in given.values()) == [4] * 4
    running.exits[1] = 137
    given = join({0: 0, 2: 0, 3: 1})
    assert given[0] == {"rank": -1, "spare": True}
    assert (given[2]["size"], given[3]["size"]) == (2, 2)
    assert "spare until 2 can form a replica of the model: process 0 on a" in (
        capsys.readouterr().err
    )
    # The spare waits for the process that is started in its place; the others do not wait.
    _until(lambda: len(running.driver._state.processes) == 5)
    assert join({0: 0}) == {0: {"rank": -1, "spare": True}} and running.news()["hosts"] is False
    assert join({4: None}) == {4: {}}
    _until(lambda: running.news()["hosts"])
    given = join({0: 0, 2: 0, 3: 1, 4: None})
    assert sorted(ranks["rank"] for ranks in given.values()) == [0, 1, 2, 3]
    assert given[2]["rank"] == 0, "it has the run's directory now"


def test_spare_status_reports_its_last_completed_step(job: Callable[..., Job]) -> None:
    running = job({"a": 2, "b": 2}, np=4)
    running.join(0, 1, 2, 3, replica_size=2, step=9, reachable_step=9)
    running.exits[1] = 137
    half = {"replica_size": 2, "step": 9, "reachable_step": 10, "failed": "training"}
    got: dict[int, dict[str, Any]] = {}

    def ask(number: int, shard: int) -> None:
        got.update(running.join(number, shard=shard, **half))

    threads = [threading.Thread(target=ask, args=one) for one in ((0, 0), (2, 0), (3, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got[0] == {"rank": -1, "spare": True}
    status = running.driver._state.processes[0].status
    assert status is not None and (status.reachable_step, status.failed) == (9, None)


def test_replacing_a_process_does_not_count_as_a_failure_of_its_slot(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    running = job({"a": 2}, np=2, min_np=2)
    assert sorted(r for r in running.ranks(0, 1) if r is not None) == [0, 1]
    running.driver.replace(1, "it had part 0 of the model")
    running.exits[0] = 137
    _until(lambda: running.driver._state.processes[0].state == "gone")
    running.exits[1] = 0  # the last remaining process
    _until(lambda: len(running.driver._state.processes) == 3)
    assert running.driver._state.processes[2].slot == 1, "its slot was used after a pause"
    assert running.ranks(2) == [None]
    _until(lambda: len(running.driver._state.processes) == 4)
    assert sorted(r for r in running.ranks(2, 3) if r is not None) == [0, 1]
    said = capsys.readouterr().err
    assert "process 1 on a is replaced by a new process: it had part 0 of the model" in said
    assert "process 1 on a ended" not in said


def test_first_round_waits_for_all_processes(job: Callable[..., Job]) -> None:
    running = job({"a": 2}, np=2)
    assert running.ranks(0) == [None]
    assert sorted(running.join(0, 1)[n]["rank"] for n in (0, 1)) == [0, 1]


def test_survivors_continue_while_a_replacement_starts(job: Callable[..., Job]) -> None:
    running = job({"a": 2, "b": 1}, np=3)
    running.join(0, 1, 2)
    running.exits[1] = 137
    assert {n: r["rank"] for n, r in running.join(0, 2).items()} == {0: 0, 2: 1}
    assert running.news() == {"stop": False, "hosts": False}
    # Its slot is used again; survivors are notified of the new process when it is ready.
    _until(lambda: len(running.driver._state.processes) == 4)
    assert running.ranks(3) == [None]
    _until(lambda: running.news()["hosts"])
    assert running.ranks(0, 2, 3) == [0, 2, 1]


def test_rendezvous_requests_are_refused_once_a_rank_has_died(job: Callable[..., Job]) -> None:
    running = job({"a": 3}, np=3)
    given = running.join(0, 1, 2)
    assert {ranks["generation"] for ranks in given.values()} == set(running.rendezvous.generations)
    running.exits[2] = 137
    # Requests of any generation are refused until the next one: they give up at once.
    _until(lambda: running.rendezvous.generations == [0, -1])
    assert {ranks["generation"] for ranks in running.join(0, 1).values()} == {1}


def test_survivor_waits_for_one_that_is_still_computing(job: Callable[..., Job]) -> None:
    running = job({"a": 3}, np=3)
    running.join(0, 1, 2)
    running.exits[2] = 137
    assert running.ranks(0) == [None], "process 1 is alive and has not asked yet"
    assert sorted(running.ranks(0, 1)) == [0, 1]  # type: ignore[type-var]


def test_silent_process_is_excluded_and_not_readmitted(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    running = job({"a": 3}, np=3)
    running.join(0, 1, 2)
    running.unkillable.add(2)
    running.on_silence([2], "no message for 1.20 s")
    got = running.join(0, 1)
    assert {n: got[n]["rank"] for n in (0, 1)} == {0: 0, 1: 1}
    assert "process 2 on a fell silent: no message for 1.20 s" in got[0]["silent"][0]
    running.driver.stuck(2, "SIGKILL does not end it")
    assert "process 2 on a still exists: SIGKILL does not end it" in capsys.readouterr().err
    assert running.ranks(2) == [-1], "it is unknown what it did meanwhile"
    running.unkillable.clear()
    _until(lambda: [p.number for p in running.driver._state.alive()] == [0, 1, 3])
    assert running.ranks(3) == [None], "its slot is used again, once it has ended"


def test_removed_host_leaves_without_ending_the_job(job: Callable[..., Job]) -> None:
    running = job({"a": 1, "b": 1}, np=2)
    running.join(0, 1)
    del running.hosts["b"]
    _until(lambda: running.news()["hosts"])
    assert running.ranks(0, 1) == [0, -1]
    running.exits[1] = 0
    time.sleep(0.2)
    assert not running.driver._finished.is_set(), (
        "the end of a process that left does not end the job"
    )


def test_host_with_a_notice_leaves_and_is_not_reused_until_replaced(
    job: Callable[..., Job],
) -> None:
    running = job({"a": 1, "b": 2}, np=3)
    running.join(0, 1, 2)
    running.driver.leave(1, "notice")
    running.driver.leave(2, "notice")  # the other rank there has detected it too
    assert running.news() == {"stop": False, "hosts": True}
    assert running.ranks(0, 1, 2) == [0, -1, -1]
    running.exits |= {1: 0, 2: 0}
    time.sleep(1.5)  # discovery finds it all the time, and its slots' delay has elapsed
    assert [p.number for p in running.driver._state.alive()] == [0]
    del running.hosts["b"]
    time.sleep(1.0)
    running.hosts["b"] = 1  # another machine with this name
    _until(lambda: [p.number for p in running.driver._state.alive()] == [0, 3])


def test_host_with_a_notice_at_the_start_does_not_end_the_job(job: Callable[..., Job]) -> None:
    running = job({"a": 1, "b": 1}, np=2)
    running.driver.leave(1, "notice")
    assert running.ranks(0, 1) == [0, -1] and not running.news()["stop"]


def test_leaving_rank_is_signaled_only_after_its_deadline(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job({"a": 1, "b": 1}, np=2, min_np=2)
    running.join(0, 1)
    time.sleep(2.5)  # the generation is older than any grace period
    del running.hosts["b"]
    _until(lambda: running.news()["hosts"])
    assert running.ranks(0) == [None], "process 1 has not asked yet"
    assert not running.ends[1].is_set(), "SIGTERM would preempt the run"
    assert running.ranks(0, 1) == [None, None], "2 ranks are needed"
    running.hosts["b"] = 1
    _until(lambda: not running.driver._state.processes[1].leaving)
    assert running.ranks(0, 1) == [0, 1]
    del running.hosts["b"]
    _until(lambda: running.news()["hosts"])
    monkeypatch.setattr(decisions, "_LEAVE_SECONDS", 0.5)
    running.ranks(0)
    _until(lambda: running.ends[1].is_set())
    assert running.ranks(1) == [-1], "a rank that was signalled must not take part again"


def test_leave_deadline_counts_from_the_removal_of_the_host(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "_LEAVE_SECONDS", 2.0)
    running = job({"a": 1, "b": 1}, np=2, min_np=2)
    running.join(0, 1)
    assert running.ranks(0) == [None], "it waits for process 1, which still works"
    time.sleep(2.5)
    del running.hosts["b"]
    _until(lambda: running.driver._state.processes[1].leaving)
    time.sleep(0.6)  # the driver looks four times a second
    assert not running.ends[1].is_set()
    _until(lambda: running.ends[1].is_set())


def test_notice_on_every_host_stops_the_run_with_exit_code_75(job: Callable[..., Job]) -> None:
    running = job({"a": 1, "b": 1}, np=2)
    running.join(0, 1)
    running.driver.leave(1, "notice")
    assert not running.news()["stop"]
    running.driver.leave(0, "notice")
    assert running.news()["stop"]
    running.exits |= {0: 75, 1: 75}
    assert running.driver.wait() == 75


def test_pair_of_signals_to_the_driver_lets_ranks_save(job: Callable[..., Job]) -> None:
    running = job({"a": 1, "b": 1}, np=2)
    running.join(0, 1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        running.driver.signal(number)
    assert running.news()["stop"]
    running.exits |= {0: 75, 1: 75}
    assert running.driver.wait() == 75


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_exit_code_that_ranks_agree_on_ends_the_job(job: Callable[..., Job], code: int) -> None:
    running = job({"a": 2}, np=2)
    running.join(0, 1)
    running.exits |= {0: code, 1: code}
    assert running.driver.wait() == code
    assert len(running.driver._state.processes) == 2


def test_death_of_all_ranks_ends_the_job_with_their_exit_code(job: Callable[..., Job]) -> None:
    running = job({"a": 2}, np=2)
    running.join(0, 1)
    running.exits |= {0: 137, 1: 137}
    assert running.driver.wait() == 137


def test_loss_of_all_hosts_ends_the_job_with_exit_code_1(job: Callable[..., Job]) -> None:
    running = job({"a": 2}, np=2)
    running.join(0, 1)
    running.hosts.clear()
    _until(lambda: all(process.leaving for process in running.driver._state.processes), 15)
    running.exits |= {0: 255, 1: 255}
    assert running.driver.wait() == 1


def test_driver_notifies_the_other_ranks_of_a_lost_one_at_once() -> None:
    job = SteppedDriver({"a": 3}, np=3, min_np=1, max_np=3, timeout=600)
    try:
        for _ in range(2):
            for number in (0, 1, 2):
                job.join(number, ProcessStatus(IDENTITY))
            job.consider(0.0)
        job.exit(1, 137)
        assert job.over_generations == [0] and job.rendezvous.generations == [0, -1]
        job.fall_silent(2)
        assert job.over_generations == [0, 0] and job.ended == {2}
    finally:
        job.close()


def test_only_hosts_that_can_continue_alone_are_witnesses_of_silence() -> None:
    job = SteppedDriver({"a": 1, "b": 1, "c": 1}, np=2, min_np=2, max_np=3, timeout=600)
    try:
        for _ in range(2):
            for number in (0, 1):
                job.join(number, ProcessStatus(IDENTITY))
            job.consider(0.0)
        job.consider(0.0)
        assert job.witnesses == {"a", "b"}
        job.exit(1, 137)
        job.consider(0.0)
        assert job.witnesses == {"a"}, "b has no state of the run"
    finally:
        job.close()


def test_driver_can_continue_on_hosts_with_enough_holders_of_the_state() -> None:
    job = SteppedDriver({"a": 2, "b": 2}, np=4, min_np=2, max_np=4, timeout=600)
    try:
        assert job.driver.can_continue_on({"b"}), "the run has not begun"
        assert not job.driver.can_continue_on(set())
        for _ in range(2):
            for number in range(4):
                job.join(number, ProcessStatus(IDENTITY))
            job.consider(0.0)
        assert job.driver.can_continue_on({"b"})
        job.exit(3, 137)
        assert not job.driver.can_continue_on({"b"})
        assert job.driver.can_continue_on({"a", "b"})
    finally:
        job.close()


def test_driver_acts_on_a_silence_when_the_host_is_given_up() -> None:
    """`hvdtrain launch` steps down if only hosts that are given up have the state of the run."""
    job = SteppedDriver({"a": 1, "b": 1}, np=2, min_np=1, max_np=2, timeout=600)
    try:
        for _ in range(2):
            for number in (0, 1):
                job.join(number, ProcessStatus(IDENTITY))
            job.consider(0.0)
        job.on_silence([1], "no message for 3.10 s")
        assert job.over_generations == []
        job.exit(1, 137)
        assert job.over_generations == [0]
    finally:
        job.close()


def test_driver_names_the_places_of_hosts_after_a_failed_rendezvous() -> None:
    job = SteppedDriver({"a": 2, "b": 1}, np=3, min_np=1, max_np=3, timeout=600)
    trained = ProcessStatus(IDENTITY, trained=True, step=5)

    def ask(**status: Any) -> list[Any]:
        for number in range(3):
            job.join(number, replace(trained, place=("10.0.0.1", number), **status))
        job.consider(0.0)
        return [(job.join(number, trained) or {}).get("places") for number in range(3)]

    try:
        assert ask() == [None, None, None]
        places = {"a": ("10.0.0.1", 1), "b": ("10.0.0.1", 2)}
        assert ask(failed=RENDEZVOUS) == [places, None, places]
        assert ask() == [None, None, None]
    finally:
        job.close()


def test_driver_repeats_answers_that_may_be_lost() -> None:
    job = SteppedDriver({"a": 2, "b": 2}, np=4, min_np=1, max_np=4, timeout=600)
    new = ProcessStatus(IDENTITY, replica_size=2)
    trained = replace(new, trained=True, step=5, reachable_step=5)

    def ask(status: ProcessStatus, *numbers: int) -> list[dict[str, Any] | None]:
        for number in numbers:
            job.join(number, status)
        job.consider(1.0)
        return [job.join(number, status) for number in numbers]

    try:
        ask(new, 0, 1, 2, 3)
        job.exit(1, 137)
        ask(trained, 0, 2, 3)
        job.consider(1.0)
        del job.found["b"]
        for _ in range(2):
            job.discover()
        assert job.join(4, new) is None
        # A generation of processes 0 and 4; the others leave, and process 0 was a spare.
        got = ask(trained, 2, 3)
        assert [answer["rank"] for answer in got if answer] == [-1, -1]
        assert ask(trained, 2, 3) == got, "an answer is not repeated"
        ranks = {number: job.join(number, trained) or {} for number in (0, 4)}
        assert (ranks[0]["rank"], ranks[0]["spare"]) == (0, True)
        assert ranks[4]["rank"] == 1 and "spare" not in ranks[4]
    finally:
        job.close()


def test_job_continues_while_discovery_fails(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, int]:
        raise RuntimeError("no answer")

    running = job({"a": 1, "b": 1}, np=2)
    running.join(0, 1)
    with monkeypatch.context() as failing:
        failing.setattr(running, "find_available_hosts_and_slots", fail)
        time.sleep(1.2)
    assert running.news() == {"stop": False, "hosts": False}, "a host was removed"
    assert "hvdtrain: discovery failed: no answer" in capsys.readouterr().err
    del running.hosts["b"]
    _until(lambda: running.news()["hosts"])


def test_bug_in_the_driver_ends_the_job_with_exit_code_1(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: object, now: float) -> list[object]:
        raise ZeroDivisionError

    running = job({"a": 1}, np=1)
    monkeypatch.setattr(driver_module, "decide", fail)
    assert running.driver.wait() == 1
    assert "error in the elastic driver:\nTraceback" in capsys.readouterr().err


def test_sample_that_always_raises_ends_the_job(job: Callable[..., Job]) -> None:
    running = job({"a": 4}, np=4)
    running.join(0, 1, 2, 3)
    for number, left in ((0, (1, 2, 3)), (1, (2, 3))):
        running.driver.failed(number, f"rank 0 on a: ValueError: bad sample {number}", 31)
        running.exits[number] = 1
        assert all(running.join(*left, failed=TRAINING, step=30).values())
    running.driver.failed(2, "rank 0 on a: ValueError: bad sample 2", 31)
    running.exits |= {2: 1, 3: 143}
    assert running.driver.wait() == 1
    assert running.driver._shutdown.is_set(), "the fourth waited for new processes"


def test_persistent_network_failure_ends_the_job(job: Callable[..., Job]) -> None:
    running = job({"a": 2}, np=2)
    running.join(0, 1)
    for _ in range(4):
        assert all(running.join(0, 1, failed=TRAINING, step=30).values())
    running.join(0, 1, failed=TRAINING, step=30)
    assert running.driver._shutdown.is_set()


def test_newcomer_is_excluded_after_repeated_state_transfer_failures(
    job: Callable[..., Job],
) -> None:
    running = job({"a": 2, "b": 1}, np=2)
    running.join(0, 1)
    _until(lambda: len(running.driver._state.processes) == 3)
    running.join(2)
    assert all(running.join(0, 1, 2).values()), "processes came"
    assert all(running.join(0, 1, 2, failed=STATE_TRANSFER, step=30).values())
    got = running.join(0, 1, 2, failed=STATE_TRANSFER, step=30)
    assert [got[number]["rank"] for number in (0, 1, 2)] == [0, 1, -1]
    assert "2 transfers of the run's state failed" in got[2]["reason"]
    running.exits[2] = 1
    time.sleep(1.5)
    assert len(running.driver._state.processes) == 3, "its slot is used again at once"
    assert not running.driver._shutdown.is_set()


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda"},
        {"configuration": "other"},
        {"samples": 99},
        {"fingerprint": "abc"},
        {"rounding": "9fc0"},
    ],
)
def test_process_that_does_not_match_the_run_is_refused(
    job: Callable[..., Job], other: dict[str, Any]
) -> None:
    running = job({"a": 1, "b": 1}, np=1)
    running.join(0)
    _until(lambda: len(running.driver._state.processes) == 2)
    stranger = ProcessStatus(replace(IDENTITY, **other))
    got = running.answer(1, stranger)
    assert got["rank"] == -1 and got["reason"].startswith("on b: the "), got
    assert not running.news()["hosts"]
    running.exits[1] = 1
    time.sleep(1.5)
    assert len(running.driver._state.processes) == 2, "its slot is used again"
    running.hosts["b"] = 2
    _until(lambda: len(running.driver._state.processes) == 4, 15)


def test_unkillable_process_does_not_block_the_others(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job({"a": 3}, np=3)
    running.join(0, 1, 2)
    running.driver.stuck(0, "SIGKILL does not end it")
    assert running.ranks(1, 2) == [0, 1]
    assert running.ranks(0) == [-1], "it came back"
    monkeypatch.setattr(decisions, "_LAST_RESORT_SECONDS", 1.0)
    assert running.ranks(2) == [0]
    assert running.ends[1].is_set()


def test_signals_and_exit_codes_are_described_distinctly() -> None:
    assert describe(137) == describe(-9) == "signal 9 (Killed)"
    assert describe(1) == "exit code 1"


SECOND = 0.05  # for the tests below


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_STOPPED_SECONDS", "_UNREACHABLE_SECONDS", "_ORPHAN_SECONDS"):
        monkeypatch.setattr(watchdog, name, SECOND)


def _judged(seconds: float, reachable: bool = True, **seen: object) -> str | None:
    """Return a watchdog's verdict on a rank that looks like this for some time."""
    detector = watchdog.HangDetector(SECOND, lambda: reachable)
    so = {
        "beats": 1,
        "activity": Activity.WORKING,
        "work": 0,
        "stopped": False,
        "orphan": False,
    } | seen
    deadline = time.monotonic() + seconds
    work = 0
    while time.monotonic() < deadline:
        work += 10 * bool(so["work"])
        beats = int(time.monotonic() * 1000) if so["beats"] is None else 1
        verdict = detector.verdict(beats, so["activity"], work, so["stopped"], so["orphan"])  # type: ignore[arg-type]
        if verdict:
            return verdict
        time.sleep(0.01)
    return None


def test_watchdog_kills_hung_ranks_but_not_slow_ones(quick: None) -> None:
    assert "no progress" in str(_judged(3 * SECOND))
    assert "busy without" in str(_judged(15 * SECOND, work=1))
    assert _judged(5 * SECOND, work=1) is None, "it computes: slow, but alive"
    assert _judged(5 * SECOND, beats=None) is None, "it makes progress"
    assert _judged(5 * SECOND, activity=Activity.WAITING) is None, "it waits for another rank"
    assert "no progress" in str(_judged(3 * SECOND, activity=Activity.PREPARING))
    assert "busy without" in str(_judged(15 * SECOND, activity=Activity.PREPARING, work=1))
    assert _judged(5 * SECOND, activity=Activity.LOADING) is None, "no rank waits for it"
    assert "no progress" in str(_judged(15 * SECOND, activity=Activity.LOADING))
    assert _judged(15 * SECOND, activity=Activity.LOADING, work=1) is None, "it compiles"
    assert "stopped" in str(_judged(3 * SECOND, stopped=True, beats=None))
    assert "gone" in str(_judged(3 * SECOND, orphan=True, beats=None))


def test_watchdog_kills_a_rank_cut_off_from_its_launcher(quick: None) -> None:
    assert "not reached" in str(_judged(3 * SECOND, reachable=False, activity=Activity.RENDEZVOUS))
    assert _judged(3 * SECOND, reachable=True, activity=Activity.RENDEZVOUS) is None
    assert _judged(3 * SECOND, reachable=False, activity=Activity.WAITING) is None, "it trains"


def test_heartbeat_can_be_read_through_its_descriptor() -> None:
    heart = Heartbeat()
    other = Heartbeat(heart.descriptor)
    heart.beat(Activity.WORKING)
    heart.beat(Activity.WAITING)
    assert other.read() == (2, Activity.WAITING)
