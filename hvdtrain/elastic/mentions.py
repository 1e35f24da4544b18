"""Which parts of a package a script uses, itself or in modules of its project that it imports.

The files are read, not run: a launcher must know before it starts the script.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

_FILE_BYTES = 1 << 20
_FILES = 500  # of a project
_NOT_OF_A_PROJECT = ("hvdtrain", "horovod", "torch")


def find_module(name: str, directories: Sequence[str]) -> Path | None:
    """Return the file of a module below these directories; None if there is none.

    A package has the file that `python -m` runs, or else the one that an import runs.
    """
    files = _files_of(name, directories)
    if files and files[-1].name == "__init__.py":
        main = files[-1].with_name("__main__.py")
        return main if main.is_file() else files[-1]
    return files[-1] if files else None


def uses(script: Path, package: str, part: str, directories: Sequence[str]) -> bool:
    """Whether a script, or a module that it imports, uses a part of a package.

    Args:
        package, part: such as "horovod" and "elastic".
        directories: in which imported modules are looked for, as in sys.path.
    """
    waiting, seen = deque([Path(os.path.abspath(script))]), set[Path]()
    while waiting and len(seen) < _FILES:
        path = waiting.popleft()  # the project's own files first
        if path in seen:
            continue
        seen.add(path)
        tree = _parsed(path)
        if tree is None:
            continue
        if _mentions(tree, package, part):
            return True
        for name, level, _ in _imports(tree):
            # A relative import begins in the directory of its own package.
            parents = [str(parent) for parent in path.parents]
            waiting += _files_of(name, parents[level - 1 : level] if level else directories)
    return False


def _parsed(path: Path) -> ast.AST | None:
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own
            return ast.parse(file.read(_FILE_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Yield what is imported, and may be a module, its relative level, and the name it gets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, 0, one.asname or one.name.split(".")[0]) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            yield from (
                (module + one.name, node.level, one.asname or one.name) for one in node.names
            )


def _files_of(name: str, directories: Sequence[str]) -> list[Path]:
    """Return the files that an import of a module runs: of its packages, and its own."""
    found: list[Path] = []
    places: Sequence[str] | None = directories
    if name.partition(".")[0] in _NOT_OF_A_PROJECT:
        return []
    for part in name.split("."):
        spec = PathFinder.find_spec(part, list(places)) if places else None
        if spec is None:
            break
        if spec.origin is not None and spec.origin.endswith(".py"):
            found.append(Path(spec.origin))
        places = spec.submodule_search_locations
    return found


def _mentions(tree: ast.AST, package: str, part: str) -> bool:
    """Whether a file imports a module of a package, or reads it as an attribute.

    Examples: hvd.elastic after `import horovod.torch as hvd`, and
    `from horovod.torch.elastic import run`.
    """
    found = [(path.split("."), name) for path, level, name in _imports(tree) if not level]
    ours = [(words, name) for words, name in found if words[0] == package]
    names = {name for _, name in ours}  # bound to the package or one of its modules
    nodes = list(ast.walk(tree))
    if ([package, "*"], "*") in ours:
        return any(isinstance(node, ast.Name) and node.id == part for node in nodes)
    attributes = [one.value for one in nodes if isinstance(one, ast.Attribute) and one.attr == part]
    return any(part in words for words, _ in ours) or any(_root(one) in names for one in attributes)


def _root(value: ast.expr) -> str:
    """Return the name at the start of a.b.c; "" for any other expression."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""
