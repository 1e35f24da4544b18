"""Small datasets that a model can learn: tables, and directories of images by class."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

# Configuration keys for `sales`.
KEYS = [
    *("--task", "tabular", "--tabular.label", "sold", "--tabular.ignore", "price"),
    *("--tabular.split_by", "day", "--tabular.width", "16", "--tabular.layers", "1"),
    *("--tabular.heads", "2"),
]


def sales(rows: int = 600) -> pa.Table:
    """Return a table in which cheap and blue articles are sold; some cells, labels and shops are
    rare or missing.

    The last days have a shop that does not occur before.
    """
    draw = np.random.default_rng(0)
    price = draw.gamma(2.0, 10.0, rows)
    colors = draw.choice(["blue", "red", "green"], rows)
    days = np.sort(draw.integers(0, 60, rows))
    shops = np.where(draw.random(rows) < 0.02, "rare", draw.choice(["north", "south"], rows))
    shops = np.where((days > 55) & (draw.random(rows) < 0.5), "new", shops)
    chance = 1 / (1 + np.exp((price - 20) / 4 - 2.0 * (colors == "blue")))
    sold: list[str | None] = ["yes" if won else "no" for won in draw.random(rows) < chance]
    unknown = draw.random((3, rows)) < 0.03
    first = datetime.date(2024, 12, 1)
    columns: dict[str, Any] = {
        "day": [first + datetime.timedelta(days=int(day)) for day in days],
        "cost": [None if gone else float(x) for x, gone in zip(price, unknown[0], strict=True)],
        "colour": [None if gone else x for x, gone in zip(colors, unknown[1], strict=True)],
        "shop": shops,
        "number": draw.integers(1000, 1005, rows),
        "country": ["here"] * rows,
        "price": price,
        "sold": [None if gone else x for x, gone in zip(sold, unknown[2], strict=True)],
    }
    return pa.table(columns)


def write(table: pa.Table, path: Path, rows: int = 100) -> Path:
    """Write a table as CSV or Parquet, by suffix, with `rows` rows per row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path, row_group_size=rows)
    return path


CLASSES = ("blue", "green", "red")


def draw(root: Path, each: int, size: int = 40, classes: tuple[str, ...] = CLASSES) -> Path:
    """Draw images of noise in which the color of the class is brighter.

    Args:
        each: number of images per class.
        size: side in pixels.

    Returns:
        `root`.
    """
    from PIL import Image

    random = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = random.integers(0, 128, (size, size + 8, 3), dtype=np.uint8)
            pixels[:, :, ("red", "green", "blue").index(name)] += 100
            suffix = "jpg" if number % 2 else "png"
            Image.fromarray(pixels).save(root / name / f"{number:03}.{suffix}")
    return root


def cut_off(file: Path) -> Path:
    """Truncate a file to its first half; return it."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return file
