"""Records of hosts: causes, decay, avoided hosts, and files."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.doctor import records
from hvdtrain.doctor.runs import diagnose
from hvdtrain.elastic.watchdog import Clock, HangDetector
from hvdtrain.run_files import host_records
from hvdtrain.run_files.host_records import (
    CAUSES,
    CRASHED,
    DIRECTORY,
    FILE,
    FLIPPED,
    GPU,
    HUNG,
    KILLED,
    SILENT,
    SLOW,
    STUCK,
    SUSPECT,
    THROTTLED,
    WRONG,
    HostRecords,
    Incident,
    avoided,
    cause_of_end,
    exclusion,
    host_key,
    known_incidents,
    read_incidents,
    score,
    suspects,
)
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.supervise import host_evidence
from tests.support.history import History

NOW = 1_800_000_000.0
DAY = 24 * 3600.0
TIMES = st.floats(NOW - 20 * DAY, NOW)
INCIDENTS = st.lists(
    st.builds(Incident, st.sampled_from("abcd"), st.sampled_from(sorted(CAUSES)), TIMES),
    max_size=30,
)
SLOTS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 8), min_size=1)


# --- causes


@pytest.mark.parametrize(
    ("code", "report", "cause"),
    [
        (0, "", None),
        (1, "", None),
        (1, "ValueError: a bad sample", None),
        (2, "", None),
        (3, "", None),
        (75, "", None),
        (255, "", None),  # ssh lost its connection: silence is recorded separately
        (-15, "", None),
        (143, "", None),
        (138, "", None),  # SIGUSR1
        (134, "", None),  # abort(): NCCL and Gloo end ranks that have lost another one
        (-9, "", KILLED),
        (137, "", KILLED),
        (137, "ValueError: a bad sample", None),
        (-11, "", CRASHED),
        (135, "", CRASHED),
        (1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", KILLED),
        (1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", GPU),
        (1, "RuntimeError: CUDA error: an illegal memory access was encountered", None),
        (1, "CUDA out of memory", None),
    ],
)
def test_only_ends_that_the_host_may_cause_count(code: int, report: str, cause: str | None) -> None:
    assert cause_of_end(code, report) == cause


@pytest.mark.parametrize(
    ("situation", "cause"),
    [("idle", HUNG), ("busy", HUNG), ("stopped", None), ("orphan", None), ("cut off", None)],
)
def test_kill_by_the_watchdog_counts_if_the_rank_hung(situation: str, cause: str | None) -> None:
    detector, verdict, look = HangDetector(2, lambda: situation != "cut off"), None, 0
    activity = Activity.RENDEZVOUS if situation == "cut off" else Activity.WORKING
    with patch.object(Clock, "look"):
        while verdict is None:
            look += 1
            detector._clock.now = look / 4
            work = 100 * look if situation == "busy" else 0
            verdict = detector.verdict(
                1, activity, work, situation == "stopped", situation == "orphan"
            )
    assert cause_of_end(137, f"killed by its watchdog: {verdict}") == cause


def test_one_incident_suffices_if_hardware_or_other_hosts_report_it() -> None:
    at_once = {cause for cause in CAUSES if _suspect(cause, 1)}
    assert at_once == {GPU, STUCK, WRONG}
    assert {cause for cause in CAUSES if _suspect(cause, 2)} == {
        *(GPU, STUCK, WRONG, KILLED, HUNG, SILENT, FLIPPED)
    }
    assert {cause for cause in CAUSES if not _suspect(cause, 3)} == set(), (CRASHED, SLOW)
    assert not _suspect(THROTTLED, 2)


def _suspect(cause: str, times: int) -> bool:
    return bool(suspects(["a", "b"], [Incident("a", cause, NOW)] * times, NOW))


# --- decay


@given(INCIDENTS, st.floats(0, 30 * DAY))
def test_score_halves_every_day(incidents: list[Incident], seconds: float) -> None:
    later = score(incidents, NOW + seconds)
    assert math.isclose(later, score(incidents, NOW) * 2 ** (-seconds / DAY), abs_tol=1e-9)


@given(INCIDENTS, INCIDENTS)
def test_score_is_the_sum_over_incidents(one: list[Incident], other: list[Incident]) -> None:
    assert math.isclose(
        score([*one, *other], NOW), score(one, NOW) + score(other, NOW), abs_tol=1e-9
    )


@given(st.sampled_from(sorted(CAUSES)), st.floats(0, 1e6))
def test_clock_ahead_of_ours_adds_at_most_the_weight(cause: str, ahead: float) -> None:
    assert score([Incident("a", cause, NOW + ahead)], NOW) == CAUSES[cause].weight


@given(INCIDENTS)
def test_every_host_is_forgiven_in_the_end(incidents: list[Incident]) -> None:
    assert not suspects("abcd", incidents, NOW + 30 * DAY)


@given(INCIDENTS)
def test_suspect_hosts_stand_out_and_are_sorted(incidents: list[Incident]) -> None:
    found = suspects("abcd", incidents, NOW)
    assert all(first >= second for first, second in pairwise(found.values()))
    least = min(score([i for i in incidents if i.host == h], NOW) for h in "abcd")
    assert all(one >= SUSPECT and one > 2 * least for one in found.values())


def test_cause_that_all_hosts_share_makes_none_suspect() -> None:
    incidents = [Incident(host, KILLED, NOW) for host in "abcd" for _ in range(5)]
    assert suspects("abcd", incidents, NOW) == {}
    assert list(suspects("abcde", [*incidents, *[incidents[0]] * 10], NOW)) == ["a"]


def test_names_of_a_host_mean_the_same_host() -> None:
    assert host_key("Node1.cluster.org") == host_key("node1") == "node1"
    assert host_key("10.0.0.7") != host_key("10.0.0.8")
    assert host_key("fe80::1") == "fe80::1"
    assert list(suspects(["node1.x"], [Incident("node1", GPU, NOW)], NOW)) == ["node1.x"]


# --- choice


@given(SLOTS, st.data())
def test_avoided_hosts_never_take_needed_slots(slots: dict[str, int], data: st.DataObject) -> None:
    names, total = sorted(slots), sum(slots.values())
    bad = data.draw(st.lists(st.sampled_from(names), unique=True))
    suspect = {host: float(9 - place) for place, host in enumerate(bad)}
    min_np = data.draw(st.integers(1, total))
    max_np = data.draw(st.sampled_from([sys.maxsize, *range(min_np, total + 3)]))
    found = avoided(slots, suspect, min_np, max_np)
    left = total - sum(slots[host] for host in found)
    assert set(found) <= set(bad)
    if found:
        assert left >= min_np
        assert left >= (total / 2 if max_np == sys.maxsize else max_np)
    enough = max(min_np, (total + 1) // 2) if max_np == sys.maxsize else max_np
    for host in set(bad) - set(found):
        assert left - slots[host] < enough, "a suspect host is used although others suffice"


def test_the_most_suspect_host_is_avoided_first() -> None:
    slots = {"a": 2, "b": 2, "c": 2}
    assert avoided(slots, {"c": 5.0, "b": 2.0}, 1, 4) == ["c"]
    assert avoided(slots, {"c": 5.0, "b": 2.0}, 1, 2) == ["c", "b"]
    assert avoided(slots, {"c": 5.0, "b": 2.0}, 1, 6) == []
    assert avoided(slots, {"c": 5.0}, 1, sys.maxsize) == ["c"]
    assert avoided(slots, {"c": 5.0}, 6, sys.maxsize) == []


def test_excluded_nodes_are_named_for_sbatch_under_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert exclusion(["a", "b"]) == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert (exclusion(["a", "b"]), exclusion([])) == ("--exclude=a,b", "")


# --- files


def _records(run: Path, said: list[str] | None = None) -> HostRecords:
    run.mkdir(parents=True, exist_ok=True)
    found = HostRecords(run, [].append if said is None else said.append)
    found.load()
    return found


def test_next_run_of_the_root_knows_what_was_recorded(tmp_path: Path) -> None:
    first = _records(tmp_path / "one")
    first.add("node2.cluster", KILLED, "process 3\x1b[2J")
    first.add("node2", SILENT)
    first.flush(10)
    second = _records(tmp_path / "two")
    assert list(second.suspects(["node1", "node2"])) == ["node2"]
    assert {one.detail for one in second.incidents()} == {"process 3\\x1b[2J", ""}
    assert "rank killed from outside, or out of memory (" in second.summary("node2")
    written = read_incidents(tmp_path / "one" / FILE)
    assert set(written) == set(read_incidents(tmp_path / DIRECTORY / "one.json"))


def test_ranks_that_end_together_are_one_incident(tmp_path: Path) -> None:
    run = _records(tmp_path / "one")
    for _ in range(8):
        run.add("node2", KILLED)
    assert len(run.incidents()) == 1


def test_start_keeps_the_incidents_of_earlier_starts(tmp_path: Path) -> None:
    with patch.object(host_records, "_SAME_SECONDS", 0.0):
        for _ in range(3):
            records_of_start = _records(tmp_path / "one")
            records_of_start.add("node2", KILLED)
            records_of_start.flush(10)
    assert len(read_incidents(tmp_path / "one" / FILE)) == 3


WRITER = """
import sys, time
from pathlib import Path
from hvdtrain.run_files import host_records
host_records._SAME_SECONDS = 0.0
run = Path(sys.argv[1]); run.mkdir()
records = host_records.HostRecords(run, print)
records.load()
for _ in range(40):
    records.add(sys.argv[2], "killed")
    records.flush(10)
    assert host_records.known_incidents(run.parent)
