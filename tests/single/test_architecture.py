"""Import layers of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hvdtrain

PACKAGE = Path(__file__).resolve().parents[2] / "hvdtrain"
# A package imports only from itself and from packages of lower rows.
ROWS = [
    {"train", "cli", "commands"},
    {"doctor", "plan"},
    {"report", "bench", "top", "deploy", "api", "check"},
    {"audit"},
    {"process", "supervise"},
    {"config"},
    {"engine"},
    {"elastic", "exchange", "parallel"},
    {"tasks", "horovod_wheel"},
    {"models", "data", "optim", "checkpoint", "telemetry", "launch", "comm", "agent"},
    {"run_files"},
    {"runtime"},
    {"log", "files", "config_files", "config_checks", "config_tiers"},
    {"errors", "untrusted", "text", "streams", "file_thread", "version"},
]
EXPORTED = [f"hvdtrain.{name}" for name in ("__version__", *hvdtrain.__all__)]
LEVEL = {room: -number for number, row in enumerate(ROWS) for room in row}
# `hvdtrain bench` measures whole programs: it drives the programs of the first row.
ALLOWED_UPWARDS = {("bench", "train")}
MAY_IMPORT_HOROVOD_TORCH = {"runtime", "exchange", "horovod_wheel"}


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def _imports(path: Path) -> Iterator[str]:
    """Full names of the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def test_layers_list_exactly_the_existing_packages() -> None:
    rooms = {_room(path) for path in _files()} - {"__init__"}
    assert rooms == set(LEVEL)


@pytest.mark.parametrize("room", sorted(LEVEL))
def test_package_imports_only_from_lower_layers(room: str) -> None:
    wrong = []
    for path in _files():
        for name in _imports(path) if _room(path) == room else ():
            if name in ("hvdtrain", *EXPORTED):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}, which imports upwards")
            other = name.split(".")[1] if name.startswith("hvdtrain.") else ""
            if other in (room, "") or other not in LEVEL or (room, other) in ALLOWED_UPWARDS:
                continue
            if LEVEL[other] >= LEVEL[room]:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_horovod_torch_is_imported_only_by_allowed_packages() -> None:
    users = {
        _room(path)
        for path in _files()
        if any(name.startswith("horovod.torch") for name in _imports(path))
    }
    assert users <= MAY_IMPORT_HOROVOD_TORCH, users


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_module_imports_are_acyclic() -> None:
    modules = {_module(path) for path in _files()}
    graph: dict[str, set[str]] = {}
    for path in _files():
        names = set(_imports(path)) | {name.rpartition(".")[0] for name in _imports(path)}
        graph[_module(path)] = (names & modules) - {_module(path), "hvdtrain"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_test_file_imports_another() -> None:
    tests = PACKAGE.parent / "tests"
    imported = {
        (str(path.relative_to(tests)), name)
        for path in tests.rglob("*.py")
        for name in _imports(path)
        if name.startswith("tests.")
        and any(part.startswith("test_") for part in name.split(".")[:3])
    }
    assert not imported, imported
