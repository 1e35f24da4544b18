"""A page as headless Chromium shows it."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

WIDTH = 1120


@dataclass
class Shown:
    """What became of a page.

    Args:
        dom: after it was loaded
        complaints: lines that the page wrote to the console
        pixels: height x width x RGB, 0 to 255
    """

    dom: str
    complaints: list[str]
    pixels: np.ndarray

    def count(self, colour: str, near: int = 12) -> int:
        """Pixels that have about this colour, such as #3b82c4."""
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        return int((np.abs(self.pixels - wanted).max(axis=2) <= near).sum())

    def blank_stretches(self, height: int = 300) -> list[int]:
        """Tops of the stretches of the page that hold next to no colours, up to its last ink."""
        background = self.pixels[0, 0]
        inked = np.nonzero((self.pixels != background).any(axis=(1, 2)))[0]
        end = int(inked[-1]) if len(inked) else height
        tops = range(0, max(end - height, 1), height)
        return [
            top
            for top in tops
            if len(np.unique(self.pixels[top : top + height].reshape(-1, 3), axis=0)) < 20
        ]


def show(page: Path, folder: Path, height: int, dark: bool = False) -> Shown:
    """Opens a page in a window of WIDTH x `height`; skips without Chromium, but not in CI."""
    chromium = shutil.which("chromium")
    if chromium is None:
        if os.environ.get("CI") == "true":
            pytest.fail("the tests of pages need Chromium in CI")
        pytest.skip("there is no chromium")
    picture = folder / "page.png"
    command = [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        f"--window-size={WIDTH},{height}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    ran = [
        subprocess.run(
            [*command, how, page.resolve().as_uri()],
            capture_output=True,
            text=True,
            timeout=90,
            check=True,
        )
        for how in ("--dump-dom", f"--screenshot={picture}")
    ]
    complaints = [line for done in ran for line in done.stderr.splitlines() if "CONSOLE" in line]
    pixels = np.round(imread(picture)[:, :, :3] * 255).astype(np.int16)
    return Shown(ran[0].stdout, complaints, pixels)