"""


def test_runs_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / f"run{n}"), f"host{n}"])
        for n in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    found = known_incidents(tmp_path)
    assert {host: sum(one.host == host for one in found) for host in ("host0", "host3")} == {
        "host0": 40,
        "host3": 40,
    }
    assert not list((tmp_path / DIRECTORY).glob("*.tmp"))


def test_files_stay_small_and_old_ones_are_removed(tmp_path: Path) -> None:
    old = tmp_path / DIRECTORY / "old.json"
    old.parent.mkdir()
    old.write_text("{}")
    os.utime(old, (0, 0))
    with patch.object(host_records, "_SAME_SECONDS", 0.0):
        run = _records(tmp_path / "one")
        for _ in range(500):
            run.add("node2", KILLED, "x" * 10_000)
    run.flush(10)
    assert len(read_incidents(tmp_path / "one" / FILE)) == 200
    assert (tmp_path / "one" / FILE).stat().st_size < host_records._BYTES
    assert [path.name for path in old.parent.iterdir()] == ["one.json"]


@pytest.mark.parametrize("obstacle", ["no directory", "link", "no run directory"])
def test_disk_that_cannot_be_written_is_reported_once(tmp_path: Path, obstacle: str) -> None:
    said: list[str] = []
    run = _records(tmp_path / "root" / "one", said)
    if obstacle == "no directory":
        (tmp_path / "root" / DIRECTORY).write_text("")
    elif obstacle == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "root" / DIRECTORY).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "root" / "one").rmdir()
    for host in ("node1", "node2"):
        run.add(host, GPU)
        run.flush(10)
    [message] = said
    assert message.startswith("host records cannot be written (")
    assert len(run.suspects(["node1", "node3"])) == 1, "this run still knows it"


def test_disk_that_does_not_respond_delays_nothing(tmp_path: Path) -> None:
    run = _records(tmp_path / "one")
    with patch.object(host_records, "write_atomic", lambda *a, **k: time.sleep(3)):
        began = time.monotonic()
        for host in ("node1", "node2", "node3"):
            run.add(host, GPU)
        assert len(run.suspects(["node1", "node4"])) == 1
        assert time.monotonic() - began < 1
        run.flush(0.1)
        assert time.monotonic() - began < 2


def _entry(**changes: object) -> dict[str, object]:
    return {"host": "node2", "cause": KILLED, "time": "NOW", "detail": ""} | changes


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"incidents": 7}',
        '{"incidents": [7, null, [], {}]}',
        "[" * 100_000,
        "\0" * 100,
        " " * 300_000 + json.dumps({"incidents": [_entry()]}),
        *(
            json.dumps({"incidents": [_entry(**changes)]})
            for changes in (
                {"host": 7},
                {"cause": "disliked"},
                {"cause": ["killed"]},
                {"time": "now"},
                {"time": math.inf},
                {"time": math.nan},
                {"time": 10**400},
                {"time": 1e11},
                {"time": 0.0},
                {"detail": {}},
            )
        ),
    ],
)
def test_invalid_records_are_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / DIRECTORY).mkdir()
    valid = json.dumps({"incidents": [_entry()]})
    for name, text in (("one", content), ("two", valid)):
        text = text.replace('"NOW"', str(time.time() - 9))
        (tmp_path / DIRECTORY / f"{name}.json").write_text(text)
    os.mkfifo(tmp_path / DIRECTORY / "pipe.json")
    [found] = known_incidents(tmp_path)
    assert found == read_incidents(tmp_path / DIRECTORY / "two.json")[0]


# --- what a supervised start shows


OPEN_MPI_4 = """--------------------------------------------------------------------------
mpirun noticed that process rank 1 with PID 0 on node node2 exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
OPEN_MPI_5 = """--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 17340 on node node2 exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
MPICH = """===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 17298 RUNNING AT node2
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
"""
EXITED = """--------------------------------------------------------------------------
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[20170,1],1]
  Exit code:    1
