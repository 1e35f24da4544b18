"""The Grafana dashboard: Grafana's schema, the rules of its linter, and links to the runbook.

The schemas in tests/data are from github.com/grafana/grafana-foundation-sdk (Apache 2.0), which
generates them from Grafana's own: the dashboard's from Grafana 12.3.3, those of panels and queries
from 11.6.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.dashboard import DASHBOARD, PROMETHEUS, dashboard, panels, rows, rules
from tests.support.runs import REPOSITORY

GRAFANA = REPOSITORY / "docker/grafana"
SCHEMAS = REPOSITORY / "tests/data/grafana-foundation-sdk-0.0.18"
# They come from the run's ledger, and continue when another process becomes rank 0.
KEPT_THROUGH_RESTARTS = {"hvdtrain_restarts_total", "hvdtrain_lost_steps_total"}
UNITS = {"short", "s", "bytes", "Bps", "percentunit", "sci", "watt", "hertz"}
EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]]
ALERTS = [rule["alert"] for rule in rules("alerts")]
RUNBOOK = {panel["title"]: panel for panel in rows()["Runbook"]}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")
def test_dashboard_matches_its_generator() -> None:
    command = [sys.executable, str(GRAFANA / "make_dashboard.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert made == DASHBOARD.read_text(), "run docker/grafana/make_dashboard.py again"


def _validate(value: Any, name: str, definition: str) -> None:
    schema = json.loads((SCHEMAS / f"{name}.jsonschema.json").read_text())
    schema["$ref"] = f"#/definitions/{definition}"
    jsonschema.Draft7Validator(schema).validate(value)


def test_dashboard_matches_the_schema_of_grafana() -> None:
    _validate(dashboard(), "dashboard", "Dashboard")
    for panel in panels():
        name = panel["type"].replace("-", "")
        _validate(panel["options"], name, "Options")
        if panel["type"] != "stat":
            _validate(panel["fieldConfig"]["defaults"]["custom"], name, "FieldConfig")
        for target in panel["targets"]:
            _validate(target, "prometheus", "Dataquery")
    for panel in RUNBOOK.values():
        _validate(panel["options"], "text", "Options")
    for mark in dashboard()["annotations"]["list"]:
        _validate(mark["target"], "prometheus", "Dataquery")


def test_schema_rejects_wrong_options() -> None:
    for name, wrong in (("timeseries", {"legend": {"displayMode": "lots"}}), ("stat", {"no": 1})):
        with pytest.raises(jsonschema.ValidationError):
            _validate(wrong, name, "Options")


def test_dashboard_has_a_fixed_uid_and_all_variables() -> None:
    found = dashboard()
    assert found["uid"] == "hvdtrain" and found["title"] and found["editable"] is True
    variables = {variable["name"]: variable for variable in found["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "rank", "top"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["rank"]["includeAll"] and variables["rank"]["multi"]
    assert variables["rank"]["current"]["value"] == "$__all"
    assert variables["top"]["current"]["value"] == "10"
    for name in ("run", "rank"):
        assert variables[name]["datasource"]["uid"] == "$datasource"


def test_only_the_overview_is_open() -> None:
    folded = {row["title"]: row["collapsed"] for row in dashboard()["panels"] if "collapsed" in row}
    assert not folded.pop("Overview") and all(folded.values()) and len(folded) > 5


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_panel_has_title_description_unit_and_queries(panel: dict) -> None:
    assert panel["title"] and len(panel["description"]) > 10
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["targets"], "it shows nothing"
    references = [target["refId"] for target in panel["targets"]]
    assert len(set(references)) == len(references)
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "$datasource"}
    if len(panel["targets"]) > 1 or panel["type"] == "timeseries":
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_queries_select_one_run_and_apply_rate_to_counters(expr: str) -> None:
    for selector in re.findall(r"\{(.*?)\}", expr):
        assert 'run="$run"' in selector
    selectors = len(re.findall(r"\{", expr))
    names = re.findall(r"\b(?:hvdtrain_\w+|up|ALERTS)\b", expr)
    assert selectors == len(names), "one without labels"
    assert set(re.findall(r"\[(.*?)\]", expr)) <= {
        "$__rate_interval",
        "$__range",
        "$__range:$__interval",
    }
    for counter in set(re.findall(r"hvdtrain_\w+_(?:total|bucket)\b", expr)):
        rated = re.findall(rf"(?:rate|increase)\({counter}\{{[^}}]*\}}\[", expr)
        assert counter in KEPT_THROUGH_RESTARTS or len(rated) == expr.count(counter)


def test_panels_of_many_curves_are_limited() -> None:
    for panel in panels():
        for target in panel["targets"]:
            limited = re.search(r" and on \([\w, ]+\) (top|bottom)k\(\$top, ", target["expr"])
            by = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert bool(limited) == bool({"rank", "host"} & set(by)), panel["title"]
            assert bool(limited) == bool(re.search(", by rank|by host", panel["title"]))


def test_panels_have_unique_ids_and_titles_and_tile_without_overlap() -> None:
    every = [panel for row in rows().values() for panel in row]
    ids = [panel["id"] for panel in every + dashboard()["panels"] if panel["type"] == "row"]
    ids += [panel["id"] for panel in every]
    titles = [panel["title"] for panel in every]
    assert len(set(ids)) == len(ids) and len(set(titles)) == len(titles)
    cells: dict[int, set[tuple[int, int]]] = {}
    heads = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    for panel in (*heads, *every):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells[panel["id"]] = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
    for one, other in combinations(cells, 2):
        assert not cells[one] & cells[other], f"panels {one} and {other}"
    taken = set().union(*cells.values())
    assert len(taken) == 24 * (1 + max(y for _, y in taken)), "a hole"


def test_restarts_are_marked_in_all_panels_and_checkpoints_in_some() -> None:
    restarts, checkpoints = dashboard()["annotations"]["list"]
    assert restarts["enable"] and "filter" not in restarts
    known = {panel["id"]: panel["title"] for panel in panels()}
    marked = {known[number] for number in checkpoints["filter"]["ids"]}
    assert {"Throughput", "Delay of steps by checkpoints"} <= marked
    assert checkpoints["useValueForTime"], "the value is the time in ms"


def test_every_alert_has_a_runbook_section_to_which_panels_link() -> None:
    sections = re.split(r"^## (\w+)$", (PROMETHEUS / "runbook.md").read_text(), flags=re.MULTILINE)
    assert sections[1::2] == ALERTS == list(RUNBOOK)
    for rule in rules("alerts"):
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (REPOSITORY / path).samefile(PROMETHEUS / "runbook.md")
        assert anchor == rule["alert"].lower()
    for alert, text in zip(ALERTS, sections[2::2], strict=True):
        shown = RUNBOOK[alert]["options"]["content"]
        assert "](" not in shown, "a relative link would not resolve in Grafana"
        assert shown == re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text.strip())
    linked: dict[str, list[str]] = {}
    for panel in panels():
        for link in panel.get("links", []):
            alert = link["title"].removeprefix("Runbook: ")
            assert link["url"] == f"/d/hvdtrain?viewPanel={RUNBOOK[alert]['id']}"
            linked.setdefault(alert, []).append(panel["title"])
    assert {alert for alert, where in linked.items() if where != ["Alerts"]} == set(ALERTS)


def test_runbook_names_existing_panels() -> None:
    text = " ".join((PROMETHEUS / "runbook.md").read_text().split())
    named = re.findall('"([^"]+)"', text)
    assert len(named) >= 6 and set(named) <= {panel["title"] for panel in panels()}


def test_dashboard_fits_into_a_config_map() -> None:
    # `kubectl apply` also stores an object in an annotation of at most 256 KiB.
    assert len(json.dumps(DASHBOARD.read_text())) < 200 * 1024


def test_grafana_is_provisioned_with_prometheus_and_the_dashboard() -> None:
    sources = GRAFANA / "provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(sources.read_text())["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    scrapes = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    interval = scrapes["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval, "$__rate_interval would be wrong"
    providers = GRAFANA / "provisioning/dashboards/hvdtrain.yml"
    (provider,) = yaml.safe_load(providers.read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"].endswith("/dashboards")
