"""A folder of class folders with small pictures that a model can tell apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

CLASSES = ("blue", "green", "red")


def draw(root: Path, each: int, size: int = 40, classes: tuple[str, ...] = CLASSES) -> Path:
    """Noise in which one colour is brighter: that of the class.

    Args:
        each: pictures of a class.
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
    """Leaves half of a file; returns it."""
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    return file
