"""Query the exporters of all ranks concurrently, and compute the growth since the last query."""

from __future__ import annotations

import base64
import http.client
import math
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hvdtrain.errors import UserError
from hvdtrain.runtime.mesh import LABELS
from hvdtrain.telemetry.http_server import read_password
from hvdtrain.untrusted import parse_json, printable, read_regular

_RESPONSE_SECONDS = 2.0
_AT_ONCE = 64  # concurrent connections
_RESPONSE_BYTES = 16 << 20
_AXES = {label: axis for axis, label in LABELS.items()}
_NOT_QUERIED = "not queried yet"  # because too many other ranks did not answer
_PEAKS = ("phase_host_memory_peak_bytes", "phase_device_memory_peak_bytes")
# The other metrics of an exporter are mostly histograms, which are slow to parse.
_WANTED = (
    "hvdtrain_last_step ",
    "hvdtrain_loss ",
    "hvdtrain_world_size ",
    "hvdtrain_restarts_total ",
    "hvdtrain_lost_steps_total ",
    "hvdtrain_borrowed_node",
    "hvdtrain_run_start_timestamp_seconds ",
    "hvdtrain_last_step_timestamp_seconds ",
    "hvdtrain_samples_per_second ",
    "hvdtrain_phase_seconds_total{",
    "hvdtrain_micro_batches ",
    "hvdtrain_straggler_score ",
    "hvdtrain_straggler{",
    "hvdtrain_stuck_seconds ",
    "hvdtrain_host_memory_bytes ",
    "hvdtrain_device_memory_bytes ",
    *(f"hvdtrain_{name}{{" for name in _PEAKS),
    "hvdtrain_comm_axis_seconds_total{",
    "hvdtrain_pipeline_",
)


@dataclass(frozen=True)
class Target:
    """A rank's exporter, from the discovery file.

    Args:
        address: host:port
        run, rank, host: "" if the file lacks it
        place: for a model that spans ranks: (axis, position of the rank on it), outermost first
    """

    address: str
    scheme: str
    run: str
    rank: str
    host: str
    place: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Rank:
    """Current state of a rank.

    Args:
        problem: why it did not answer; "" if it did
        values: values of series without labels, by name without hvdtrain_; also AXIS_wait_seconds,
            borrowed_used_seconds and borrowed_idle_seconds
        phases: seconds of the process in each phase so far
        shares: shares of the time since the previous answer, in [0, 1]; empty without a previous
            answer
        slow: phase in which the rank is reported as slow, or that it is stuck; "" if neither
        peak: (peak memory in bytes, phase that used it): of the device if there is one
    """

    target: Target
    problem: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    slow: str = ""
    peak: tuple[float, str] = (0.0, "")


def read_targets(file: Path) -> list[Target]:
    """Read the exporters in a file_sd file, in its order.

    Raises:
        FileNotFoundError: it does not exist (any more).
        UserError: it cannot be read, or has another format.
    """
    try:
        return list(_targets(parse_json(read_regular(file))))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise UserError(
            f"{file} is not a list of targets in the format of a run's targets.json"
        ) from None


