"""Decisions of the elastic driver in single situations, without a driver or processes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from hvdtrain.elastic.decisions import EndGeneration, EndProcess, decide
from hvdtrain.elastic.processes import TrainingProcess
from hvdtrain.elastic.status import RENDEZVOUS, STATE_TRANSFER, TRAINING, Identity, ProcessStatus
from hvdtrain.run_files.host_records import WRONG
from tests.support.driver_fakes import DecidedJob, SteppedDriver

IDENTITY = Identity("cpu", "digest", 100, None)
NEW = ProcessStatus(IDENTITY)
TRAINED = ProcessStatus(IDENTITY, trained=True, step=5, reachable_step=5)
TIMEOUT = 600
SPARE = {"rank": -1, "spare": True}


def _start(hosts: dict[str, int], min_np: int = 1, **status: Any) -> DecidedJob:
    """A job whose processes train in their first generation, on all slots."""
    count = sum(hosts.values())
    job = DecidedJob(hosts, count, min_np, count + 2, TIMEOUT)
    _join(job, *range(count), status=replace(NEW, **status))
    assert sorted(job.ranks) == list(range(count))
    return job


def _join(
    job: DecidedJob, *numbers: int, status: ProcessStatus = TRAINED, seconds: float = 0.0
) -> dict[int, Any]:
    """Processes request ranks; after these seconds, what each of them gets."""
    for number in numbers:
        job.join(number, status)
    job.consider(seconds)
    return {number: job.join(number, status) for number in numbers}


def _find(job: DecidedJob, **hosts: int) -> None:
    """Two discoveries find these hosts; a host is removed after it is missing from two."""
    job.found = hosts
    for _ in range(2):
        job.discover()


# --- lost ranks ----------------------------------------------------------------


def test_survivors_are_notified_before_a_silent_rank_is_ended() -> None:
    job = _start({"a": 3})
    job.fall_silent(1)
    actions = decide(job.state, job.now)
    assert actions == [EndGeneration(job.state.generations - 1)]
    job.state.apply(actions[0], job.now)
    assert decide(job.state, job.now) == [EndProcess(1)]


def test_survivors_are_notified_when_a_rank_exits() -> None:
    job = _start({"a": 3})
    job.exit(1, 137)
    actions = decide(job.state, job.now)
    assert actions == [EndGeneration(0)]
    job.state.apply(actions[0], job.now)
    assert decide(job.state, job.now) == []


def test_end_of_an_excluded_process_does_not_end_the_generation() -> None:
    job = _start({"a": 2, "b": 1})
    _find(job, a=2)
    _join(job, 0, 1, 2)
    job.exit(2, 0)
    assert decide(job.state, job.now) == []


def test_survivors_do_not_wait_for_a_process_that_starts() -> None:
    job = _start({"a": 3})
    job.exit(2, 137)
    _join(job, 0, 1)
    job.consider(1.0)
    job.exit(1, 137)
    assert _join(job, 0)[0]["size"] == 1
    assert job.state.alive("starting")


def test_no_process_starts_while_survivors_wait_for_a_running_one() -> None:
    job = _start({"a": 3})
    job.exit(2, 137)
    _join(job, 0, seconds=5.0)
    assert len(job.state.processes) == 3
    _join(job, 1)
    job.consider(0.0)
    assert len(job.state.processes) == 4


def test_slot_of_a_dead_rank_is_used_again_after_a_pause() -> None:
    job = _start({"a": 2})
    job.exit(1, 137)
    _join(job, 0, seconds=0.9)
    assert len(job.state.processes) == 2
    job.consider(0.1)
    assert len(job.state.processes) == 3


def test_generation_forms_without_comparing_its_processes_with_each_other() -> None:
    """Ten thousand processes would need fifty million comparisons."""
    with patch.object(TrainingProcess, "__eq__", side_effect=AssertionError):
        assert len(_start({"a": 9}).ranks) == 9


def test_stuck_process_is_not_signaled_and_its_slot_is_not_used() -> None:
    job = _start({"a": 2})
    job.stuck(1, "SIGKILL does not end it")
    _join(job, 0, seconds=100.0)
    assert not job.ended and len(job.state.processes) == 2 and list(job.ranks) == [0]
    job.exit(1, 137)
    job.consider(2.0)
    assert len(job.state.processes) == 3


def test_process_that_hangs_at_its_start_is_given_up_after_the_timeout() -> None:
    job = DecidedJob({"a": 2}, 2, 1, 2, TIMEOUT)
    job.join(0, NEW)
    job.consider(TIMEOUT)
    assert not job.ended
    job.consider(0.1)
    assert job.ended == {1}
    assert any("it has sent no request for 600 s" in message for message in job.messages)


def test_process_that_has_responded_is_not_given_up_at_its_start() -> None:
    job = DecidedJob({"a": 2}, 2, 1, 2, TIMEOUT)
    job.failed(1, "", 0)  # any request
    job.consider(TIMEOUT + 1.0)
    assert job.ended == {0}


@pytest.mark.parametrize("verdict_seconds", [0.0, 2000.0])
def test_last_resort_is_later_than_any_verdict_of_a_watchdog(verdict_seconds: float) -> None:
    job = _start({"a": 2})
    status = replace(TRAINED, verdict_seconds=verdict_seconds)
    limit = max(900.0, verdict_seconds)
    _join(job, 0, status=status)
    job.consider(limit)
    assert not job.ended
    job.consider(0.1)
    assert job.ended == {1}
    assert any("have waited" in message and "for it" in message for message in job.messages)


def test_leaving_rank_has_30_seconds_from_the_removal_of_its_host() -> None:
    job = _start({"a": 1, "b": 1})
    _join(job, 0, seconds=40.0)
    _find(job, a=1)
    job.consider(30.0)
    assert not job.ended
    job.consider(0.1)
    assert job.ended == {1}


def test_excluded_process_that_does_not_end_is_signaled_once() -> None:
    job = _start({"a": 1, "b": 1})
    _find(job, a=1)
    assert _join(job, 0, 1)[1] == {"rank": -1}
    for seconds, ended in ((30.0, set()), (0.1, {1}), (100.0, {1})):
        job.consider(seconds)
        assert job.ended == ended


# --- processes that leave or join --------------------------------------------------


def test_newcomer_that_must_leave_causes_no_rendezvous() -> None:
    job = _start({"a": 2})
    _find(job, a=2, b=1)
    job.consider(0.0)
    assert job.join(2, NEW) is None
    _find(job, a=2)
    assert job.news(0) == {"stop": False, "hosts": False}
    job.consider(0.0)
    assert job.join(2, NEW) == {"rank": -1}, "it would wait for a generation that does not come"


def test_leaving_process_does_not_delay_newcomers() -> None:
    job = _start({"a": 1})
    _find(job, a=1, b=1, c=1)
    job.consider(0.0)
    job.join(1, NEW)
    job.consider(0.0)
    assert not job.news(0)["hosts"], "process 2 is starting, and joins in the same generation"
    _find(job, a=1, b=1)
    assert job.news(0)["hosts"]


def test_newcomers_wait_two_seconds_for_each_other() -> None:
    job = _start({"a": 1})
    _find(job, a=3)
    job.consider(0.0)
    job.join(1, NEW)
    job.consider(2.0)
    assert not job.news(0)["hosts"]
    job.consider(0.1)
    assert job.news(0)["hosts"]


def test_unfit_newcomer_causes_no_rendezvous() -> None:
    job = _start({"a": 1})
    _find(job, a=1, b=1)
    job.consider(0.0)
    job.join(1, replace(NEW, identity=replace(IDENTITY, device="cuda")))
    assert not job.news(0)["hosts"]
    job.consider(0.0)
    assert (job.join(1, NEW) or {})["reason"].startswith("on b: the device here is cuda")


def test_newcomer_with_the_gpu_of_another_process_is_refused() -> None:
    job = _start({"a": 1}, gpu="a GPU-1")
    _find(job, a=3)
    job.consider(0.0)
    new = replace(NEW, gpu="a GPU-1"), replace(NEW, gpu="a GPU-2")
    job.join(1, new[0])
    job.join(2, new[1])
    job.consider(2.1)
    reason = (job.join(1, new[0]) or {})["reason"]
    assert reason.startswith("on a: the GPU here (a GPU-1) is the GPU of process 0 on a: start one")
    job.exit(1, 1)
    _join(job, 0, status=replace(TRAINED, gpu="a GPU-1"))
    assert job.join(2, new[1]) == {"rank": 1, "size": 2}


def test_notice_of_a_leaving_process_retires_its_host() -> None:
    job = _start({"a": 1, "b": 2})
    _find(job, a=1, b=1)  # the slot of process 2 is gone
    job.leave(2, "notice")
    assert "b leaves: notice" in job.messages
    _find(job, a=1, b=2)
    assert _join(job, 0, 1, 2) == {0: {"rank": 0, "size": 1}, 1: {"rank": -1}, 2: {"rank": -1}}
    for number in (1, 2):
        job.exit(number, 0)
    job.consider(100.0)
    assert len(job.state.processes) == 3, "a process was started on a retired host"


def test_host_is_used_again_after_discovery_missed_it() -> None:
    job = _start({"a": 1, "b": 1})
    job.leave(1, "notice")
    _join(job, 0, 1)
    job.exit(1, 0)
    for slots, processes in ((1, 2), (0, 2), (1, 3)):
        _find(job, **{"a": 1, "b": slots} if slots else {"a": 1})
        job.consider(100.0)
        assert len(job.state.processes) == processes


def test_notice_does_not_bring_back_a_process_of_another_host() -> None:
    job = _start({"a": 1, "b": 2, "c": 1})
    _find(job, a=1, b=1, c=1)
    job.leave(3, "notice")
    assert [rank["rank"] for rank in _join(job, 0, 1, 2, 3).values()] == [0, 1, -1, -1]


def test_hosts_that_leave_do_not_keep_the_state() -> None:
    job = _start({"a": 1, "b": 1})
    _find(job, a=1)
    job.leave(0, "notice")
    assert job.news(0)["stop"]


def test_notice_holds_when_discovery_misses_the_host_once() -> None:
    job = _start({"a": 1, "b": 1})
    job.leave(1, "notice")
    del job.found["b"]
    job.discover()
    job.found["b"] = 1
    job.discover()
    assert job.news(0)["hosts"]
    assert _join(job, 0, 1)[1] == {"rank": -1}


def test_notice_of_the_last_host_with_the_state_stops_the_run() -> None:
    job = _start({"a": 2})
    _find(job, a=2, b=1)
    job.consider(0.0)
    job.join(2, NEW)
    job.leave(0, "notice")
    assert job.news(0)["stop"], "process 2 on b has no state"


def test_slot_of_an_unfit_process_is_used_again_when_the_hosts_change() -> None:
    job = _start({"a": 1})
    _find(job, a=1, b=1)
    job.consider(0.0)
    _join(job, 1, status=replace(NEW, identity=replace(IDENTITY, samples=99)))
    job.exit(1, 1)
    job.consider(5000.0)
    assert len(job.state.processes) == 2
    _find(job, a=1, b=1, c=1)
    job.consider(0.0)
    assert [p.host for p in job.state.processes[2:]] == ["b", "c"]


def test_run_that_stops_does_not_wait_for_hosts() -> None:
    job = _start({"a": 2}, min_np=2)
    job.state.stop_requested = True
    job.exit(1, 137)
    _join(job, 0)
    assert job.over and job.state.exit_code == 75


# --- generations ---------------------------------------------------------------------


def test_first_generation_forms_without_a_process_that_hangs() -> None:
    job = DecidedJob({"a": 2}, 2, 1, 2, TIMEOUT)
    job.consider(10.0)
    assert _join(job, 0, status=NEW)[0] is None
    job.failed(1, "", 0)  # it has sent a request
    job.consider(TIMEOUT - 11.0)
    assert not job.formed, "process 1 may still come"
    job.consider(1.0)
    assert job.ranks == {0: 0}


def test_first_generation_does_not_wait_for_processes_that_keep_dying() -> None:
    job = DecidedJob({"a": 2}, 2, 2, 2, TIMEOUT)
    job.join(0, NEW)
    for seconds in (0.0, 300.0):
        job.consider(seconds)
        (starting,) = job.state.alive("starting")
        job.exit(starting.number, 137)
        job.consider(0.0)
        job.consider(1.0)
    job.consider(TIMEOUT - 302.0)
    assert not job.over
    job.consider(1.1)
    assert job.state.alive("starting") and job.over


def test_rank_0_stays_with_the_process_that_trained_first() -> None:
    job = _start({"a": 3})
    for number in (0, 1):
        job.exit(number, 137)
    _join(job, 2)
    job.consider(1.0)
    job.join(4, NEW)
    _join(job, 2)
    job.join(4, TRAINED)
    job.join(3, NEW)
    for _ in range(2):
        _join(job, 2, 4)
        assert job.ranks == {2: 0, 4: 1, 3: 2}
        job.join(3, TRAINED)
        job.join(3, TRAINED)


def test_no_more_processes_than_max_np_are_started() -> None:
    assert len(DecidedJob({"a": 4}, 4, 1, 2, TIMEOUT).state.processes) == 2


def test_spare_learns_its_role_although_an_answer_is_lost() -> None:
    job = _start({"a": 2, "b": 2}, replica_size=2)
    job.exit(1, 137)
    done = replace(TRAINED, replica_size=2, failed=TRAINING)
    for number, shard, reachable in ((0, 0, 6), (2, 0, 6), (3, 1, 6)):
        job.join(number, replace(done, shard=shard, reachable_step=reachable))
    job.consider(0.0)
    assert job.ranks == {2: 0, 3: 1}
    assert job.join(0, done) == SPARE  # this answer is lost, and the process asks again
    assert job.join(0, replace(done, shard=0, reachable_step=6)) == SPARE
    status = job.state.processes[0].status
    assert status is not None and (status.reachable_step, status.failed) == (5, None)
    # The answer is lost, and a generation is formed before the process asks again.
    job.consider(2.0)
    job.join(4, replace(NEW, replica_size=2))
    later = replace(TRAINED, step=9, reachable_step=9, replica_size=2)
    for number in (2, 3):
        job.join(number, later)  # the answer of the last generation
        job.join(number, replace(later, shard=number - 2))
    job.consider(0.0)
    assert sorted(job.ranks) == [0, 2, 3, 4]
    assert (job.join(0, done) or {})["spare"] is True
    assert "spare" not in (job.join(2, later) or {})
    job.consider(0.0)
    for number in (0, 2, 3, 4):
        job.join(number, later)  # the answers of this generation
    got = _join(job, 0, 2, 3, 4, status=later)
    assert all(ranks["size"] == 4 and "spare" not in ranks for ranks in got.values())


def test_job_fails_when_ranks_are_missing_for_the_timeout() -> None:
    job = _start({"a": 2}, min_np=2)
    _find(job, a=1)
    job.exit(1, 137)
    _join(job, 0)
    assert job.messages.count("1 rank is left and 2 are needed (--min-np): waiting for hosts") == 1
    job.consider(TIMEOUT)
    assert not job.over
    job.consider(0.1)
    assert job.over and job.state.exit_code == 1
    assert job.messages[-1].startswith("error: fewer than 2 ranks for 600 s (--min-np, ")


@pytest.mark.parametrize(
    ("min_np", "left", "message"),
    [
        (1, 1, "1 rank is left and 2 are needed (a replica of the model): waiting for hosts"),
        (3, 3, "3 ranks are left and 3 are needed (--min-np): waiting for hosts"),
    ],
)
def test_job_waits_for_whole_replicas(min_np: int, left: int, message: str) -> None:
    job = _start({"a": 4}, min_np=min_np, replica_size=2)
    for dead in range(left, 4):
        job.exit(dead, 137)
    status = replace(TRAINED, replica_size=2, shard=0)
    assert _join(job, *range(left), status=status) == dict.fromkeys(range(left))
    assert message in job.messages


def test_wait_for_ranks_starts_again_after_each_generation() -> None:
    job = _start({"a": 2}, min_np=2)
    for last in (2, 3):
        _find(job, a=1)
        job.exit(last - 1, 137)
        _join(job, 0)
        _find(job, a=2)
        job.consider(TIMEOUT - 10.0)
        assert len(_join(job, last)) == 1 and sorted(job.ranks) == [0, last]
        job.join(0, TRAINED)
    assert not job.over


@pytest.mark.parametrize("limit", [0, 2])
def test_job_fails_after_more_failures_than_the_reset_limit(limit: int) -> None:
    job = _start({"a": 4})
    job.state.reset_limit = limit
    for dead in range(limit):
        job.exit(dead, 137)
        _join(job, *range(dead + 1, 4))
    _join(job, *range(limit, 4))
    assert not job.over, "no rank died in the last generation"
    job.exit(limit, 137)
    _join(job, *range(limit + 1, 4))
    assert job.over
    assert job.messages[-1] == f"error: ranks failed more than {limit} times (--reset-limit)"


@pytest.mark.parametrize("phase", [STATE_TRANSFER, RENDEZVOUS])
def test_failed_generation_counts_for_its_newcomers(phase: str) -> None:
    job = _start({"a": 2})
    _find(job, a=2, b=1)
    job.consider(0.0)
    job.join(2, NEW)
    for _ in range(2):
        assert sorted(_join(job, 0, 1)) == [0, 1] and sorted(job.ranks) == [0, 1, 2]
        job.join(2, NEW)
        for number in (0, 1):
            job.join(number, replace(TRAINED, failed=phase))
        job.join(2, replace(NEW, failed=phase))
        job.consider(0.0)
    reason = "2 transfers of the run's state failed"
    assert job.join(2, NEW) == {"rank": -1, "reason": reason}
    assert any(f"({reason}); its slot is used again in 60 s" in m for m in job.messages)


def test_death_in_a_state_transfer_does_not_count_for_newcomers() -> None:
    job = _start({"a": 2})
    _find(job, a=2, b=1)
    job.consider(0.0)
    job.join(2, NEW)
    _join(job, 0, 1)
    job.join(2, NEW)
    job.exit(1, 137)
    job.join(2, replace(NEW, failed=STATE_TRANSFER))
    _join(job, 0, status=replace(TRAINED, failed=STATE_TRANSFER))
    assert sorted(job.ranks) == [0, 2]
    assert job.state.processes[2].transfers_failed == 0


def test_failed_rendezvous_of_the_first_generation_refuses_no_process() -> None:
    job = _start({"a": 2})
    for _ in range(3):
        got = _join(job, 0, 1, status=replace(NEW, failed=RENDEZVOUS))
        assert sorted(ranks["rank"] for ranks in got.values()) == [0, 1]


def _part(job: DecidedJob, unreachable: dict[int, str], **status: Any) -> None:
    """The rendezvous fails; a process cannot reach the host that `unreachable` has for it."""
    failed = replace(TRAINED, failed=RENDEZVOUS, **status)
    for number in range(len(job.ranks)):
        hosts = tuple(filter(None, [unreachable.get(number)]))
        job.join(number, replace(failed, unreachable=hosts))
    job.consider(0.0)


@pytest.mark.parametrize(
    ("unreachable", "left_out", "lines"),
    [
        ({0: "b", 1: "a"}, [1], ["b and a"]),  # the younger one of two hosts
        ({1: "a"}, [1], ["b and a"]),  # one direction
        ({2: "b"}, [1], ["b and c"]),  # the one with fewer ranks
        ({0: "c", 1: "c"}, [2, 3], ["c and a and b"]),  # the one that two hosts cannot reach
        ({0: "b", 1: "c"}, [1], ["b and a and c"]),
        ({0: "b", 1: "c", 2: "a"}, [0, 1], ["a and c", "b and a and c"]),
    ],
)
def test_one_host_of_each_two_that_are_parted_is_left_out(
    unreachable: dict[int, str], left_out: list[int], lines: list[str]
) -> None:
    job = _start({"a": 1, "b": 1, "c": 2})
    _part(job, unreachable)
    stay = [number for number in range(4) if number not in left_out]
    assert sorted(job.ranks) == stay
    refused = [number for number in range(4) if "reason" in (job.join(number, TRAINED) or {})]
    assert refused == left_out
    assert [line for line in job.messages if "is left out" in line] == [
        f"{line} cannot reach each other: {line[0]} is left out and tried again in 60 s"
        for line in lines
    ]


def test_parted_hosts_stay_if_the_run_cannot_go_on_without_one() -> None:
    job = _start({"a": 1, "b": 1, "c": 1}, min_np=3)
    _part(job, {0: "b"})
    assert sorted(job.ranks) == [0, 1, 2]
    job = _start({"a": 1, "b": 1}, replica_size=1)
    holder = replace(TRAINED, failed=RENDEZVOUS, unreachable=("a",))
    job.join(0, replace(NEW, failed=RENDEZVOUS))
    _join(job, 1, status=holder)
    assert sorted(job.ranks) == [1], "the host that has the state of the run stays"


def test_free_slots_of_other_hosts_replace_a_host_that_is_left_out() -> None:
    job = DecidedJob({"a": 1, "b": 1, "c": 1}, 2, 2, 2, TIMEOUT)
    _join(job, 0, 1, status=NEW)
    _part(job, {0: "b"})
    for number in range(2):
        job.join(number, TRAINED)
    job.exit(1, 1)
    job.consider(0.0)
    assert [process.host for process in job.state.processes] == ["a", "b", "c"]
    _join(job, 2, status=NEW)
    assert sorted(job.ranks) == [0, 2]


def test_host_that_was_left_out_is_tried_again() -> None:
    job = _start({"a": 1, "b": 1, "c": 1})
    _part(job, {0: "b"})
    for number in range(3):
        job.join(number, TRAINED)
    job.exit(1, 1)
    job.consider(59.0)
    assert len(job.state.processes) == 3
    job.consider(1.0)
    assert job.state.processes[3].host == "b"
    job.join(3, NEW)
    _join(job, 0, 2)
    assert sorted(job.ranks) == [0, 2, 3]


def test_hosts_that_join_later_are_not_refused_on_old_evidence() -> None:
    job = DecidedJob({"a": 1, "b": 1, "c": 1}, 2, 2, 2, TIMEOUT)
    _join(job, 0, 1, status=NEW)
    _part(job, {0: "b"})
    job.join(1, TRAINED)
    job.exit(1, 1)
    job.consider(0.0)
    job.exit(2, 1)
    job.consider(60.0)
    assert [process.host for process in job.state.processes] == ["a", "b", "c", "b"]
    _join(job, 3, status=NEW)
    assert sorted(job.ranks) == [0, 3]


def test_halves_of_a_thousand_parted_hosts_are_separated_at_once() -> None:
    hosts = [f"host{number:03}" for number in range(1000)]
    job = _start(dict.fromkeys(hosts, 1), min_np=2)
    failed = replace(TRAINED, failed=RENDEZVOUS)
    for number in range(len(hosts)):
        others = hosts[500:] if number < 500 else hosts[:500]
        job.join(number, replace(failed, unreachable=tuple(others)))
    began = time.process_time()
    refused = decide(job.state, 0.0)
    assert time.process_time() - began < 10.0
    assert [action.number for action in refused] == [*range(500, 1000)]
    assert "host000 and host001 and host002 and 497 other hosts cannot" in refused[0].message


def test_death_of_a_starting_process_is_not_a_failure_of_a_generation() -> None:
    job = _start({"a": 1})
    job.state.reset_limit = 0
    _find(job, a=3)
    job.consider(0.0)
    job.exit(1, 137)
    job.fall_silent(2)
    job.stuck(2, "SIGKILL does not end it")
    _join(job, 0)
    assert not job.over


def test_failed_step_ends_the_job_at_the_fifth_failure_in_a_row() -> None:
    job = _start({"a": 2})
    failed = replace(TRAINED, failed=TRAINING, message="no route to host")
    for times in range(1, 6):
        assert not job.over, times
        job.join(1, replace(failed, step=4))
        _join(job, 0, 1, status=failed)
    assert job.over and job.messages[-1] == "error: step 6 failed 5 times: no route to host"


def test_failed_rendezvous_does_not_end_the_job() -> None:
    job = _start({"a": 2})
    for _ in range(9):
        _join(job, 0, 1, status=replace(TRAINED, failed=RENDEZVOUS))
    assert not job.over


# --- the end of the job ---------------------------------------------------------------


def test_processes_that_outlive_an_agreed_end_are_killed() -> None:
    job = _start({"a": 2})
    job.exit(0, 3)
    job.consider(30.0)
    assert not job.over
    job.consider(0.1)
    assert job.state.killed_since is not None and not job.state.over
    job.consider(30.0)
    assert not job.state.over
    job.consider(0.1)
    assert job.result == 3


def test_rank_with_an_error_of_its_own_does_not_end_the_job() -> None:
    job = _start({"a": 2})
    job.failed(1, "UserError: no such file", 6)
    job.exit(1, 2)
    assert not job.state.ending and job.state.rank_lost


def test_survivors_are_notified_when_a_leaving_rank_dies() -> None:
    job = _start({"a": 1, "b": 1})
    _find(job, a=1)
    job.exit(1, 137)
    assert decide(job.state, job.now) == [EndGeneration(0)]
    assert not job.state.failed, "the removal of its host counted as a failure"


def test_end_of_a_leaving_rank_does_not_end_the_job() -> None:
    job = _start({"a": 1, "b": 1})
    _find(job, a=1)
    job.exit(1, 0)
    assert not job.state.ending


@pytest.mark.parametrize("hosts", [{"a": 2}, {}])
def test_death_of_all_ranks_ends_the_job(hosts: dict[str, int]) -> None:
    job = _start({"a": 2})
    _find(job, **hosts)
    for number in (0, 1):
        job.exit(number, 137)
    job.consider(0.0)
    assert job.state.over and job.result == (137 if hosts else 1)


def test_killed_process_is_not_reported_as_a_loss() -> None:
    job = _start({"a": 2})
    job.state.killed(job.now, 130)
    said = [*job.messages]
    for number in (0, 1):
        job.exit(number, 143)
    job.consider(0.0)
    assert job.messages[len(said) :] == ["", ""] and job.result == 130


def test_first_exit_code_of_an_agreed_end_is_reported() -> None:
    job = _start({"a": 3})
    for number, code in enumerate((3, 143, 0)):
        job.exit(number, code)
    job.state.killed(job.now, 130)
    job.consider(0.0)
    assert job.result == 3


def test_process_that_fails_to_start_does_not_fail_a_job_that_ends() -> None:
    job = _start({"a": 1})
    _find(job, a=1, b=1)
    job.consider(0.0)
    job.exit(0, 0)
    job.exit(1, 255)
    job.consider(0.0)
    assert job.state.over and job.result == 0


def test_time_limits_of_the_end_count_from_its_start() -> None:
    job = _start({"a": 3})
    job.exit(0, 0)
    job.consider(20.0)
    job.exit(1, 0)
    job.consider(10.1)
    assert job.over
    job.consider(20.0)
    job.state.killed(job.now, 130)
    job.consider(10.1)
    assert job.result == 130


def test_script_may_work_after_its_loop_unless_it_is_asked_to_stop() -> None:
    job = _start({"a": 2}, works_on=True)
    job.exit(1, 0)
    job.consider(3600.0)
    assert job.state.killed_since is None
    job.state.stop_requested = True
    job.consider(0.0)
    assert job.state.killed_since is not None


def test_loss_of_a_finished_rank_does_not_end_a_script_that_works_on() -> None:
    job = _start({"a": 3}, works_on=True)
    job.exit(2, 0)
    job.consider(3600.0)
    job.exit(1, 137)
    job.consider(3600.0)
    assert job.state.killed_since is None


def test_script_that_does_not_end_after_an_agreed_error_is_killed() -> None:
    job = _start({"a": 2}, works_on=True)
    job.exit(1, 2)
    job.consider(30.1)
    assert job.state.killed_since is not None


def test_process_that_outlives_the_end_of_the_job_fails_it() -> None:
    job = _start({"a": 2})
    job.exit(0, 0)
    for _ in range(2):
        job.consider(30.1)
    assert job.result == 1


def test_agreed_end_before_the_first_generation_takes_a_second() -> None:
    job = DecidedJob({"a": 2}, 2, 1, 2, TIMEOUT)
    job.exit(0, 2)  # both have the same mistake in their configuration
    job.consider(1.0)
    assert not job.over
    job.consider(0.1)
    assert job.over and job.state.exit_code == 2


def test_replaced_process_is_succeeded_although_the_others_are_gone() -> None:
    job = _start({"a": 2})
    job.replace(1, "it had shard 0 of the model")
    job.exit(0, 137)
    job.exit(1, 0)
    job.consider(0.0)
    assert not job.over and len(job.state.processes) == 3
    assert job.state.processes[2].slot == 1


def test_newcomer_with_a_final_exit_code_does_not_end_the_job() -> None:
    job = _start({"a": 1})
    _find(job, a=2)
    job.consider(0.0)
    job.exit(1, 2)
    job.consider(31.0)
    assert not job.over and not job.state.ending


# --- unchanged scripts of Horovod's elastic API -----------------------------------


def _start_script(hosts: dict[str, int]) -> DecidedJob:
    job = _start(hosts)
    job.state.horovod_script = True
    return job


def test_rank_of_a_script_may_work_after_the_others_have_ended() -> None:
    job = _start_script({"a": 2})
    job.exit(1, 0)
    job.consider(3600.0)
    assert not job.over
    job.exit(0, 0)
    job.consider(0.0)
    assert job.state.over and job.result == 0


def test_process_that_starts_at_the_end_of_a_script_is_killed() -> None:
    job = _start_script({"a": 2})
    _find(job, a=3)
    job.consider(0.0)
    for number in (0, 1):
        job.exit(number, 0)
    job.consider(30.1)
    assert job.state.killed_since is not None
    job.exit(2, 137)
    job.consider(0.0)
    assert job.result == 0


@pytest.mark.parametrize("code", [2, 3, 75])
def test_rank_of_a_script_ends_the_job_only_with_exit_code_0(code: int) -> None:
    job = _start_script({"a": 2})
    job.exit(1, code)
    assert not job.state.ending and job.state.rank_lost


@pytest.mark.parametrize("code", [7, 137])
def test_script_ends_when_no_process_has_its_state(code: int) -> None:
    job = _start_script({"a": 2})
    _find(job, a=3)
    job.consider(0.0)
    assert len(job.state.processes) == 3  # the third one has not requested its ranks
    for number in (0, 1):
        job.exit(number, code)
    job.consider(0.0)
    assert job.over and "no process that has the state" in job.messages[-1]
    job.exit(2, 143)
    job.consider(0.0)
    assert job.result == code


def _admit(job: DecidedJob, *holders: int, **hosts: int) -> None:
    """New processes on these hosts, after those that there are, begin a generation with holders."""
    first = len(job.state.processes)
    _find(job, **hosts)
    job.consider(10.0)
    for number in range(first, len(job.state.processes)):
        job.join(number, NEW)
    _join(job, *holders)
    for number in range(first, len(job.state.processes)):
        job.join(number, NEW)


def test_script_ends_when_its_state_dies_before_newcomers_have_it() -> None:
    job = _start_script({"a": 1})
    _admit(job, 0, a=2)
    assert job.ranks == {0: 0, 1: 1}
    job.exit(0, 137)
    job.consider(0.0)
    assert not job.over, "process 1 may have received the state"
    _join(job, 1, status=replace(NEW, failed=STATE_TRANSFER))
    assert job.over and job.state.exit_code == 137
    assert "no process that has the state" in job.messages[-1]


def test_newcomer_that_has_received_the_state_continues_the_script() -> None:
    job = _start_script({"a": 1})
    _admit(job, 0, a=2)
    job.exit(0, 137)
    _join(job, 1, status=replace(TRAINED, failed=TRAINING))
    assert job.ranks == {1: 0} and not job.over


def test_first_generation_of_a_script_may_fail_before_it_has_a_state() -> None:
    job = _start_script({"a": 2})
    job.exit(0, 137)
    _join(job, 1, status=replace(NEW, failed=STATE_TRANSFER))
    assert job.ranks == {1: 0} and not job.over


def test_leaving_rank_of_a_script_passes_its_state_to_newcomers_first() -> None:
    job = _start_script({"a": 2})
    _find(job, b=1)
    job.consider(0.0)
    job.join(2, NEW)
    assert _join(job, 0, 1) == {0: {"rank": 0, "size": 2}, 1: {"rank": -1}}
    job.join(2, NEW)
    assert job.ranks == {0: 0, 2: 1} and job.news(0)["hosts"]
    assert _join(job, 0, 2) == {0: {"rank": -1}, 2: {"rank": 0, "size": 1}}


def test_removed_rank_of_a_script_no_longer_keeps_its_state() -> None:
    job = _start_script({"a": 1})
    _admit(job, 0, a=1, b=1)
    _find(job, b=1)
    _join(job, 0, 1)
    assert job.ranks == {1: 0}
    _find(job, b=1, c=1)
    job.consider(10.0)
    job.join(2, NEW)
    job.exit(1, 137)
    job.consider(0.0)
    assert job.over and job.state.alive("removed")


def test_rank_0_of_a_script_has_its_state() -> None:
    job = _start_script({"a": 1})
    _admit(job, 0, a=2, b=1)
    job.exit(0, 137)
    _join(job, 1, status=replace(NEW, failed=STATE_TRANSFER))
    _join(job, 2, status=replace(TRAINED, failed=TRAINING))
    assert job.ranks == {2: 0, 1: 1}


def test_script_that_fails_before_each_commit_ends_with_its_exit_code() -> None:
    job = _start_script({"a": 2})
    failed = replace(TRAINED, failed=TRAINING)
    for times in range(1, 6):
        assert not job.over
        newest = len(job.state.processes) - 1
        job.exit(newest, 7)
        _join(job, 0, status=failed, seconds=1.0)
        job.consider(60.0)
        if times < 5:
            _join(job, 0, newest + 1)
            _join(job, newest + 1, status=NEW)
    assert job.state.exit_code == 7
    why = f"the next commit failed 5 times: process {newest} on a ended (exit code 7)"
    assert why in job.messages[-1]


def test_newcomer_that_exits_with_0_does_not_determine_the_exit_code() -> None:
    job = _start_script({"a": 2})
    _find(job, a=3)
    job.consider(0.0)
    job.exit(2, 0)
    job.state.failures.reason = "the next commit failed 5 times: a reason"
    job.consider(0.0)
    assert job.over and job.state.exit_code == 1


def test_last_loss_of_a_script_may_be_a_silent_process() -> None:
    job = _start_script({"a": 3})
    job.exit(2, 7)
    job.fall_silent(1)
    failed = replace(TRAINED, failed=TRAINING)
    _join(job, 0, status=failed)
    assert job.state.last_loss == (1, "process 1 on a was given up (fell silent)")


def test_ranks_of_a_script_wait_for_a_busy_one_however_long() -> None:
    job = _start_script({"a": 3})
    job.exit(2, 137)
    _join(job, 1, status=replace(TRAINED, failed=TRAINING, verdict_seconds=math.inf))
    job.consider(36_000.0)
    assert not job.ended and not job.over
    _join(job, 0)
    assert job.ranks == {0: 0, 1: 1}


def test_script_that_is_asked_to_stop_is_ended() -> None:
    job = _start_script({"a": 2})
    job.state.stop_requested = True
    job.consider(0.0)
    assert job.state.killed_since is not None and job.state.exit_code == 75


def test_script_that_is_asked_to_stop_ends_although_a_rank_has_finished() -> None:
    job = _start_script({"a": 2})
    job.exit(1, 0)
    job.consider(100.0)
    assert not job.over
    job.state.stop_requested = True
    job.consider(0.0)
    job.exit(0, 143)
    job.consider(0.0)
    assert job.result == 75


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_to_all_processes_of_a_script_is_a_request_to_stop(ranks: int) -> None:
    job = _start_script({"a": ranks})
    job.state.stop_requested = True
    for number in range(ranks):
        job.exit(number, 143)
    job.consider(0.0)
    assert job.result == 75


def test_job_fails_if_a_rank_cannot_finish_a_script_that_ended_in_another() -> None:
    job = SteppedDriver({"a": 2}, 2, 1, 3, TIMEOUT)
    try:
        job.state.horovod_script = True
        for number in (0, 1, 0, 1):
            job.join(number, NEW)
            job.consider(0.0)
        job.found = {"a": 3}
        job.discover()
        job.consider(0.0)
        job.join(2, NEW)
        job.exit(1, 0)
        assert job.join(2, NEW) == {"rank": -1}, "a newcomer has nothing to finish"
        job.exit(2, 0)
        reason = "the script has ended in another process, so this one cannot finish it"
        assert job.join(0, TRAINED) == {"rank": -1, "reason": reason}
        job.exit(0, 1)
        assert job.state.exit_code == 1
    finally:
        job.close()


@pytest.mark.parametrize("hosts", [{}, {"b": 1}])
def test_rank_of_a_script_may_finish_before_it_leaves(hosts: dict[str, int]) -> None:
    job = _start_script({"a": 1, **hosts})
    _find(job, **hosts)
    job.exit(0, 0)
    job.consider(0.0)
    assert job.state.ending
    if hosts:
        job.exit(1, 0)
        job.consider(0.0)
    assert job.result == 0


@pytest.mark.parametrize("code", [2, 3, 75])
def test_leaving_rank_of_a_script_agrees_only_with_exit_code_0(code: int) -> None:
    job = _start_script({"a": 1, "b": 1})
    _find(job, a=1)
    job.exit(1, code)
    assert job.state.rank_lost and not job.state.ending


# --- hosts that fail -------------------------------------------------------------


@pytest.mark.parametrize("continued", [False, True])
def test_driver_yields_only_if_a_lost_host_may_have_the_current_state(continued: bool) -> None:
    job = SteppedDriver({"a": 1, "b": 1}, 2, 1, 2, TIMEOUT)
    try:
        for number in (0, 1, 0, 1):
            job.join(number, NEW)
            job.consider(0.0)
        job.exit(1, 137)
        assert not job.driver.state_is_elsewhere({"b"}), "process 0 has the state"
        if continued:
            job.join(0, replace(TRAINED, failed=TRAINING))
            job.consider(0.0)
            job.join(0, TRAINED)
        job.exit(0, 7)
        assert job.driver.state_is_elsewhere({"b"}) == (not continued)
    finally:
        job.close()


def _causes(job: DecidedJob) -> list[tuple[str, str]]:
    return [(host, cause) for host, cause, _ in job.state.incidents]


def test_killed_silent_and_stuck_ranks_count_against_their_host() -> None:
    job = _start({"a": 1, "b": 1, "c": 1, "d": 1})
    job.exit(1, 137)
    job.fall_silent(2)
    job.stuck(3, "SIGKILL does not end it")
    assert _causes(job) == [("b", "killed"), ("c", "silent"), ("d", "stuck")]
    job.exit(2, 137)  # ended by the driver
    assert len(job.state.incidents) == 3


@pytest.mark.parametrize("code", [1, 2, 75, 143, 255])
def test_other_ends_do_not_count_against_the_host(code: int) -> None:
    job = _start({"a": 2, "b": 1})
    job.failed(2, "ValueError: a bad sample", 5) if code == 1 else None
    job.exit(2, code)
    assert not _causes(job)


def test_processes_that_the_driver_ends_do_not_count_against_their_host() -> None:
    job = _start({"a": 2, "b": 1})
    job.state.stop_requested = True
    job.exit(2, 137)  # for example by the scheduler, whose patience has ended
    job.state.killed(job.now)
    job.exit(1, 137)
    leaving = _start({"a": 2, "b": 1})
    _find(leaving, a=2)
    leaving.exit(2, 137)
    assert not _causes(job) and not _causes(leaving)


def _suspect_host(hosts: dict[str, int], min_np: int = 1) -> DecidedJob:
    """A job that trains on 4 of its slots, at most, and whose host b has become suspect."""
    job = DecidedJob(hosts, 4, min_np, 4, TIMEOUT)
    _join(job, *range(4), status=NEW)
    assert [job.formed[-1].hosts[rank] for rank in range(4)] == ["a", "a", "b", "b"]
    job.state.suspects = {"b": 2.0}
    return job


def _hosts_of_processes(job: DecidedJob) -> list[str]:
    return [process.host for process in job.state.alive()]


def test_no_process_starts_on_a_suspect_host_while_others_suffice() -> None:
    job = _suspect_host({"a": 2, "b": 2, "c": 2})
    job.exit(2, 137)
    _join(job, 0, 1, 3, seconds=5.0)
    assert _hosts_of_processes(job) == ["a", "a", "b", "c"], "a healthy rank stays"
    job.exit(3, 137)
    _join(job, 0, 1, seconds=5.0)
    assert _hosts_of_processes(job) == ["a", "a", "c", "c"]


def test_suspect_host_is_used_if_its_slots_are_needed() -> None:
    job = _suspect_host({"a": 2, "b": 2})
    job.exit(3, 137)
    _join(job, 0, 1, 2, seconds=5.0)
    assert _hosts_of_processes(job) == ["a", "a", "b", "b"]


def test_suspect_host_is_used_while_other_hosts_cannot_reach_min_np() -> None:
    job = _suspect_host({"a": 2, "b": 2, "c": 2}, min_np=4)
    for number in (1, 2, 3):
        job.exit(number, 137)
    job.state.slots.refused(job.state.processes[1], for_good=True, now=job.now)
    _join(job, 0, seconds=5.0)
    assert _hosts_of_processes(job) == ["a", "c", "c", "b"]


def test_host_that_leaves_for_a_wrong_gradient_is_recorded() -> None:
    job = _start({"a": 1, "b": 1, "c": 1})
    job.state.host_leaves(job.state.processes[1], "a wrong gradient", job.now, WRONG)
    job.state.host_leaves(job.state.processes[2], "a notice", job.now, "no such cause")
    assert _causes(job) == [("b", WRONG)]
