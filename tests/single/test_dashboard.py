"""The Grafana dashboard: the rules of its linter, and agreement with the exported metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import combinations

import pytest
import yaml

from tests.support.dashboard import DASHBOARD, dashboard, panels, rules
from tests.support.runs import REPOSITORY

GRAFANA = REPOSITORY / "docker/grafana"
# They come from the run's ledger, and continue when another process becomes rank 0.
KEPT_THROUGH_RESTARTS = {"hvdtrain_restarts_total", "hvdtrain_lost_steps_total"}
UNITS = {
    *("short", "s", "bytes", "Bps", "percentunit", "sci", "watt", "hertz", "suffix: samples/s")
}
EXPRESSIONS = [target["expr"] for panel in panels() for target in panel["targets"]]


def test_dashboard_matches_its_generator() -> None:
    command = [sys.executable, str(GRAFANA / "make_dashboard.py")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert made == DASHBOARD.read_text(), "run docker/grafana/make_dashboard.py again"


def test_dashboard_has_a_fixed_uid_and_all_variables() -> None:
    found = dashboard()
    assert found["uid"] == "hvdtrain" and found["title"] and found["editable"] is False
    variables = {variable["name"]: variable for variable in found["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "rank"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["rank"]["includeAll"] and variables["rank"]["multi"]
    for name in ("run", "rank"):
        assert variables[name]["datasource"]["uid"] == "$datasource"


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
    assert selectors == len(re.findall(r"\b(?:hvdtrain_\w+|up)\b", expr)), "one without labels"
    assert set(re.findall(r"\[(.*?)\]", expr)) <= {"$__rate_interval"}
    for counter in set(re.findall(r"hvdtrain_\w+_(?:total|bucket)\b", expr)):
        rated = re.findall(rf"(?:rate|increase)\({counter}\{{[^}}]*\}}\[", expr)
        assert counter in KEPT_THROUGH_RESTARTS or len(rated) == expr.count(counter)


def test_panels_have_unique_ids_and_tile_without_overlap() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    titles = [panel["title"] for panel in everything if panel["type"] == "row"]
    assert len(set(titles)) == len(titles) > 5
    cells: dict[int, set[tuple[int, int]]] = {}
    for panel in everything:
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


def test_grafana_is_provisioned_with_prometheus_and_the_dashboard() -> None:
    sources = GRAFANA / "provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(sources.read_text())["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    scrapes = yaml.safe_load((REPOSITORY / "docker/prometheus/prometheus.yml").read_text())
    interval = scrapes["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval, "$__rate_interval would be wrong"
    providers = GRAFANA / "provisioning/dashboards/hvdtrain.yml"
    (provider,) = yaml.safe_load(providers.read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"].endswith("/dashboards")


def test_every_alert_has_a_runbook_section() -> None:
    runbook = (REPOSITORY / "docker/prometheus/runbook.md").read_text()
    headings = re.findall(r"^## (\w+)$", runbook, re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules("alerts")]
