"""The committed dashboard and rules, for tests."""

from __future__ import annotations

import json
from typing import Any

import yaml

from tests.support.runs import REPOSITORY

PROMETHEUS = REPOSITORY / "docker/prometheus"
DASHBOARD = REPOSITORY / "hvdtrain/deploy/dashboards/hvdtrain.json"


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text()))


def panels() -> list[dict[str, Any]]:
    """Return the panels, without rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries(run: str, interval: str) -> list[tuple[str, str]]:
    """Return (panel title, PromQL) of each query, with variables replaced as Grafana would.

    Args:
        interval: value of $__rate_interval.
    """
    values = {"$run": run, "$rank": ".*", "$__rate_interval": interval}
    found = []
    for panel in panels():
        for target in panel["targets"]:
            expr = target["expr"]
            for name, value in values.items():
                expr = expr.replace(name, value)
            found.append((panel["title"], expr))
    return found


def rules(name: str) -> list[dict[str, Any]]:
    """Return the rules of rules/NAME.yml."""
    groups = yaml.safe_load((PROMETHEUS / f"rules/{name}.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