--------------------------------------------------------------------------
"""


@pytest.mark.parametrize("output", [OPEN_MPI_4, OPEN_MPI_5, MPICH])
def test_host_of_a_killed_rank_is_found_in_the_output(tmp_path: Path, output: str) -> None:
    [(host, cause, _)] = host_evidence.of_failure(tmp_path, 0.0, f"text\n{output}text\n")
    assert (host, cause) == ("node2", KILLED)
    terminated = output.replace("signal 9 (Killed)", "signal 15 (Terminated)")
    terminated = terminated.replace("Killed (signal 9)", "Terminated (signal 15)")
    assert host_evidence.of_failure(tmp_path, 0.0, terminated) == []


def test_ranks_that_raise_an_error_are_no_evidence(tmp_path: Path) -> None:
    assert host_evidence.of_failure(tmp_path, 0.0, EXITED) == []


def test_rank_killed_by_its_watchdog_is_a_hang(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    report = "\n2030-01-01 10:00:00 killed by its watchdog: {}, while WORKING\nthread 1\n"
    hung, stopped = logs / "hang_node2_0.txt", logs / "hang_node_1_3.txt"
    hung.write_text(report.format("no progress, no work for 60 s"))
    stopped.write_text(report.format("stopped for 1 s"))
    [found] = host_evidence.of_failure(tmp_path, 0.0, OPEN_MPI_4)
    assert (found.host, found.cause) == ("node2", HUNG)
    with hung.open("a") as file:  # its replacement was stuck, and went on
        file.write("\n2030-01-01 11:00:00 no progress, no work for 15 s, while WORKING\nthread 1\n")
    [found] = host_evidence.of_failure(tmp_path, 0.0, OPEN_MPI_4)
    assert found.cause == HUNG
    later = time.mktime((2030, 1, 1, 10, 30, 0, 0, 0, -1))  # the kill is of an earlier start
    os.utime(hung, (later + 60, later + 60))
    [found] = host_evidence.of_failure(tmp_path, later, OPEN_MPI_4)
    assert (found.host, found.cause) == ("node2", KILLED)


def test_slow_and_flipped_ranks_are_found_in_events(tmp_path: Path) -> None:
    straggler = {"event": "straggler", "rank": 3, "host": "node2", "score": 0.4, "time": NOW}
    events = [
        {"event": "start", "time": NOW, "hosts": {"node1": [0, 1], "node2": [2, 3]}},
        {**straggler, "phase": "compute", "time": NOW - 99},
        {**straggler, "phase": "data"},
        {**straggler, "phase": "compute", "stage": 1},
        {"event": "healed", "time": NOW, "step": 7, "ranks": [1, "2", 9]},
        {"event": "healed", "time": "now", "step": 7, "ranks": 3},
        {"event": "replay", "time": NOW, "step": 8, "verdict": "wrong", "hosts": 3},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events))
    found = host_evidence.in_files(tmp_path, NOW - 1)
    assert [(one.host, one.cause) for one in found] == [("node1", FLIPPED)]
    events.append({**straggler, "phase": "compute"})
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events))
    found = host_evidence.in_files(tmp_path, NOW - 1)
    assert {(one.host, one.cause) for one in found} == {("node1", FLIPPED), ("node2", SLOW)}


def test_wrong_gradients_are_found_in_events(tmp_path: Path) -> None:
    replay = {"event": "replay", "time": NOW, "step": 200}
    events = [
        {**replay, "verdict": "wrong", "hosts": ["node1"], "time": NOW - 99},
        {**replay, "verdict": "wrong", "hosts": ["node2", 7]},
        {**replay, "verdict": "transient", "hosts": ["node3"]},
        {**replay, "verdict": "undecided", "hosts": ["node3", "node4"]},
        {**replay, "verdict": "inexact", "hosts": []},
    ]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in events))
    found = {(one.host, one.cause) for one in host_evidence.in_files(tmp_path, NOW - 1)}
    assert found == {("node2", WRONG), ("node3", FLIPPED), ("node4", FLIPPED)}


def test_gpu_errors_are_found_in_logs(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank, message in enumerate(("CUDA error: uncorrectable ECC error", "CUDA out of memory")):
        line = {"time": NOW, "level": "error", "host": f"node{rank}", "message": message}
        (tmp_path / f"logs/rank_{rank:05d}.jsonl").write_text(json.dumps(line) + "\n")
    found = host_evidence.in_files(tmp_path, NOW - 1)
    assert [(one.host, one.cause) for one in found] == [("node0", GPU)]


# --- the doctor


FACTS = {"gpus": []}
BROKEN = {"gpus": [{"ecc.errors.uncorrected.volatile.total": "2"}]}


def test_doctor_shows_the_record_of_a_host(tmp_path: Path) -> None:
    with patch.object(host_records, "_SAME_SECONDS", 0.0):
        run = _records(tmp_path / "one")
        run.add("node2", KILLED)
        run.add("node2", KILLED)
        run.add("node3", SLOW)
    run.flush(10)
    facts = {"node1": FACTS, "node3": FACTS}
    found = records.check(tmp_path, ["node1", "node2", "node3"], facts, {})
    assert [(one.check, one.where) for one in found] == [
        ("host record", "node2"),
        ("host record", "node3"),
    ]
    assert "out of memory (2 times, the last 0 seconds ago)" in found[0].what
    assert "avoids it while other hosts suffice" in found[0].why
    assert "if it happens again" in found[1].why
    assert "sbatch --exclude=node2" in found[0].fix


def test_what_the_doctor_finds_is_avoided_until_it_is_fixed(tmp_path: Path) -> None:
    hosts = ["node1", "node2"]
    for _ in range(3):
        assert records.check(tmp_path, hosts, {"node1": FACTS, "node2": BROKEN}, {}) == []
    found = known_incidents(tmp_path)
    assert [(one.host, one.cause) for one in found] == [("node2", GPU)]
    assert list(suspects(hosts, found, time.time())) == ["node2"]
    assert records.check(tmp_path, hosts, {"node1": FACTS}, {})[0].where == "node2"
    assert records.check(tmp_path, hosts, dict.fromkeys(hosts, FACTS), {}) == []
    assert known_incidents(tmp_path) == set()


def test_doctor_reports_a_root_that_keeps_no_records(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).write_text("")
    [found] = records.check(tmp_path, ["node2"], {"node2": BROKEN}, {})
    assert found.where == str(tmp_path / DIRECTORY) and "cannot be recorded" in found.what


def test_doctor_of_a_run_shows_its_records(tmp_path: Path) -> None:
    history = History(tmp_path / "one")
    history.launch(2)
    history.steps(5)
    run = _records(tmp_path / "one")
    run.add("node1", KILLED)
    run.flush(10)
    found, _ = diagnose(tmp_path / "one")
    assert ("host record", "node1") in [(one.check, one.where) for one in found]
