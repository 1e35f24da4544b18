"""The committed dashboard and rules, for tests."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import yaml

from tests.support.runs import REPOSITORY

PROMETHEUS = REPOSITORY / "docker/prometheus"
DASHBOARD = REPOSITORY / "hvdtrain/deploy/dashboards/hvdtrain.json"


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def rows() -> dict[str, list[dict[str, Any]]]:
    """Return the panels of each row; Grafana keeps panels of a folded row in the row."""
    found: dict[str, list[dict[str, Any]]] = {}
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            found[panel["title"]] = content = panel["panels"]
        else:
            content.append(panel)
    return found


def panels() -> list[dict[str, Any]]:
    """Return the panels that have queries."""
    return [panel for row in rows().values() for panel in row if panel["type"] != "text"]


class Query(NamedTuple):
    """PromQL of a panel or annotation, with variables replaced as Grafana would."""

    title: str
    legend: str
    expr: str


def queries(
    run: str, window: str = "1m", span: str = "1h", step: str = "15s", top: int = 10
) -> list[Query]:
    """Return the queries of all panels and annotations.

    Args:
        window: value of $__rate_interval.
        span: time range of the dashboard.
        step: time between two points.
        top: ranks per panel.
    """
    values = {"$run": run, "$rank": ".*", "$top": str(top), "$__rate_interval": window}
    values |= {"$__range": span, "$__interval": step}
    marks = dashboard()["annotations"]["list"]
    every = [(panel["title"], target) for panel in panels() for target in panel["targets"]]
    every += [(f"annotation {mark['name']}", mark["target"]) for mark in marks]
    found = []
    for title, target in every:
        expr = target["expr"]
        for name, value in values.items():
            expr = expr.replace(name, value)
        found.append(Query(title, target.get("legendFormat", ""), expr))
    return found


def rules(name: str) -> list[dict[str, Any]]:
    """Return the rules of rules/NAME.yml."""
    groups = yaml.safe_load((PROMETHEUS / f"rules/{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
