"""Safe reading of files, JSON and names that any user may have written: limits, checks, escapes.

All readers of run directories use these functions, because `hvdtrain ls` and
`hvdtrain report --serve` read directories that several users share.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

# More than the size of any small file of a run: a manifest, a token, a list of targets.
SMALL_FILE_BYTES = 64 << 20
# More than the length of any line of a run, even with metrics of ten thousand ranks.
LINE_BYTES = 64 << 20
# A configuration with the paths of some ten thousand files; YAML is parsed at 1 MB/s.
_YAML_BYTES, _YAML_NODES = 4 << 20, 1_000_000

T = TypeVar("T")


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read its bytes; a pipe or a device in its place counts as absent.

    Opening or reading a pipe or a device may block or never end.

    Raises:
        OSError: there is no regular file, or it cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return open(handle, "rb")
    os.close(handle)
    raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError: there is no regular file, it has more than SMALL_FILE_BYTES, or cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SMALL_FILE_BYTES:
            return file.read(size)
    raise OSError(errno.EFBIG, f"it has more than {SMALL_FILE_BYTES} bytes", str(path))


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(content: bytes | str) -> Any:
    """Return the value of a YAML text, which may contain only plain objects.

    Raises:
        ValueError: it is not YAML, or larger than any configuration.
    """
    import yaml

    if len(content) > _YAML_BYTES:
        raise ValueError(f"it has more than {_YAML_BYTES} bytes")
    try:
        text = content.decode() if isinstance(content, bytes) else content
        found = yaml.safe_load(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # Values with wrong tags raise the exceptions of Python's own conversions.
        raise ValueError(str(error) or type(error).__name__) from None
    # An alias can repeat a value without end, and a value can contain itself.
    nodes = [found]
    for _ in range(_YAML_NODES):
        if not nodes:
            return found
        node = nodes.pop()
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, (list, set, tuple)):
            nodes += node
    raise ValueError(f"it has more than {_YAML_NODES} values")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file.

    Raises:
        OSError: see `read_regular`.
        ValueError: it is not a JSON object.
    """
    content = parse_json(read_regular(path))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None."""
    try:
        content = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def json_objects(file: BufferedReader) -> Iterator[dict[str, Any] | None]:
    """Yield for each line its JSON object, or None if it has none or exceeds LINE_BYTES."""
    while line := file.readline(LINE_BYTES):
        if len(line) < LINE_BYTES or line.endswith(b"\n"):
            yield json_object(line)
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES)
        yield None


def real(value: object) -> float | None:
    """Return a number, finite or not; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        float(value)
    except OverflowError:
        return None
    return value


def number(value: object) -> float | None:
    """Return a finite number, or None."""
    found = real(value)
    return found if found is not None and math.isfinite(found) else None


def integer(value: object) -> int | None:
    """Return a finite number as an integer, or None."""
    found = number(value)
    return None if found is None else int(found)


def checked(kind: type[T], content: Mapping[str, Any]) -> T:
    """Build a dataclass from JSON values; unknown fields are ignored.

    Raises:
        ValueError: a field is missing, or its value is not of the field's type.
    """
    found = {}
    for name, of, required in _fields(kind):  # type: ignore[arg-type]
        if name in content:
            value = found[name] = content[name]
            # Most values are of these types, and a run has a line per step.
            if of is not type(value) and not is_of(value, of):
                raise ValueError(f"{name} is {shown(value)}")
        elif required:
            raise ValueError(f"{name} is missing")
    return kind(**found)


@cache
def _fields(kind: type) -> list[tuple[str, Any, bool]]:
    """Return (name, type, whether a value is required) of each field of a dataclass."""
    # Imported here: every command imports this module, and `hvdtrain discover` runs each second.
    from dataclasses import MISSING, fields

    hints = get_type_hints(kind)
    return [
        (f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING)
        for f in fields(kind)
    ]


def is_of(value: object, kind: Any) -> bool:
    """Whether a JSON value has a type: int, float, str, bool, None, list, tuple, dict, unions."""
    if kind is Any:
        return True
    if kind is float:
        return real(value) is not None
    if kind is int:
        return isinstance(value, int) and real(value) is not None
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(is_of(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(is_of(one, inner[0]) for one in value)
    if origin is tuple:
        if not isinstance(value, tuple) or len(value) != len(inner):
            return False
        return all(is_of(one, its) for one, its in zip(value, inner, strict=True))
    if origin is dict:
        # JSON keys are always strings.
        return isinstance(value, dict) and all(is_of(one, inner[1]) for one in value.values())
    return value is None if kind in (None, NoneType) else isinstance(value, kind)


def shown(value: object, most: int = 60) -> str:
    """Format a value for a message: JSON, truncated and printable."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError, TypeError):
        text = type(value).__name__
    return printable(text if len(text) <= most else f"{text[: most - 3]}...")


def printable(text: str) -> str:
    r"""Escape text for one line of a terminal: control characters become \x1b, \n and so on."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def printable_lines(text: str) -> str:
    """Escape as `printable`, but keep newlines and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
