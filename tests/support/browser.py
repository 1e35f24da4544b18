"""Pages in headless Chromium."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

WIDTH = 1120


@dataclass
class Shown:
    """A loaded page.

    Args:
        dom: the document after loading
        complaints: lines that the page wrote to the console
        pixels: height x width x RGB, 0 to 255
    """

    dom: str
    complaints: list[str]
    pixels: np.ndarray

    def count(self, color: str, near: int = 12) -> int:
        """Return the number of pixels of about this color, such as #3b82c4."""
        wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)])
        return int((np.abs(self.pixels - wanted).max(axis=2) <= near).sum())

    @property
    def text(self) -> str:
        """The visible words of the document, one element's text per line."""
        return re.sub(r"<[^>]*>", "\n", re.sub(r"(?s)<(script|style).*?</\1>", "", self.dom))

    def blank_stretches(self, height: int = 300) -> list[int]:
        """Return the tops of stretches with almost no colors, above the page's last ink."""
        background = self.pixels[0, 0]
        inked = np.nonzero((self.pixels != background).any(axis=(1, 2)))[0]
        end = int(inked[-1]) if len(inked) else height
        tops = range(0, max(end - height, 1), height)
        return [
            top
            for top in tops
            if len(np.unique(self.pixels[top : top + height].reshape(-1, 3), axis=0)) < 20
        ]


def show(page: Path, directory: Path, height: int, dark: bool = False) -> Shown:
    """Open a page in a window of WIDTH x `height`; skip without Chromium, except in CI."""
    picture = directory / "page.png"
    command = _command(directory, height, dark)
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
    return Shown(ran[0].stdout, complaints, _pixels(picture))


def content(page: str) -> dict[str, Any]:
    """Return what the HTML file of a report shows: see hvdtrain/report/page.py."""
    found = re.search(r'<script type="application/json" id="page">(.*?)</script>', page)
    assert found, page[:1000]
    return dict(json.loads(found[1]))


def _pixels(picture: Path) -> np.ndarray:
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB")).astype(np.int16)


class Tab:
    """A page that stays open, controlled by the DevTools protocol over Chromium's pipe.

    Attributes:
        complaints: lines that the page wrote to the console, and resources that it could not load.
    """

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._received = b""
        self._number = 0
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", "", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", "", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable", self._session)

    def open(self, url: str) -> None:
        self._call("Page.navigate", self._session, url=url)

    def resize(self, width: int, height: int) -> None:
        """Give the page the size of another screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", self._session, **size)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag the mouse between two points of the window."""
        for kind, (x, y) in (
            ("Moved", begin),
            ("Pressed", begin),
            ("Moved", end),
            ("Released", end),
        ):
            button = {"button": "left", "buttons": 1, "clickCount": 1}
            where = {"type": f"mouse{kind}", "x": x, "y": y, **button}
            self._call("Input.dispatchMouseEvent", self._session, **where)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; AssertionError if it throws."""
        found = self._call(
            "Runtime.evaluate", self._session, expression=expression, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, timeout: float, what: str) -> None:
        """Wait for a true expression; AssertionError with the page's text after the timeout."""
        deadline = time.monotonic() + timeout
        while not self.value(f"Boolean({expression})"):
            text = "document.body.innerText"
            assert time.monotonic() < deadline, f"no {what}: {self.value(text)} {self.complaints}"
            time.sleep(0.1)

    def shown(self, picture: Path) -> Shown:
        """Return the whole page in its current state, and write a PNG of it."""
        found = self._call(
            "Page.captureScreenshot", self._session, format="png", captureBeyondViewport=True
        )
        picture.write_bytes(base64.b64decode(found["data"]))
        dom = self.value("document.documentElement.outerHTML")
        return Shown(dom, self.complaints, _pixels(picture))

    def _call(self, method: str, session: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                self.complaints.append(json.dumps(answer["params"]))
            elif answer.get("method") == "Log.entryAdded":
                self.complaints.append(answer["params"]["entry"]["text"])

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._back], [], [], deadline - time.monotonic())
            assert ready, "Chromium does not answer"
            received = os.read(self._back, 2**20)
            assert received, "Chromium has ended"
            self._received += received
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def tab(directory: Path, height: int, dark: bool = False) -> Iterator[Tab]:
    """Open a window of WIDTH x `height` that stays open; skip without Chromium, except in CI."""
    command = [*_command(directory, height, dark), "--remote-debugging-pipe"]
    reads, to = os.pipe()
    back, writes = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4, so this process's ends must be neither.
    given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]
    script = f"exec {shlex.join(command)} 3<&{given[0]} 4>&{given[1]}"
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(["bash", "-c", script], pass_fds=given, stdout=log, stderr=log)
    for end in (reads, writes, *given):
        os.close(end)
    try:
        yield Tab(process, to, back)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
        os.close(to)
        os.close(back)


def _command(directory: Path, height: int, dark: bool) -> list[str]:
    """Return Chromium's command; skip the test without Chromium, but fail in CI."""
    chromium = shutil.which("chromium")
    if chromium is None:
        if os.environ.get("CI") == "true":
            pytest.fail("the tests of pages need Chromium in CI")
        pytest.skip("there is no chromium")
    return [
        *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        f"--user-data-dir={directory / 'profile'}",
        "--enable-logging=stderr",
        f"--window-size={WIDTH},{height}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
