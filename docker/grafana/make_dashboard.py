"""Makes Grafana's dashboard of hvdtrain from the panels of panels.py.

    python docker/grafana/make_dashboard.py > hvdtrain/deploy/dashboards/hvdtrain.json

Grafana sees the JSON alone.
"""

from __future__ import annotations

import json
from typing import Any

from panels import ROWS, RUN, Panel

WIDTH = 24  # of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "$datasource"}
OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "colorMode": "none",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    },
    "status-history": {"showValue": "never", "rowHeight": 0.9, "legend": {"showLegend": True}},
}


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    # Grafana draws no cells that are narrower than a few pixels.
    few = {"maxDataPoints": 100} if panel.type == "status-history" else {}
    return {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        **few,
        "fieldConfig": {"defaults": {"unit": panel.unit, **panel.more}, "overrides": []},
        "options": OPTIONS[panel.type],
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend,
            }
            for i, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def panels_json() -> list[dict[str, Any]]:
    """Rows one below the other; in a row panels fill the width, line by line."""
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        row = {"id": len(found) + 1, "type": "row", "title": title, "collapsed": False}
        found.append({**row, "gridPos": place, "panels": []})
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + panel.height
            found.append(panel_json(panel, len(found) + 1, x, y))
            x += panel.width
        y += panels[-1].height
    return found


def variable(name: str, label: str, metric: str, **more: Any) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,  # when the time range changes
        "sort": 2 if name == "run" else 3,  # run: by name, the newest first; rank: by number
        **more,
    }


def dashboard() -> dict[str, Any]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    return {
        "uid": "hvdtrain",
        "title": "hvdtrain",
        "description": "One run of hvdtrain: made by docker/grafana/make_dashboard.py",
        "tags": ["hvdtrain"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {**source, "query": "prometheus"},
                variable("run", "Run", "hvdtrain_world_size"),
                variable(
                    "rank",
                    "Rank",
                    f"hvdtrain_world_size{{{RUN}}}",
                    multi=True,
                    includeAll=True,
                    allValue=".*",
                    current={"text": ["All"], "value": ["$__all"]},
                ),
            ]
        },
        "panels": panels_json(),
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
