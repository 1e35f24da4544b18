"""The pages of live runs, in the format of report/page.py, and the list of runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hvdtrain.report import charts, tables, texts, units
from hvdtrain.report.page import Page, note, page, tile
from hvdtrain.report.tables import ReportTable
from hvdtrain.text import plural

_ALL = ["all runs", "./"]
_BAD = ("failed", "not finite", "killed", "cannot")
_GONE = "no heartbeat: killed, frozen, or its host is gone"
_COLUMNS = ("run", "state", "task", "step", "loss", "samples/s", "ranks", "restarts", "last step")
_WORDS = 3  # columns that are words


def runs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The list of runs: for each column a value to sort by and its text."""
    return {
        "columns": [{"name": name, "words": at < _WORDS} for at, name in enumerate(_COLUMNS)],
        "sort": len(_COLUMNS) - 1,
        "runs": [_listed(row) for row in rows],
    }


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("name", "state", "task", "step", "loss", "samples_per_second", "ranks", "restarts")
    values = [row.get(key) for key in keys]
    words = [str(value or units.UNKNOWN) for value in values[:_WORDS]]
    shown = [*words, _steps(row), *map(units.number, values[4:]), _age(row)]
    values.append(row.get("age_seconds"))
    return {
        "name": row["name"],
        "state": _mood(row["state"]),
        "words": " ".join(words).lower(),
        "cells": [{"value": v, "text": text} for v, text in zip(values, shown, strict=True)],
    }


def make(found: Mapping[Path, dict[str, Any]]) -> Page:
    """The page of a run, or the page that compares several.

    Args:
        found: directory of a run -> what `LiveRun.refresh` returned.
    """
    if len(found) > 1:
        return _several(found)
    return _one(*next(iter(found.items())))


def _one(path: Path, run: dict[str, Any]) -> Page:
    report = "report?" + urlencode({"name": run["name"]})
    found = [*charts.of_run(run["series"]).values(), *_phases(run["window"])]
    shown = page(
        title=run["name"],
        state=_GONE if run["state"] == "killed" else run["state"],
        mood=_mood(run["state"]),
        headline=run["task"] or "",
        links=[_ALL, ["full report", report]],
        tiles=_tiles(run),
        notes=_notes(run),
        clocks=[run["clock"]],
        marks=[mark for mark in run["restarted"] if mark["step"] is not None],
        first=[table for table in (_restarts(run),) if table.rows],
        charts=found,
        texts=texts.of_run(path),
    )
    return {**shown, "unread_bytes": run["unread_bytes"]}


def _several(found: Mapping[Path, dict[str, Any]]) -> Page:
    links = [_ALL, *([path.name, "?" + urlencode({"run": path.name})] for path in found)]
    rows = [[cell["text"] for cell in _listed(run)["cells"]] for run in found.values()]
    configurations = {path.name: texts.configuration(path) for path in found}
    shown = page(
        title=plural(len(found), "run"),
        links=links,
        clocks=[run["clock"] for run in found.values()],
        charts=charts.of_runs({path.name: run["series"] for path, run in found.items()}),
        first=[
            ReportTable("Runs", [*_COLUMNS], rows, words=_WORDS),
            texts.differences(configurations),
        ],
    )
    return {**shown, "unread_bytes": max(run["unread_bytes"] for run in found.values())}


def _mood(state: str) -> str:
    if state in ("running", "finished"):
        return "good"
    return "bad" if state.startswith(_BAD) else ""


def _steps(run: dict[str, Any]) -> str:
    if run.get("step") is None:
        return units.UNKNOWN
    total = run.get("total_steps")
    return f"{run['step']:,}" + (f" of {total:,}" if total is not None else "")


def _age(run: dict[str, Any]) -> str:
    age = run.get("age_seconds")
    return units.UNKNOWN if age is None else f"{units.seconds(age) if age else '0 s'} ago"


def _tiles(run: dict[str, Any]) -> list[dict[str, str]]:
    left, validation = run["remaining_seconds"], run["validation"].get("loss")
    waited = "" if run["age_seconds"] is None else f"last one {_age(run)}"
    lost = sum(restart["cause"] == "failure" for restart in run["restarted"])
    window, speed = run["window"], run["samples_per_second"]
    memory = f", up to {units.size(window['most_memory_bytes'])} each" if window else ""
    saved = "" if run["saved_step"] is None else f"last after step {run['saved_step']:,}"
    return [
        tile("Step", _steps(run), f"{units.seconds(left)} left" if left is not None else waited),
        tile(
            "Loss",
            units.number(run["loss"]),
            "no validation" if validation is None else f"validation {units.number(validation)}",
        ),
        tile(
            "Throughput",
            units.UNKNOWN if speed is None else f"{units.number(speed)} samples/s",
            "last step",
        ),
        tile(
            "Ranks",
            units.number(run["ranks"]),
            f"on {plural(run['hosts'], 'host')}{memory}" if run["hosts"] else "",
        ),
        tile("Restarts", str(run["restarts"]), f"{lost} after a failure" if lost else ""),
        tile("Checkpoints", f"{run['checkpoints']:,}", saved),
    ]


def _notes(run: dict[str, Any]) -> list[dict[str, Any]]:
    found = [
        note(
            f"Rank {units.number(slow['rank'])} on {slow['host']} is slow in {slow['phase']} "
            f"since step {units.number(slow['step'])}.",
            warning=True,
        )
        for slow in run["named_slow"]
    ]
    if run["unread_bytes"]:
        left = units.size(run["unread_bytes"])
        found.append(note(f"Reading the files of the run: {left} left."))
    if run["torn"]:
        torn = plural(run["torn"], "incomplete line")
        found.append(note(f"{torn} skipped in metrics.jsonl (left by a crash)."))
    if run["window"] is None:
        found.append(note("ranks.jsonl has no lines yet: the times of the phases are unknown."))
    return found


def _restarts(run: dict[str, Any]) -> ReportTable:
    rows = [
        [
            str(restart["number"]),
            tables.cause(restart),
            units.number(restart["step"]),
            f"{units.number(restart['ranks_before'])} → {units.number(restart['ranks_after'])}",
            units.seconds(restart["seconds"]),
            _clock(restart["time"]),
        ]
        for restart in reversed(run["restarted"])
    ]
    head = ["#", "cause", "after step", "ranks", "took", "at (UTC)"]
    return ReportTable("Restarts", head, rows, words=2)


def _clock(when: float | None) -> str:
    if when is None or not 0 <= when < 1e11:
        return units.UNKNOWN
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(when))


def _phases(window: dict[str, Any] | None) -> list[charts.Chart]:
    if window is None:
        return []
    found = charts.phases("Time per rank and phase", window["seconds"], window["labels"])
    found["note"] = f"Steps {window['step'] - window['steps'] + 1:,} to {window['step']:,}"
    if window["all_ranks"] > len(window["labels"]):
        shown, count = len(window["labels"]), window["all_ranks"]
        found["caption"] = f"The {shown} ranks with the lowest scores of {count:,}."
    return [found]
