"""Makes the site of the documentation: build/site/index.html.

    python docs/site/build.py

`make docs-site` does that. Pages lie in the site as in the repository, so their links hold on both;
their groups and order are those of docs/README.md. A broken link or anchor ends it with exit
code 1.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
BUILD = REPOSITORY / "build"
INDEX = "docs/README.md"
API = "docs/api.md"


def groups() -> dict[str, list[tuple[str, str]]]:
    """Heading of the index -> (title, path in the repository) of each page below it, in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for section in (REPOSITORY / INDEX).read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\|.*\| \[(.+?)\]\((.+?)\) \|$", section, re.MULTILINE)
        paths = [(title, (REPOSITORY / "docs" / link).resolve()) for title, link in rows]
        found[section.partition("\n")[0]] = [
            (title, str(path.relative_to(REPOSITORY))) for title, path in paths
        ]
    return found


def pages() -> list[tuple[str, str]]:
    """(title, path in the repository) of each page, in the order of the index."""
    return [page for group in groups().values() for page in group]


def stage(directory: Path, paths: list[str]) -> None:
    """Copies the pages, and what they show, to where they lie in the repository.

    Docstrings of the public interface follow at the end of its page.
    """
    shutil.rmtree(directory, ignore_errors=True)
    shown = [
        *(REPOSITORY / "docs/images").iterdir(),
        REPOSITORY / "docker/prometheus/rules/alerts.yml",
        REPOSITORY / "docs/notebook.ipynb",
    ]
    for path in [*paths, *(str(file.relative_to(REPOSITORY)) for file in shown)]:
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / path, directory / path)
    with (directory / API).open("a") as file:
        file.write((HERE / "api.md").read_text())


def configuration(source: Path, site: Path) -> dict[str, Any]:
    """mkdocs.yml with what this script knows."""
    text = (HERE / "mkdocs.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    nav: list[dict[str, Any]] = [{"Home": "README.md"}, {"Documentation": INDEX}]
    nav += [
        {heading: [{title: path} for title, path in group]} for heading, group in groups().items()
    ]
    handlers = found["plugins"][1]["mkdocstrings"]["handlers"]
    handlers["python"]["paths"] = [str(REPOSITORY)]
    return {**found, "docs_dir": str(source), "site_dir": str(site), "nav": nav}


def main() -> int:
    source, site = BUILD / "site-source", BUILD / "site"
    stage(source, ["README.md", INDEX, *(path for _, path in pages())])
    file = BUILD / "mkdocs.yml"
    text = yaml.safe_dump(configuration(source, site), sort_keys=False)
    # YAML of plain values cannot name a function; mkdocs reads the tag.
    file.write_text(re.sub(r"'(!!python/name:[\w.]+)'", r"\1 ''", text))
    # Not --quiet: a warning that is not shown does not end a strict build either.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(file)]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
