"""`hvdtrain audit`: correct histories are clean, and every alteration is found."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.audit.lineage import check_order
from hvdtrain.audit.report import audit
from hvdtrain.data.order import ShuffledOrder
from hvdtrain.errors import UserError
from hvdtrain.report import run as report_run
from tests.support.history import SIZE, TOTAL, History
from tests.support.runs import TINY, start

Lines = list[dict[str, Any]]


@st.composite
def _histories(
    draw: st.DrawFn, off: Sequence[float] = (0.0,), every: Sequence[int] = (1, 1, 1, 4)
) -> Callable[[Path], History]:
    """Draw plans of runs with up to 6 generations; each is played into a directory.

    Args:
        off: range of clock differences in seconds.
        every: steps between lines of metrics.
    """
    log_every, save_every = draw(st.sampled_from(every)), draw(st.sampled_from([0, 3, 5]))
    eval_every = draw(st.sampled_from([0, 6]))
    plan = draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["kill", "torn", "preempted", "failure", "hosts", "back", "copies"]
                ),
                st.integers(1, 4),
                st.integers(0, 14),
            ),
            max_size=5,
        )
    )
    finished = draw(st.booleans())
    clocks = draw(st.lists(st.sampled_from(off), min_size=12, max_size=12))

    def play(directory: Path) -> History:
        history = History(directory, log_every, eval_every, save_every)
        history.off = clocks[0]
        history.launch(2)
        history.steps(draw(st.integers(0, 14)))
        for number, (how, ranks, steps) in enumerate(plan, start=1):
            history.off = clocks[2 * number]
            if how == "preempted":
                history.end(75)
            elif how in ("kill", "torn"):
                history.crash(torn=how == "torn")
            if history.running and how == "copies":
                history.return_to_copies(ranks, back=min(3, history.step))
            elif history.running:
                logged = history.log_every == 1 and history.step > history.lowest
                cause = "hosts" if how == "hosts" else "failure"
                history.recover(ranks, cause, back=int(how == "back" and logged))
            else:
                history.launch(ranks)
            history.steps(steps // 2)
            history.off = clocks[2 * number + 1]
            history.steps(steps - steps // 2)
        if finished:
            history.steps(TOTAL)
            history.end(0)
        return history

    return play


@settings(max_examples=100, deadline=None)
@given(_histories())
def test_fault_free_history_is_clean(play: Callable[[Path], History]) -> None:
    with TemporaryDirectory() as root:
        history = play(Path(root) / "run")
        found = audit(history.directory)
        applied = bool(found.lineage.segments)
        assert found.clean == (applied or None) and not found.lineage.findings, found.to_text()
        stops = [0, *(segment.sample_stop for segment in found.lineage.segments)]
        starts = [segment.sample_start for segment in found.lineage.segments]
        assert starts == stops[:-1]  # no gap, no overlap
        assert sum(found.goodput.parts.values()) == pytest.approx(found.goodput.wall, abs=1e-3)
        assert all(seconds >= 0 for seconds in found.goodput.parts.values())
        json.loads(found.to_json())
        said = "clean. Steps 1 to " if applied else "no step is recorded"
        assert said in found.to_text()


@settings(max_examples=100, deadline=None)
@given(_histories(off=(0.0, -2.0, 2.0, -3600.0, 3600.0)))
def test_audit_does_not_depend_on_clocks(play: Callable[[Path], History]) -> None:
    with TemporaryDirectory() as root:
        history = play(Path(root) / "run")
        found = audit(history.directory)
        assert found.clean is not False and not found.lineage.findings, found.to_text()
        assert sum(found.goodput.parts.values()) == pytest.approx(found.goodput.wall, abs=1e-3)
        assert all(seconds >= 0 for seconds in found.goodput.parts.values())


def test_clock_set_back_does_not_reduce_goodput(tmp_path: Path) -> None:
    history = History(tmp_path / "run", save_every=0)
    history.launch(2)
    history.steps(20)
    history.off = -3600.0
    history.steps(TOTAL)
    history.end(0)
    goodput = audit(history.directory).goodput
    assert goodput.parts["steps"] == pytest.approx(TOTAL)
    assert goodput.wall == pytest.approx(history.wall)


@pytest.mark.parametrize("ahead", [259200.0, -259200.0, 30.0])
def test_difference_of_clocks_is_left_out_of_goodput(
    tmp_path: Path, ahead: float, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(tmp_path / "run")
    history.launch(2)
    history.steps(20)
    history.move({"node2": [0, 1]}, ahead)
    history.steps(20)
    history.move({"node1": [0, 1]}, -ahead)
    history.steps(TOTAL)
    history.end(0)
    found = audit(history.directory)
    assert found.clean
    assert found.goodput.wall == pytest.approx(history.wall, abs=0.1)
    assert found.goodput.parts["steps"] == pytest.approx(TOTAL, abs=0.1)
    first, second = json.loads(found.to_json())["clocks"]
    how = "ahead of" if ahead > 0 else "behind"
    assert first.startswith("generation 1: the clock of node2 is ") and how in first
    assert "the clock of node1 is " in second and second in found.to_text()
    assert cli.main(["report", str(history.directory)]) == 0, capsys.readouterr()
    page = (history.directory / "report.html").read_text()
    assert f"{first[1:]}." in page
    shown = report_run.read(history.directory).steps["time"]
    assert shown[-1] - shown[0] < history.wall


def test_line_that_the_next_host_wrote_has_its_clock(tmp_path: Path) -> None:
    history = History(tmp_path / "run", save_every=0)
    history.launch(2)
    history.steps(20)
    history.off = 259200.0
    history.steps(1)  # rank 0 has died before it wrote the line
    history.off = 0.0
    history.move({"node2": [0]}, 259200.0)
    history.steps(TOTAL)
    events, lines = (_read(history.directory, name) for name in ("events", "metrics"))
    events[-1]["seen"][-1][1] = lines[20]["time"]
    _write(history.directory, "events", events)
    goodput = audit(history.directory).goodput
    assert goodput.wall == pytest.approx(history.wall, abs=0.1)


def test_run_of_an_older_version_is_audited_by_timestamps(history: History) -> None:
    lines, events = _read(history.directory, "metrics"), _read(history.directory, "events")
    _write(history.directory, "metrics", [_without(line, "generation") for line in lines])
    _write(history.directory, "events", [_without(event, "log_every") for event in events])
    left = _read(history.directory, "left_metrics")
    _write(history.directory, "left_metrics", [_without(line, "generation") for line in left])
    config = "train: {log_every: 1}"
    manifest = {"starts": [{"time": history.begin, "config": config}]}
    (history.directory / "manifest.json").write_text(json.dumps(manifest))
    found = audit(history.directory)
    assert found.clean and not found.lineage.findings, found.to_text()
    assert found.lineage.redone == [(0, 0), (3, 3), (0, 0), (1, 1)]


def test_metrics_line_of_a_generation_without_start_is_reported(history: History) -> None:
    lines = _read(history.directory, "metrics")
    lines[30]["generation"] = 9
    _write(history.directory, "metrics", lines)
    messages = [finding.message for finding in audit(history.directory).lineage.findings]
    assert "the generation of steps [31] has no start event" in messages


def _without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


def _drop(lines: Lines, starts: Lines, at: int) -> None:
    assume(at < len(lines) - 1)  # unknown for the last one
    del lines[at]


def _double(lines: Lines, starts: Lines, at: int) -> None:
    lines.insert(at, dict(lines[at]))


def _samples(lines: Lines, starts: Lines, at: int) -> None:
    lines[at]["samples"] += SIZE


def _world_size(lines: Lines, starts: Lines, at: int) -> None:
    lines[at]["world_size"] += 1


def _start_step(by: int) -> Callable[[Lines, Lines, int], None]:
    def alter(lines: Lines, starts: Lines, at: int) -> None:
        times = [*(start["time"] for start in starts), 9e9]
        # A generation without steps may have begun anywhere.
        fitting = [
            start
            for start, (begun, next_begun) in zip(starts, pairwise(times), strict=True)
            if start["step"] + by >= 0 and any(begun < li["time"] < next_begun for li in lines)
        ]
        assume(fitting)
        start = fitting[at % len(fitting)]
        start["step"] += by
        start["samples"] += by * SIZE

    return alter


def _start_gone(lines: Lines, starts: Lines, at: int) -> None:
    start = starts[at % len(starts)]
    if start is starts[-1] and len(starts) > 1:
        # The last one is visible only if the ranks changed or steps were repeated.
        after = [line["step"] for line in lines if line["time"] > start["time"]]
        assume(after and start["world_size"] != starts[-2]["world_size"])
    starts.remove(start)


def _identity(lines: Lines, starts: Lines, at: int) -> None:
    assume(len(starts) > 1)
    key = ("seed", "dataset_size", "fingerprint")[at % 3]
    starts[at % len(starts)][key] = "5" if key == "fingerprint" else 5


def _applied(lines: Lines, starts: Lines, at: int) -> None:
    start = starts[at % len(starts)]
    start["applied"] = start["step"] + (1 if at % 2 else -1)


def _state_hash(lines: Lines, starts: Lines, at: int) -> None:
    fitting = []
    for event in starts:
        before = [line for line in lines if line["time"] < event["time"]]
        if event["source"] == "memory" and before and before[-1]["step"] == event["step"]:
            fitting.append((before[-1], event))
    assume(fitting)
    line, event = fitting[at % len(fitting)]
    line["state_hash"], event["state_hash"] = "after the step", "after the step, twice"


ALTERED = {
    "applied": (_applied, {"double", "gap"}),
    "state hash": (_state_hash, {"state"}),
    "drop": (_drop, {"gap"}),
    "double": (_double, {"double"}),
    "samples": (_samples, {"samples"}),
    "world_size": (_world_size, {"world_size"}),
    "start step + 1": (_start_step(1), {"state", "double", "gap"}),
    "start step - 1": (_start_step(-1), {"state", "double", "gap"}),
    "start gone": (_start_gone, {"ledger", "world_size", "double", "gap"}),
    "identity": (_identity, {"identity"}),
}


def test_altered_hash_is_reported_after_a_return_to_a_checkpoint(tmp_path: Path) -> None:
    history = History(tmp_path / "run", 1, 0, 3)
    history.launch(2)
    history.steps(4)
    history.recover(1, "failure", back=0)  # at step 4
    history.crash(torn=False)
    history.launch(1)  # from the checkpoint of step 3
    history.recover(1, "failure", back=0)
    assert audit(history.directory).clean
    lines, events = _read(history.directory, "metrics"), _read(history.directory, "events")
    starts = [event for event in events if event["event"] == "start"]
    assert [start["step"] for start in starts] == [0, 4, 3, 3]
    lines[2]["state_hash"], starts[3]["state_hash"] = "after step 3", "another"
    _write(history.directory, "metrics", lines)
    _write(history.directory, "events", events)
    assert not audit(history.directory).clean


@pytest.mark.parametrize("name", ALTERED)
@settings(max_examples=25, deadline=None)
@given(play=_histories(every=(1,)), at=st.integers(0, 1000))
def test_altered_history_is_reported(name: str, play: Callable[[Path], History], at: int) -> None:
    alter, kinds = ALTERED[name]
    with TemporaryDirectory() as root:
        history = play(Path(root) / "run")
        lines, events = _read(history.directory, "metrics"), _read(history.directory, "events")
        assume(lines)
        starts = [event for event in events if event["event"] == "start"]
        kept = list(starts)
        alter(lines, starts, at % len(lines))
        gone = [start for start in kept if start not in starts]
        _write(history.directory, "metrics", lines)
        _write(history.directory, "events", [event for event in events if event not in gone])
        try:
            found = audit(history.directory)
        except UserError as error:
            assert "has no start event" in str(error) and not starts
            return
        assert not found.clean
        assert kinds & {finding.kind for finding in found.lineage.findings}, found.to_text()
        assert "NOT clean" in found.to_text()


def _read(directory: Path, name: str) -> Lines:
    lines = []
    for text in (directory / f"{name}.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _write(directory: Path, name: str, lines: Lines) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / f"{name}.jsonl").write_text(text)


@pytest.fixture
def history(tmp_path: Path) -> History:
    """A run that is launched, killed in step 14, launched again, recovered, and recovered one step
    back."""
    history = History(tmp_path / "run", eval_every=6)
    history.launch(4)
    history.steps(13)
    history.crash(torn=True)
    history.launch(4)
    history.steps(7)
    history.recover(3)
    history.steps(4)
    history.recover(2, back=1)
    history.steps(TOTAL)
    history.end(0)
    return history


def test_goodput_attributes_time_to_the_right_category(history: History) -> None:
    goodput = audit(history.directory).goodput
    assert goodput.wall == pytest.approx(history.wall)
    for part, seconds in goodput.parts.items():
        assert seconds == pytest.approx(history.spent[part], abs=1e-3), part
    assert goodput.parts["steps"] == pytest.approx(TOTAL)
    assert goodput.parts["redone"] == pytest.approx(4)
    assert goodput.share == pytest.approx(TOTAL / history.wall)


@pytest.mark.parametrize("module", ["hvdtrain.train", "hvdtrain.cli train"])
def test_goodput_includes_program_startup(tmp_path: Path, module: str) -> None:
    flags = [*TINY, "--train.duration", "2", "--run.root", str(tmp_path), "--run.id", "a"]
    command = [sys.executable, "-m", *module.split()]
    before = time.time()
    done = start(tmp_path / "output", flags, command=command).wait(120)
    after = time.time()
    assert done.returncode == 0, done
    goodput = audit(tmp_path / "a").goodput
    first = _read(tmp_path / "a", "metrics")[0]
    assert first["generation"] == 0
    assert goodput.parts["restart"] == 0.0
    assert goodput.parts["start"] == pytest.approx(
        first["time"] - first["step_seconds"] - before, abs=0.3
    )
    assert sum(goodput.parts.values()) == pytest.approx(goodput.wall)
    assert goodput.wall <= after - before


def test_report_lists_restarts_segments_and_sample_ranges(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", str(history.directory), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [
        (row["cause"], row["source"], row["from_step"], row["to_step"], row["redone"])
        for row in found["generations"]
    ]
    assert rows == [
        ("launch", "new", 0, 13, 0),
        ("launch", "checkpoint", 10, 17, 3),
        ("failure", "memory", 17, 21, 0),
        ("failure", "memory", 20, 60, 1),
    ]
    segments = [(s["first"], s["last"], s["world_size"]) for s in found["segments"]]
    assert segments == [(1, 10, 4), (11, 17, 4), (18, 20, 3), (21, 60, 2)]
    assert found["order"]["checked"] == TOTAL * SIZE and found["order"]["epochs"] == 9.375
    assert cli.main(["audit", str(history.directory)]) == 0
    text = capsys.readouterr().out
    assert "3 restarts, 4 steps redone" in text
    assert "3  " in text and "3 (node1:0-1 node2:2)" in text
    assert "steps 18 to 20: samples 170 to 199 of the order, 3 ranks, generation 2" in text


@pytest.mark.parametrize(
    ("log_every", "steps", "sync_every", "end", "said"),
    [
        (1, 13, 0, None, "1 restart, 3 steps redone"),
        (10, 37, 0, None, "1 restart, 0 to 9 steps redone"),  # of 7, no line was written
        (10, 34, 0, 1, "1 restart, 4 steps redone"),  # the end event has the step
        (20, 59, 0, None, "1 restart, 0 to 4 steps redone"),  # the last step has a line
        (10, 23, 8, "back", "1 restart, 4 to 8 steps redone"),
    ],
)
def test_audit_bounds_redone_steps_between_logged_steps(
    tmp_path: Path, log_every: int, steps: int, sync_every: int, end: int | str | None, said: str
) -> None:
    save_every = {1: 10, 10: 30, 20: 55}[log_every]
    history = History(tmp_path / "run", log_every, 0, save_every, sync_every)
    history.launch(4)
    history.steps(steps)
    if end == "back":
        history.recover(3, back=steps - 16)
    else:
        history.end(end) if isinstance(end, int) else history.crash()
        history.launch(4)
    before = history.lowest
    history.steps(TOTAL)
    history.end(0)
    found = audit(history.directory)
    assert found.clean and said in found.to_text(), found.to_text()
    row = json.loads(found.to_json())["generations"][1]
    least, most = row["redone"], row["redone_at_most"]
    assert least <= steps - before <= most


def test_missing_metrics_line_before_a_failure_is_reported(history: History) -> None:
    lines = _read(history.directory, "metrics")
    _write(history.directory, "metrics", [line for line in lines if line["step"] != 17])
    messages = [finding.message for finding in audit(history.directory).lineage.findings]
    assert "step 17 of generation 1 has no line of metrics" in messages


@pytest.mark.parametrize(
    ("at", "back", "message"),
    [
        (21, 5, None),  # to the synchronization before
        (24, 8, None),  # the rank that had done this one is gone
        (21, 0, None),  # it was made there, as others joined
        (21, 4, "the ranks had no common state at that step"),
        (21, 13, "step 21 had been reached"),
    ],
)
def test_local_steps_may_roll_back_only_to_the_last_common_state(
    tmp_path: Path, at: int, back: int, message: str | None
) -> None:
    history = History(tmp_path / "run", sync_every=8, save_every=0)
    history.launch(4)
    history.steps(at)
    history.recover(3, back=back)
    history.steps(TOTAL)
    history.end(0)
    found = audit(history.directory)
    assert found.clean == (message is None), found.to_text()
    if message is None:
        said = f"generation 1: rolled back to step {at - back}, the last step with the same"
        assert (said in found.to_text()) == (back > 0), found.to_text()
        assert f"1 restart, {back} steps redone" in found.to_text()
    else:
        assert message in found.lineage.findings[0].message


def test_steps_repeated_after_a_return_to_copies_are_listed(tmp_path: Path) -> None:
    history = History(tmp_path / "run", log_every=4, save_every=10)
    history.launch(4)
    history.steps(14)
    history.return_to_copies(4, back=4)
    history.steps(TOTAL)
    history.end(0)
    events = _read(history.directory, "events")
    again = [event for event in events if event["event"] == "start"][1]
    again["damaged_copies"] = ["shard 1 of step 10 on rank 2"]
    _write(history.directory, "events", events)
    text = audit(history.directory).to_text()
    assert "1 restart, 2 to 4 steps redone" in text, text
    assert "continued from the copies in memory of step 10; steps redone: 2 to 4" in text
    assert "the copy in memory of shard 1 of step 10 on rank 2 was damaged, and not used" in text


def test_start_from_copies_of_a_step_that_was_not_reached_is_reported(tmp_path: Path) -> None:
    history = History(tmp_path / "run", save_every=0)
    history.launch(4)
    history.steps(9)
    history.return_to_copies(4, back=-1)
    found = audit(history.directory)
    assert "state" in {finding.kind for finding in found.lineage.findings}, found.to_text()


def test_start_from_a_nonexistent_checkpoint_is_reported(history: History) -> None:
    events = _read(history.directory, "events")
    (saved,) = [e for e in events[:5] if e["event"] == "checkpoint" and e["step"] == 10]
    events.remove(saved)
    _write(history.directory, "events", events)
    found = audit(history.directory)  # it is on disk, so it existed
    assert found.clean and [f.warning for f in found.lineage.findings] == [True]
    shutil.rmtree(history.directory / "checkpoints/step_00000010")
    found = audit(history.directory)
    assert [f.kind for f in found.lineage.findings] == ["state"], found.to_text()


def test_checkpoint_mismatch_between_disk_and_events_is_reported(history: History) -> None:
    shutil.rmtree(history.directory / "checkpoints/step_00000060")
    (history.directory / "checkpoints/step_00000041").mkdir()
    (history.directory / "checkpoints/step_00000041/complete").touch()
    found = audit(history.directory)
    assert found.clean
    assert [finding.message for finding in found.lineage.findings] == [
        "the checkpoint of step 41 on disk has no event",
        "the checkpoint of step 60 is not on disk",
    ]


def test_checkpoints_deleted_by_retention_are_not_reported(history: History) -> None:
    for step in range(5, 55, 5):
        shutil.rmtree(history.directory / f"checkpoints/step_{step:08}")
    assert not audit(history.directory).lineage.findings


def test_run_started_from_another_runs_checkpoint_is_clean(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    history.step, history.saved = 20, [20]
    history.launch(2)
    history.steps(3)
    history.crash()
    history.launch(2)
    history.steps(9)
    found = audit(history.directory)
    assert found.clean and not found.lineage.findings, found.to_text()
    assert "Steps 21 to 29 " in found.to_text()
    assert (found.orders[""].start, found.orders[""].stop) == (200, 290)


def test_report_lists_healed_ranks_failed_saves_and_skipped_steps(history: History) -> None:
    history.events.write("healed", step=60, ranks=[1])
    history.events.write("checkpoint_failed", step=60, error="disk full")
    history.events.write("replay", step=61, verdict="wrong", ranks=[1], hosts=["node2"])
    history.events.write("replay", step=62, verdict="inexact", ranks=[], hosts=[], bound=1e-5)
    lines = _read(history.directory, "metrics")
    lines[6]["skipped"] = True
    _write(history.directory, "metrics", lines)
    text = audit(history.directory).to_text()
    for part in ("ranks [1] were healed after step 60", "of steps [60] failed", "steps [7]"):
        assert part in text, text
    assert "replay in step 61, wrong: node2\n" in text and "step 62, inexact\n" in text, text


def test_run_without_events_is_rejected(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    (history.directory / "events.jsonl").unlink()
    assert cli.main(["audit", str(history.directory)]) == 2
    assert "has no events.jsonl: the run was made by a version" in capsys.readouterr().err
    assert cli.main(["audit", str(history.directory.parent)]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_run_without_steps_gets_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(tmp_path / "run", 1, 0, 0)
    history.launch(2)
    history.crash()
    assert cli.main(["audit", str(history.directory)]) == 2
    assert "run: no step is recorded; 0 restarts" in (said := capsys.readouterr().out)
    assert "clean" not in said
    assert json.loads(audit(history.directory).to_json())["clean"] is None


def test_unclean_run_exits_with_1(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _read(history.directory, "metrics")
    del lines[30]
    _write(history.directory, "metrics", lines)
    assert cli.main(["audit", str(history.directory)]) == 1
    assert "gap: step 31 of generation 3 has no line of metrics" in capsys.readouterr().out


@pytest.mark.parametrize("limit", [7, 64, 1000, 10**6])
def test_order_check_examines_at_most_twice_its_limit(limit: int) -> None:
    check = check_order(ShuffledOrder(130, seed=3), 100, 5000, limit)
    assert not check.repeated and 0 < check.checked <= 2 * limit
    assert check.all_checked == (limit >= 5000)


def test_audit_accepts_a_source_without_samples_in_these_steps() -> None:
    check = check_order(ShuffledOrder(130, seed=3), 100, 100)
    assert (check.checked, check.repeated, check.all_checked) == (0, [], True)


def test_repeated_samples_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    order = ShuffledOrder(130, seed=3)
    monkeypatch.setattr("hvdtrain.data.order.permute", lambda p, size, seed, epoch: p // 2)
    assert check_order(order, 100, 391).repeated == [0, 1, 2]
    monkeypatch.setattr("hvdtrain.data.order.permute", lambda p, size, seed, epoch: p + 1)
    assert check_order(order, 100, 390).repeated == [0, 1, 2]


def test_order_check_of_a_huge_dataset_is_bounded() -> None:
    check = check_order(ShuffledOrder(10**9, seed=3), 0, 3 * 10**9, limit=10**5)
    assert 0 < check.checked <= 2 * 10**5 and not check.repeated
