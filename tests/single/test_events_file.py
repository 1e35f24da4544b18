"""events.jsonl: every event exactly once, despite crashes and full disks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from hvdtrain.run_files.events_file import EventsFile, read_lines
from tests.support.job import poll

TORN = {
    "half a line": b'{"event": "start", "ti',
    "a line without its newline": b'{"event": "lost", "time": 1}',
    "zeros": b"\0" * 40,
    "no text": b'{"event": "\xff\xfe',
}


@pytest.mark.parametrize("end", TORN)
def test_torn_line_does_not_corrupt_the_next_event(tmp_path: Path, end: str) -> None:
    path = tmp_path / "events.jsonl"
    EventsFile(path).write("start", generation=0)
    with open(path, "ab") as file:
        file.write(TORN[end])
    EventsFile(path).write("start", generation=1)
    events = [event["event"] for event in read_lines(path)]
    whole = ["lost"] if end == "a line without its newline" else []
    assert events == ["start", *whole, "start"]


def test_event_is_written_at_once_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = EventsFile(path)
    file.write("checkpoint", step=3, seconds=0.5)
    (event,) = read_lines(path)
    assert event.pop("time") > 1.7e9
    assert event == {"event": "checkpoint", "step": 3, "seconds": 0.5}


def test_failing_disk_neither_stops_training_nor_loses_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "later/events.jsonl"
    file = EventsFile(path)
    with caplog.at_level(logging.ERROR, "hvdtrain"):
        file.write("checkpoint", step=1)
        file.write("checkpoint", step=2)
    assert len(caplog.records) == 1 and "training continues" in caplog.text
    path.parent.mkdir()
    file.write("checkpoint", step=3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_pending_event_is_written_once_the_disk_recovers(tmp_path: Path) -> None:
    path = tmp_path / "later/events.jsonl"
    file = EventsFile(path)
    file.write("start", generation=0)
    assert [line["event"] for line in file.lines()] == ["start"]
    path.parent.mkdir()
    poll(path.exists, 5, "the event that waited")
    assert [line["generation"] for line in read_lines(path)] == [0]
    assert len(file.lines()) == 1


def test_write_to_a_full_disk_does_not_raise() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full")
    file = EventsFile(full)
    file.write("end", step=1)  # no OSError
