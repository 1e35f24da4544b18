"""README and docs/: their examples run, their keys exist and their links resolve."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from hvdtrain.cli import _Parser
from hvdtrain.config import parse
from hvdtrain.config_tiers import TIERS
from hvdtrain.tasks import BUILT_IN, Task, load_class, optional
from tests.support.runs import REPOSITORY, metrics

DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
CONFIGURATION = DOCS / "configuration.md"
GUIDES = [README, *sorted(DOCS.glob("*.md"))]
PAGES = [
    *(*GUIDES, REPOSITORY / "CONTRIBUTING.md"),
    *(REPOSITORY / "CHANGELOG.md", REPOSITORY / "SECURITY.md"),
    *(REPOSITORY / "slurm/README.md", REPOSITORY / "docker/README.md"),
    *(REPOSITORY / "packaging/README.md", REPOSITORY / "docker/prometheus/runbook.md"),
]
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text())


def links(page: Path) -> Iterator[str]:
    """Return the targets of a page's links and images."""
    for token in tokens(page):
        for child in token.children or []:
            target = child.attrGet("src" if child.type == "image" else "href")
            if target is not None:
                yield str(target)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub generates them."""
    found: set[str] = set()
    every = tokens(page)
    for opening, text in pairwise(every):
        if opening.type == "heading_open":
            slug = re.sub(r"[^\w\- ]", "", text.content.lower()).replace(" ", "-")
            assert slug not in found, f"{page}: two headings are called {text.content}"
            found.add(slug)
    return found


def keys(task: str) -> dict[str, object]:
    """Return every configuration key of a task -> its value."""

    def within(prefix: str, content: dict[str, object]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in content.items():
            name = f"{prefix}{key}"
            inner = isinstance(value, dict) and value
            found |= within(f"{name}.", value) if inner else {name: value}  # type: ignore[arg-type]
        return found

    return within("", yaml.safe_load(parse(["--task", task]).resolved))


EVERY_KEY = {key for task in BUILT_IN for key in keys(task)}
INNER_GROUPS = {key.rpartition(".")[0] for key in EVERY_KEY if key.count(".") > 1}


@pytest.mark.slow
def test_custom_task_of_the_docs_learns_unmodified(tmp_path: Path) -> None:
    text = (DOCS / "custom-tasks.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    (tmp_path / "bits.py").write_text(code)
    flags = ["--task", "bits:Majority", "--hidden", "64", "--run.id", "own", "--telemetry.port=0"]
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.train", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    last = metrics(tmp_path / "runs" / "own")[-1]
    assert last["step"] == 300
    assert last["validation_accuracy"] > 0.9  # it also learns


def test_custom_tasks_page_lists_every_method_and_attribute() -> None:
    of_loops = {"script_state", "run_name"}  # of `hvdtrain.training`, which makes a task of a loop
    names = {"datasets", "model", "loss", *Task.OPTIONAL} - of_loops
    listed = re.findall(r"^\| `(\w+)", (DOCS / "custom-tasks.md").read_text(), re.MULTILINE)
    assert names - {*listed} == set()


def test_configuration_reference_matches_its_generator() -> None:
    command = [sys.executable, str(DOCS / "generate_configuration.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert made == CONFIGURATION.read_text(), "run `make docs`"


def test_configuration_reference_documents_every_key_and_default() -> None:
    tier = "|".join(TIERS)
    row = rf"^\| `([\w.]+)` \| (?:{tier}) \| .+? \| `(.*?)`((?:; \w+: `.*?`)*) \| (.*) \|$"
    found = [*re.split(r"^## Keys of the task `(\w+)`$", CONFIGURATION.read_text(), flags=re.M)]
    sections = dict(zip(["", *found[1::2]], found[::2], strict=True))
    rows = {task: re.findall(row, text, re.M) for task, text in sections.items()}
    all_rows = [one for of_task in rows.values() for one in of_task]
    assert {key for key, *_ in all_rows} == EVERY_KEY and len(all_rows) == len(set(all_rows))
    for task in BUILT_IN:
        values, defaults = keys(task), optional(load_class(task), "defaults")
        own_rows = {one[0]: one for one in [*reversed(all_rows), *rows[task]]}
        for key, default, of_tasks, meaning in own_rows.values():
            own = re.findall(rf"; {task}: `(.*?)`", of_tasks)
            if key in values and key != "task":
                assert yaml.safe_load([default, *own][-1]) == values[key], key
            assert bool(own) == (key in defaults), key
            assert len(meaning) > 3, key


@PAGE
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (
            target.exists() and (not anchor or anchor in anchors(target))
        ):
            broken.append(link)
    assert broken == []


def test_messages_name_pages_and_headings_that_exist() -> None:
    for path in (REPOSITORY / "hvdtrain").rglob("*.py"):
        content = path.read_text()
        for page, anchor in re.findall(r"docs/([\w-]+\.md)(?:#([\w-]+))?", content):
            assert (DOCS / page).is_file(), (path, page)
            assert not anchor or anchor in anchors(DOCS / page), (path, page, anchor)
        for method, page in re.findall(r"a method (\w+)\(\) \(docs/([\w-]+\.md)", content):
            assert f"def {method}(" in (DOCS / page).read_text(), (path, method, page)


def test_index_links_to_every_page() -> None:
    index = DOCS / "README.md"
    assert "docs/README.md" in links(README)
    reached = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert {page.resolve() for page in PAGES} - {README, index} - reached == set()


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_docs_name_only_existing_keys(page: Path) -> None:
    groups = {key.partition(".")[0] for key in EVERY_KEY if "." in key}
    text = page.read_text().partition("## Keys of earlier versions")[0]
    flags = re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", text)
    words = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text)
    named = [word for word in words if word.partition(".")[0] in groups]
    assert {*flags, *named} - EVERY_KEY - INNER_GROUPS == set()


def test_site_includes_every_page() -> None:
    site = runpy.run_path(str(DOCS / "site/build.py"))
    found = {REPOSITORY / path for _, path in site["pages"]()}
    assert found | {README, DOCS / "README.md"} == set(PAGES)


def test_site_includes_every_docs_file_that_a_page_links_to(tmp_path: Path) -> None:
    site = runpy.run_path(str(DOCS / "site/build.py"))
    pages = ["README.md", "docs/README.md", *(path for _, path in site["pages"]())]
    site["stage"](tmp_path, pages)
    for page in pages:
        targets = [
            (REPOSITORY / page).parent / link.partition("#")[0] for link in links(REPOSITORY / page)
        ]
        ours = [target.resolve() for target in targets if target.resolve().is_relative_to(DOCS)]
        missing = [
            t for t in ours if t.is_file() and not (tmp_path / t.relative_to(REPOSITORY)).exists()
        ]
        assert missing == [], page


def _ours() -> Iterator[str]:
    """Return the replacements of other tools' flags: code in the tables' last cells."""
    for row in re.findall(r"^\|.*\|$", (DOCS / "coming-from.md").read_text(), re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", row.split(" | ")[-1])


KEYS = sorted({code for code in _ours() if re.match(r"--[a-z_.]+ ", code) and "-np" not in code})
COMMANDS = sorted({code for code in _ours() if code.startswith("hvdtrain ")})


@pytest.mark.parametrize("flags", KEYS)
def test_flags_of_the_migration_page_are_accepted(flags: str) -> None:
    tasks = ("image", "huggingface")
    task = next((task for task in tasks if f"--{task}." in flags), "language_model")
    parse(["--task", task, *shlex.split(flags)])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_migration_page_are_accepted(command: str) -> None:
    ours, _, keys = command.partition(" -- ")
    parse(shlex.split(keys))
    _, name, *arguments = shlex.split(ours)
    parser = _Parser()
    importlib.import_module(f"hvdtrain.commands.{name}").add_arguments(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {argument for argument in arguments if argument.startswith("--")} <= known
    choices = [action.choices for action in parser._actions if action.choices]
    words = [argument for argument in arguments[:1] if not argument.startswith("-")]
    assert all(any(word in chosen for chosen in choices) for word in words)


def test_migration_page_has_its_tables() -> None:
    assert len(KEYS) > 50 and len(COMMANDS) >= 5
