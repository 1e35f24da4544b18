"""A real Prometheus on a host of a cluster, with the committed configuration and rules."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.support.cluster import Cluster
from tests.support.dashboard import PROMETHEUS

ADDRESS = "127.0.0.1:9090"
# Prometheus listens on its host only, so queries are sent from there.
_ASK = """
import json, sys, urllib.error, urllib.request
def ask(url):
    try:
        return json.load(urllib.request.urlopen(url, timeout=10))
    except urllib.error.HTTPError as error:
        return {"status": "error", "error": error.read().decode()}
    except OSError as error:
        return {"status": "error", "error": str(error)}
print(json.dumps([ask(url) for url in sys.argv[1:]]))
"""


def minutes_to_seconds(rules: str) -> str:
    """Return rules with all times divided by 60: `for`, windows and thresholds in seconds.

    They are written as 5m, 1h, 1d, or 5 * 60.
    """
    shorter = {"m": lambda n: f"{n}s", "h": lambda n: f"{n}m", "d": lambda n: f"{24 * n}m"}
    times = re.compile(r"(?<=\[)(\d+)([mhd])(?=\])|(?<=for: )(\d+)([mhd])$", re.MULTILINE)
    text = times.sub(lambda m: shorter[m[2] or m[4]](int(m[1] or m[3])), rules)
    text = text.replace(" * 60", " * 1")
    # Names of recording rules contain their window; they stay unchanged.
    assert not re.search(r"\[\d+[hd]\]|for: \d+m", text), text
    return text


class Prometheus:
    """A Prometheus that scrapes and evaluates every second, with the committed configuration.

    Args:
        host: its host.
        directory: an empty directory for its files, which the host sees.
        root: run.root of the runs.

    Raises:
        AssertionError: it did not start; the message contains its output.
    """

    def __init__(self, cluster: Cluster, host: str, directory: Path, root: Path) -> None:
        self._cluster, self._host = cluster, host
        text = (PROMETHEUS / "prometheus.yml").read_text()
        config = yaml.safe_load(text.replace("/runs/", f"{root}/"))
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
        config["global"] |= {"evaluation_interval": "1s"}
        (directory / "rules").mkdir(parents=True)
        for path in (PROMETHEUS / "rules").glob("*.yml"):
            (directory / "rules" / path.name).write_text(minutes_to_seconds(path.read_text()))
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        program = shutil.which("prometheus")
        assert program, "prometheus is not installed"
        options = [
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
        ]
        self.job = cluster.start(
            host, [program, *options, f"--web.listen-address={ADDRESS}"], cwd=directory
        )
        self.job.wait_for("Server is ready to receive web requests", 30)

    def queries(self, exprs: list[str]) -> list[list[dict[str, Any]]]:
        """Return the series of each query: {"metric": labels, "value": [time, text]}.

        Raises:
            AssertionError: a query is wrong.
        """
        return [
            d["result"] for d in self._get(*(f"query?{urlencode({'query': e})}" for e in exprs))
        ]

    def ranges(self, exprs: list[str], seconds: float) -> list[list[dict[str, Any]]]:
        """Return the series of each query over the past seconds, a point each second.

        Returns:
            {"metric": labels, "values": [[time, text], ...]} each.

        Raises:
            AssertionError: a query is wrong.
        """
        now = time.time()
        span = {"start": now - seconds, "end": now, "step": 1}
        paths = (f"query_range?{urlencode({'query': e, **span})}" for e in exprs)
        return [d["result"] for d in self._get(*paths)]

    def query(self, expr: str) -> list[dict[str, Any]]:
        return self.queries([expr])[0]

    def firing(self, name: str) -> list[dict[str, str]]:
        """Return the labels of the alerts of this name that fire now."""
        (data,) = self._get("alerts")
        every = (a["labels"] for a in data["alerts"] if a["state"] == "firing")
        return [labels for labels in every if labels["alertname"] == name]

    def wait_for(self, name: str, seconds: float, **labels: str) -> float:
        """Wait until an alert with these labels fires; return how long that took."""
        return self._wait(
            lambda: any(labels.items() <= found.items() for found in self.firing(name)),
            seconds,
            f"{name} {labels}",
        )

    def wait_for_end(self, name: str, seconds: float) -> float:
        """Wait until no alert of this name fires."""
        return self._wait(lambda: not self.firing(name), seconds, f"the end of {name}")

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        begin = time.monotonic()
        while not condition():
            if time.monotonic() - begin > seconds:
                (alerts,) = self._get("alerts")
                raise AssertionError(f"waited {seconds} s without success for {what}: {alerts}")
            time.sleep(0.5)  # each query starts a process on the ranks' cores
        return time.monotonic() - begin

    def _get(self, *paths: str) -> list[dict[str, Any]]:
        urls = [f"http://{ADDRESS}/api/v1/{path}" for path in paths]
        done = self._cluster.run(self._host, [sys.executable, "-SEc", _ASK, *urls], timeout=60)
        assert done.returncode == 0, done
        answers = json.loads(done.stdout)
        for url, answer in zip(urls, answers, strict=True):
            assert answer["status"] == "success", (url, answer, self.job.output()[-2000:])
        return [answer["data"] for answer in answers]
