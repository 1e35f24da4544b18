"""A real Prometheus scrapes a real run: 4 ranks on 2 hosts, with faults in turn.

Its configuration and rules are the committed ones with all durations divided by 60: minutes become
seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.dashboard import Query, queries, rules
from tests.support.faults import ElasticJob
from tests.support.job import poll
from tests.support.prometheus import Prometheus

pytestmark = pytest.mark.alone
FOUR = 4
RUN = 'run="case"'
RESTARTS = f"max(hvdtrain_restarts_total{{{RUN}}})"
RECOVERIES = f"max(hvdtrain_recovery_seconds_count{{{RUN}}})"
ARGUMENTS = (
    "--task tests.support.disturbed:Controlled --train.duration 1000000 --eval.every 50"
    " --telemetry.port 9855 --telemetry.exchange_every 5 --checkpoint.every 5"
    " --train.max_nonfinite 1000 --telemetry.peak_flops 1e11"
    # Ranks are stopped for some seconds here, and must not be removed.
    " --elastic.timeout_seconds 60"
)
# (panel, legend) of the queries without data here -> reason.
EMPTY = {
    ("Pipeline bubble", "measured"): "the model does not span ranks",
    ("Pipeline bubble", "formula"): "the model does not span ranks",
    ("Steps that a crash would repeat", "since the copy in memory"): "checkpoint.memory is off",
    **{
        (f"GPU {metric}, by rank", "rank {{rank}} on {{host}}"): "there is no GPU"
        for metric in ("utilization", "power", "clock")
    },
}


class Watched(NamedTuple):
    job: ElasticJob
    prometheus: Prometheus
    control: Path
    begin: float

    @contextlib.contextmanager
    def disturbed(self, name: str) -> Iterator[None]:
        """Inside the context `Controlled` or `Lagging` finds this file."""
        (self.control / name).touch()
        yield
        (self.control / name).unlink()

    def value(self, expr: str) -> float:
        """Return the value of the only series; NaN if there is none."""
        found = self.prometheus.query(expr)
        return float(found[0]["value"][1]) if found else float("nan")


@pytest.fixture(scope="module")
def watched(two_hosts: Cluster) -> Iterator[Watched]:
    if shutil.which("prometheus") is None and os.environ.get("CI") == "true":
        pytest.fail("prometheus is not installed")
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    directory = two_hosts.shared / "prometheus"
    control = directory / "control"
    control.mkdir(parents=True)
    (directory / "runs").mkdir()
    env = {"HVDTRAIN_TEST_CONTROL": str(control), "HVDTRAIN_TEST_LAG": f"3:0.1:{control}/lag"}
    begin = time.time()
    prometheus = Prometheus(two_hosts, "node1", directory / "prometheus", directory / "runs")
    job = ElasticJob(two_hosts, directory / "runs", arguments=ARGUMENTS, env=env)
    try:
        job.wait_for_step(5)
        yield Watched(job, prometheus, control, begin)
    finally:
        job.job.kill()
        prometheus.job.kill()
        two_hosts.kill(two_hosts.ranks())


def test_every_rank_is_scraped_with_its_own_labels(watched: Watched) -> None:
    def up() -> list[dict]:
        return watched.prometheus.query(f"up{{{RUN}}} == 1")

    poll(lambda: len(up()) == FOUR, 30, "four targets")
    found = {series["metric"]["rank"]: series["metric"] for series in up()}
    for rank in range(FOUR):
        host, local_rank = f"node{1 + rank // 2}", str(rank % 2)
        port = 9855 + rank % 2
        expected = {"run": "case", "host": host, "local_rank": local_rank, "job": "hvdtrain"}
        assert expected.items() <= found[str(rank)].items()
        assert found[str(rank)]["instance"] == f"{host}:{port}"
    assert json.loads((watched.job.run / "targets.json").read_text())


def test_nonfinite_loss_alert_fires_and_resolves(watched: Watched) -> None:
    with watched.disturbed("nan"):
        watched.prometheus.wait_for("LossNotFinite", 20, run="case", severity="critical")
    watched.prometheus.wait_for_end("LossNotFinite", 20)
    assert watched.value(f"max(hvdtrain_nonfinite_total{{{RUN}}})") > 0


def test_every_query_has_data_after_a_rank_is_killed(watched: Watched) -> None:
    killed = time.time()
    watched.job.kill(0)  # the process that exports the run's history
    poll(lambda: watched.value(RECOVERIES) >= 1, 60, "a recovery")
    watched.job.wait_for_world(FOUR, 60)
    watched.job.wait_for_more(50, 30)  # rates, exchanges, an evaluation, checkpoints
    seconds = time.time() - watched.begin
    every = queries("case", window="10s", span=f"{seconds:.0f}s", step="1s")
    every += [Query(r["record"], "", r["record"] + f"{{{RUN}}}") for r in rules("recording")]
    results = watched.prometheus.ranges([query.expr for query in every], seconds)
    empty = {
        (query.title, query.legend)
        for query, found in zip(every, results, strict=True)
        if not any(math.isfinite(float(value)) for s in found for _, value in s["values"])
    }
    assert empty <= set(EMPTY)
    for query, found in zip(every, results, strict=True):
        if "by rank" in query.title and (query.title, query.legend) not in EMPTY:
            assert {s["metric"]["rank"] for s in found} == set("0123"), query
    assert watched.value(f"sum(avg by (phase) (rate(hvdtrain_phase_seconds_total{{{RUN}}}[10s])))")
    by_title = dict(zip((query.title for query in every), results, strict=True))
    assert {s["metric"]["alertname"] for s in by_title["Alerts"]} >= {"LossNotFinite"}
    (restarts,) = by_title["annotation Restart"]
    assert 1 <= len(restarts["values"]) <= watched.value(f"max(hvdtrain_restarts_total{{{RUN}}})")
    assert all(at > killed for at, _ in restarts["values"]), "a mark without a restart"
    (checkpoints,) = by_title["annotation Checkpoint"]
    times = {float(value) / 1000 for _, value in checkpoints["values"]}
    saved = [event["time"] for event in watched.job.events("checkpoint")]
    assert len(times) > 5
    assert all(min(abs(at - end) for end in saved) < 1 for at in times), "a mark without a save"


def test_panels_by_rank_show_the_chosen_number_of_ranks(watched: Watched) -> None:
    seconds = time.time() - watched.begin
    every = queries("case", window="10s", span=f"{seconds:.0f}s", step="1s", top=2)
    every = [query for query in every if "by rank" in query.title]
    results = watched.prometheus.ranges([query.expr for query in every], seconds)
    for query, found in zip(every, results, strict=True):
        # A number moves to another host while a rank is missing.
        shown = {(s["metric"]["rank"], s["metric"]["host"]) for s in found}
        assert len(shown) == 2 or ((query.title, query.legend) in EMPTY and not shown), query


def test_stale_checkpoint_alert_fires_and_resolves(watched: Watched) -> None:
    good = watched.job.run / "checkpoints"
    kept = good.rename(good.with_name("kept"))
    good.write_text("no directory")
    watched.prometheus.wait_for("CheckpointStale", 40, run="case")
    assert watched.value(f"max(hvdtrain_checkpoint_failures_total{{{RUN}}})") > 0
    good.unlink()
    kept.rename(good)
    watched.prometheus.wait_for_end("CheckpointStale", 20)


def test_straggler_alert_names_a_rank_with_slow_data(watched: Watched) -> None:
    watched.job.wait_for_step(300, 60)  # the run's history, against which it becomes slow
    with watched.disturbed("lag"):
        watched.prometheus.wait_for(
            "Straggler", 30, run="case", rank="3", host="node2", phase="data", severity="warning"
        )
        line = watched.job.events("straggler")[-1]
        assert (line["rank"], line["host"], line["phase"]) == (3, "node2", "data")
        watched.prometheus.wait_for("ThroughputDropped", 30, run="case")
    watched.prometheus.wait_for_end("Straggler", 20)
    watched.prometheus.wait_for_end("ThroughputDropped", 20)


def test_straggler_alert_names_a_rank_with_half_a_processor(watched: Watched) -> None:
    with _short_of_processor(watched.job.process(2).pid):
        watched.prometheus.wait_for(
            "Straggler", 60, run="case", rank="2", host="node2", phase="compute"
        )
    assert "rank 2 on node2 is slow" in watched.job.job.output()
    watched.prometheus.wait_for_end("Straggler", 20)


def test_communication_bound_alert_fires_and_resolves(watched: Watched) -> None:
    with watched.disturbed("quick"):
        watched.prometheus.wait_for("CommunicationBound", 40, run="case")
    watched.prometheus.wait_for_end("CommunicationBound", 20)


def test_missing_rank_alerts_fire_and_resolve(watched: Watched) -> None:
    poll(lambda: watched.value(RESTARTS) >= 0, 30, "a first scrape")
    restarts = watched.value(RESTARTS)
    recoveries = watched.value(f"{RECOVERIES} or vector(0)")  # there may be none so far
    # A silent rank is removed before the alert fires, so only Prometheus is cut off here.
    watched.job.cluster.connections("node1", "node2", 9856, leave=False)
    watched.prometheus.wait_for("ExporterDown", 30, run="case", rank="3", host="node2")
    watched.job.cluster.connections("node1", "node2", 9856, leave=True)
    assert not watched.prometheus.firing("RankMissing")
    watched.job.kill(3)
    watched.job.set_hosts("node1:2 node2:1")  # otherwise its slot is used again too soon to be seen
    watched.prometheus.wait_for("RankMissing", 30, run="case", host="node2")
    assert {labels["host"] for labels in watched.prometheus.firing("RankMissing")} == {"node2"}
    assert watched.value(f"max(hvdtrain_world_size{{{RUN}}})") == FOUR - 1
    watched.prometheus.wait_for_end("ExporterDown", 20)
    assert watched.value(RECOVERIES) > recoveries
    assert watched.value(f"max(hvdtrain_recovery_seconds_sum{{{RUN}}})") < 30
    assert watched.value(RESTARTS) > restarts
    watched.job.set_hosts("node1:2 node2:2")
    watched.job.wait_for_world(FOUR, 60)
    watched.prometheus.wait_for_end("RankMissing", 30)


def test_stalled_training_alert_fires_and_resolves(watched: Watched) -> None:
    cluster = watched.job.cluster
    everyone = [pid for p in cluster.ranks() for pid in _with_watchdog(p.pid)]
    pids = [process.pid for host in ("node1", "node2") for process in cluster.processes(host)]
    everyone += [pid for pid in pids if psutil.Process(pid).name() == "hvdtrain-agent"]
    everyone.append(watched.job.launcher().pid)
    _send(signal.SIGSTOP, reversed(everyone))  # processes that would end ranks come first
    watched.prometheus.wait_for("TrainingStalled", 30, run="case", severity="critical")
    _send(signal.SIGCONT, everyone)
    watched.job.job.resume()
    watched.prometheus.wait_for_end("TrainingStalled", 30)
    watched.job.wait_for_more(5, 30)


def test_clean_end_of_a_run_leaves_no_alert(watched: Watched) -> None:
    watched.job.end()
    poll(lambda: not watched.prometheus.query(f"up{{{RUN}}}"), 30, "the end of the targets")
    for rule in rules("alerts"):
        watched.prometheus.wait_for_end(rule["alert"], 20)


def _with_watchdog(pid: int) -> list[int]:
    """Return a rank's process, then its watchdog."""
    children = psutil.Process(pid).children()
    return [pid, *(c.pid for c in children if "hvdtrain.elastic.watchdog" in c.cmdline())]


def _send(number: signal.Signals, pids: Iterator[int] | list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


@contextlib.contextmanager
def _short_of_processor(pid: int) -> Iterator[None]:
    """Throttle a process: it runs for 0.1 s, then stops for 0.3 s, and so on."""
    done = threading.Event()

    def stop_and_go() -> None:
        while not done.is_set():
            os.kill(pid, signal.SIGSTOP)
            done.wait(0.3)
            os.kill(pid, signal.SIGCONT)
            done.wait(0.1)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(5)
