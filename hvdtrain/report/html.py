"""A page as one self-contained HTML file, and the scripts and styles of all pages."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

from hvdtrain.report.charts import Chart
from hvdtrain.report.page import Page, page
from hvdtrain.text import finite

_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} – hvdtrain</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<main id="view"></main>
<noscript><p>{title}: this page requires JavaScript.</p></noscript>
<script type="application/json" id="page">{page}</script>
<script>{script}</script>
</body>
</html>
"""


def document(content: Page) -> str:
    """Return the HTML file of a page. It contains its script, and loads nothing."""
    # A script element ends at the first </script, also inside a string.
    text = dumps(content).replace("<", "\\u003c")
    return _document(content["title"], text, live=False)


@cache
def live_document() -> str:
    """Return the HTML of all pages of the web view, whose script requests their content."""
    return _document("Runs", "null", live=True)


def _document(title: str, page: str, live: bool) -> str:
    escaped = html.escape(title).encode("ascii", "xmlcharrefreplace").decode()
    parts = {"policy": policy(live), "style": style(), "script": script(live)}
    return _DOCUMENT.format(title=escaped, page=page, **parts)


def of_chart(title: str, chart: Chart) -> str:
    """Return the HTML file of one chart."""
    return document(page(title, charts=[chart]))


def dumps(content: Any) -> str:
    """Return JSON in ASCII; numbers that are not finite become null."""
    return json.dumps(finite(content), allow_nan=False, separators=(",", ":"))


@cache
def policy(live: bool = False) -> str:
    """Content-Security-Policy for the style and the script of a page; `live`: and its server."""
    sources = f"script-src {_hash(script(live))}; style-src {_hash(style())}; img-src data:"
    return f"default-src 'none'; {sources}" + ("; connect-src 'self'" if live else "")


@cache
def script(live: bool) -> str:
    """uPlot and the script of the pages; `live`: with the script of the web view."""
    names = ["static/page.js", *(["static/live.js"] if live else [])]
    return "\n".join(map(_read, ["uplot/uPlot.iife.min.js", *names]))


@cache
def style() -> str:
    return "\n".join(map(_read, ["uplot/uPlot.min.css", "static/page.css"]))


def _read(name: str) -> str:
    return files("hvdtrain.report").joinpath(name).read_text()


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