def _targets(entries: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    places = set()
    for entry in entries:
        labels = entry.get("labels", {})
        scheme = str(labels.get("__scheme__", "http"))
        names = (printable(str(labels.get(name, ""))) for name in ("run", "rank", "host"))
        run, rank, host = names
        place = tuple((_AXES[name], int(at)) for name, at in labels.items() if name in _AXES)
        places.add(tuple(axis for axis, _ in place))
        if len(places) > 1 or not all(0 <= at < len(entries) for _, at in place):
            raise ValueError("the ranks do not form one grid")
        for address in entry["targets"]:
            yield Target(printable(str(address)), scheme, run, rank, host, place)


class Scraper:
    """Query ranks, keeping each rank's last answer to compute the growth since then.

    Args:
        auth_file: file with one line user:password; None: no password.
        ca_file: certificates to trust in addition to the system's (PEM), for HTTPS.

    Raises:
        UserError: a file cannot be used.
    """

    def __init__(self, auth_file: str | None, ca_file: str | None) -> None:
        self._headers = {}
        if auth_file is not None:
            secret = base64.b64encode(read_password(auth_file, "--auth-file")).decode()
            self._headers["Authorization"] = f"Basic {secret}"
        self._tls = ssl.create_default_context()
        if ca_file is not None:
            try:
                self._tls.load_verify_locations(ca_file)
            except OSError as error:  # includes ssl.SSLError
                reason = error.strerror or error
                raise UserError(f"--ca-file {ca_file} cannot be used ({reason})") from None
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="scrape")
        self._last: dict[Target, Rank] = {}

    def ranks(self, targets: Sequence[Target]) -> list[Rank]:
        """Query all ranks without waiting for those that do not answer in time."""
        # Ranks that did not answer last time are queried last, so that no other rank waits.
        turns = {"": 0, _NOT_QUERIED: 1}
        order = sorted(targets, key=lambda target: turns.get(self._of(target).problem, 2))
        begun: dict[Target, float] = {}
        asked = {target: self._pool.submit(self._query, target, begun) for target in order}
        _wait_for(list(asked.values()))
        found = {target: self._result(target, asked[target], begun) for target in targets}
        self._last = found
        return list(found.values())

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, target: Target) -> Rank:
        return self._last.get(target, Rank(target))

    def _query(self, target: Target, begun: dict[Target, float]) -> str:
        begun[target] = time.monotonic()
        name, _, port = target.address.rpartition(":")
        host = name.strip("[]")
        connection: http.client.HTTPConnection
        if target.scheme == "https":
            connection = http.client.HTTPSConnection(
                host, int(port), timeout=_RESPONSE_SECONDS, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(host, int(port), timeout=_RESPONSE_SECONDS)
        try:
            connection.request("GET", "/metrics", headers=self._headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"{answer.status} {answer.reason}")
            return answer.read(_RESPONSE_BYTES).decode()
        finally:
            connection.close()

    def _result(self, target: Target, answer: Future[str], begun: Mapping[Target, float]) -> Rank:
        if answer.cancel() or not answer.done():
            # A connection may become free at the end of the wait: that query had no time.
            had_time = time.monotonic() - begun.get(target, math.inf) > _RESPONSE_SECONDS / 2
            problem = "timed out" if had_time else _NOT_QUERIED
            return Rank(target, problem, phases=self._of(target).phases)
        try:
            return _parse(target, answer.result(), self._of(target).phases)
        except Exception as error:
            # Any program may listen on that port and answer anything.
            return Rank(target, _reason(error), phases=self._of(target).phases)


def _wait_for(answers: Sequence[Future[str]]) -> None:
    """Wait until all answers are there, or none has arrived for the time limit of one rank."""
    waiting, since = set(answers), time.monotonic()
    while waiting and time.monotonic() - since < _RESPONSE_SECONDS:
        done, waiting = wait(waiting, timeout=_RESPONSE_SECONDS / 10)
        if any(not answer.cancelled() and answer.exception() is None for answer in done):
            since = time.monotonic()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return printable(str(getattr(error, "strerror", None) or error or type(error).__name__))


def _parse(target: Target, text: str, before: Mapping[str, float]) -> Rank:
    values, phases, slow = {}, {}, ""
    peaks: dict[str, tuple[float, str]] = {}
    lines = "".join(line + "\n" for line in text.split("\n") if line.startswith(_WANTED))
    for family in text_string_to_metric_families(lines):
        for sample in family.samples:
            name = sample.name.removeprefix("hvdtrain_")
            if name == "phase_seconds_total":
                phases[printable(sample.labels["phase"])] = sample.value
            elif name == "borrowed_node_seconds_total":
                values[f"borrowed_{sample.labels['state']}_seconds"] = sample.value
            elif name == "comm_axis_seconds_total":
                values[f"{sample.labels['axis']}_wait_seconds"] = sample.value
            elif name in _PEAKS:
                reached = sample.value, printable(sample.labels["phase"])
                peaks[name] = max(reached, peaks.get(name, reached))
            elif name == "straggler":
                slow = printable(sample.labels["phase"]) if sample.value else slow
            else:
                values[name] = sample.value
    if not phases:
        raise ValueError("no metrics of hvdtrain")
    host, device = (peaks.get(name, (0.0, "")) for name in _PEAKS)
    peak = device if device[0] else host
    if stuck := values.get("stuck_seconds"):
        slow = f"stuck for {stuck:.0f} s"
    return Rank(target, "", values, phases, _shares(phases, before), slow, peak)


def _shares(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    growth = {phase: seconds - before.get(phase, 0.0) for phase, seconds in now.items()}
    total = sum(growth.values())
    # A process that replaced another one counts from 0.
    if not before or total <= 0 or min(growth.values()) < 0:
        return {}
    return {phase: seconds / total for phase, seconds in growth.items()}
