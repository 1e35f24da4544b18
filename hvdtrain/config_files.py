"""Helpers of the configuration parser for files, flags, and jsonargparse's messages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.untrusted import parse_yaml, read_regular, shown


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = parse_yaml(read_regular(path)) or {}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: keys and values are expected, not {shown(content)}")
    return content


def flag_names(flags: Sequence[str]) -> Iterator[str]:
    """Yield the keys of flags, `--key value`, `--key=value` or `--key+ value`."""
    yield from (a[2:].partition("=")[0].rstrip("+") for a in flags if a.startswith("--"))


def yaml_text(content: Mapping[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False))


def dotted(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def readable(message: str) -> str:
    """Shorten jsonargparse's message about a wrong value to one line."""
    text = " ".join(message.split())
    key = re.search(r'[Kk]ey "([^"]+)"', text)
    unknown = re.search(r"Option '([^']+)' is not accepted", text)
    if key and unknown:  # in a value that is a mapping
        return f"{key[1]}: unknown key {unknown[1]}"
    kinds = re.findall(r"Expected an? (.*?)(?= - Expected|\.? G(?:ot|iven) value|$)", text)
    value = re.search(r"G(?:ot|iven) value: ?(.*)$", text)
    if not (key and kinds and value):
        return text
    expected = re.sub(r"<class '(\w+)'>", r"\1", " or ".join(kinds)).replace("typing.", "")
    expected = re.sub(r"Literal\[(.*?)\]", r"one of \1", expected).replace("NoneType", "null")
    return f"{key[1]}: expected {expected}, not {value[1] or 'nothing'}"
