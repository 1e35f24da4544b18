"""`hvdtrain plan`: cost model, inputs and output."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from math import inf, isclose
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from hvdtrain.cli import main
from hvdtrain.exchange.config import STRATEGIES, ExchangeConfig
from hvdtrain.plan import cluster
from hvdtrain.plan.cluster import Cluster, Link, parse_bandwidth, parse_seconds
from hvdtrain.plan.job import GradientBucket, JobProfile, StrategyCost, buckets_of, even_buckets
from hvdtrain.plan.layouts import ModelLayout, bubble, layouts, memory, step_seconds
from hvdtrain.plan.measure import costs_from, job_from, mean_of
from hvdtrain.plan.predict import BucketTransfer, overlap, predict, sent
from hvdtrain.plan.result import FailureModel, daly, goodput, young
from tests.soak.published import row, systems
from tests.support.browser import content
from tests.support.runs import train

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ExchangeConfig()

sizes = st.floats(1, 1e10)
latencies = st.floats(0, 1e-3)
links = st.builds(Link, st.floats(1e6, 1e12), latencies, st.floats(0.5, 1))
clusters = st.builds(
    Cluster,
    st.integers(1, 64),
    st.integers(1, 8),
    links,
    links,
    st.sampled_from(["ring", "hierarchical", "best"]),
    st.floats(0, 0.01),
    st.floats(0, 1e-9),
)
buckets = st.lists(
    st.builds(GradientBucket, st.integers(64 * 64, 10**8), st.floats(0, 1), st.just(((64, 64),))),
    min_size=1,
    max_size=5,
)
PREDICTED = ("dense", "float16", "bfloat16", "topk", "powersgd")
COSTS = {name: StrategyCost() for name in PREDICTED}
jobs = st.builds(
    JobProfile,
    *[st.floats(1e-4, 10)] * 4,
    st.integers(1, 512),
    st.integers(1, 16),
    buckets.map(tuple),
    st.just(COSTS),
)
WHOLE = {name: StrategyCost() for name in ("dense", "float16", "bfloat16", "topk")}
A_JOB = JobProfile(0.1, 0.2, 0.01, 0.0, 8, 4, even_buckets(10_000_000), WHOLE, optimizer_bytes=8e7)


def _two(hosts: int = 2, ranks: int = 1, gbit: float = 1.0) -> Cluster:
    return Cluster(hosts, ranks, Link(gbit * 1e9), Link(1e12))


@settings(max_examples=60, deadline=None)
@given(sizes, clusters)
def test_all_reduce_time_respects_link_bandwidth(size: float, c: Cluster) -> None:
    least = 2 * (c.hosts - 1) / c.hosts * size / c.between.bytes_per_second
    assert cluster.all_reduce(size, c) >= least * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(sizes, clusters)
def test_collectives_on_one_rank_take_no_time(size: float, c: Cluster) -> None:
    alone = replace(c, hosts=1, ranks_per_host=1)
    every = (cluster.all_reduce, cluster.all_gather, cluster.reduce_scatter)
    assert [collective(size, alone) for collective in every] == [0, 0, 0]


@settings(max_examples=60, deadline=None)
@given(sizes, clusters, st.floats(1, 10))
def test_all_reduce_time_grows_with_size_and_latency(
    size: float, c: Cluster, factor: float
) -> None:
    now = cluster.all_reduce(size, c)
    farther = replace(c, between=replace(c.between, latency=c.between.latency * factor))
    assert cluster.all_reduce(size * factor, c) >= now * (1 - 1e-9)
    assert cluster.all_reduce(size, farther) >= now * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(sizes, clusters)
def test_reduce_scatter_and_all_gather_add_up_to_ring_all_reduce(size: float, c: Cluster) -> None:
    parts = cluster.reduce_scatter(size, c) + cluster.all_gather(size / c.ranks, c)
    assert isclose(parts, cluster.ring(size, c), abs_tol=1e-12)


@settings(max_examples=60, deadline=None)
@given(sizes, clusters)
def test_hierarchical_equals_ring_with_one_rank_per_host(size: float, c: Cluster) -> None:
    flat = replace(c, ranks_per_host=1)
    assert isclose(cluster.hierarchical(size, flat), cluster.ring(size, flat))


def test_four_rank_all_reduce_sends_documented_bytes() -> None:
    # docs/exchange.md: 2 (n - 1) / n of the buffer over each host's link, or 2 (h - 1) / h.
    seconds = 8e6 / (1e9 / 8)
    assert isclose(cluster.ring(8e6, _two(2, 2)), 1.5 * seconds)
    assert isclose(cluster.hierarchical(8e6, _two(2, 2)), seconds, rel_tol=0.01)


@settings(max_examples=60, deadline=None)
@given(buckets, st.floats(0.01, 10), st.floats(0, 1), st.floats(0, 1))
def test_overlap_stays_between_ideal_and_sequential_time(
    found: list[GradientBucket], backward: float, each: float, busy: float
) -> None:
    transfers = [BucketTransfer(b.ready * backward, each, busy * each) for b in found]
    got = overlap(transfers, backward)
    whole = sum(t.seconds for t in transfers)
    assert backward * (1 - 1e-9) <= got.computed <= (backward + whole * busy) * (1 + 1e-9)
    assert max(backward, whole) <= got.done * (1 + 1e-9)
    # Sending uses its share of the processor at most once.
    assert got.done <= (backward + whole) * (1 + 1e-9) + whole * busy
    assert got.exposed >= 0


def test_buckets_are_sent_one_after_another() -> None:
    got = overlap(
        [BucketTransfer(0.1, 0.5), BucketTransfer(0.2, 0.5), BucketTransfer(1.0, 0.1)], 1.0
    )
    assert isclose(got.done, 1.2)
    assert isclose(got.computed, 1.0)


def test_sending_slows_down_compute() -> None:
    # From 0.5 s on, sending takes half of its time for 0.4 s: 0.2 s are missing.
    got = overlap([BucketTransfer(0.5, 0.4, 0.2)], 1.0)
    assert isclose(got.computed, 1.2)
    assert isclose(got.done, 1.2)


def test_received_buckets_are_processed_after_backward_pass() -> None:
    got = overlap([BucketTransfer(0.1, 0.1, after=0.3, again=0.2)], 1.0)
    assert isclose(got.done, 1.5)


@settings(max_examples=60, deadline=None)
@given(jobs, clusters, st.sampled_from(sorted(PREDICTED)))
def test_prediction_stays_within_hardware_limits(
    job: JobProfile, c: Cluster, strategy: str
) -> None:
    found = predict(job, c, strategy, CONFIG)
    assert 0 < found.efficiency <= 1 + 1e-9
    assert found.step_seconds >= job.forward_seconds + job.backward_seconds
    assert 0 <= found.exposed_seconds <= found.step_seconds
    assert found.limit in ("compute", "bandwidth", "latency", "uneven")
    if c.ranks == 1:
        assert isclose(found.efficiency, 1)  # costs are 0 here


def test_one_rank_pays_for_topk_but_not_for_float16_conversion() -> None:
    costs = {"dense": StrategyCost(), "topk": StrategyCost(0.1, 0.2), "float16": StrategyCost(1, 1)}
    alone = _two(hosts=1)
    seconds = {
        n: predict(replace(A_JOB, costs=costs), alone, n, CONFIG).step_seconds for n in costs
    }
    assert seconds["topk"] == pytest.approx(seconds["dense"] + 0.3)
    assert seconds["float16"] == seconds["dense"]  # nothing is converted if nothing is sent


@settings(max_examples=60, deadline=None)
@given(jobs, clusters, st.floats(1, 100))
def test_faster_network_never_increases_step_time(
    job: JobProfile, c: Cluster, factor: float
) -> None:
    faster = replace(c.between, bits_per_second=c.between.bits_per_second * factor)
    now, then = (predict(job, one, "dense", CONFIG) for one in (c, replace(c, between=faster)))
    assert then.step_seconds <= now.step_seconds * (1 + 1e-9)


def test_only_last_micro_batch_hides_communication() -> None:
    # 40 MB at 1 Gbit/s take 0.32 s, of which the last backward pass of 0.2 s hides a part.
    one, four = (
        predict(replace(A_JOB, micro_batches=n * 2), _two(), "dense", CONFIG) for n in (1, 4)
    )
    assert isclose(four.exposed_seconds, one.exposed_seconds)
    assert four.step_seconds - one.step_seconds == pytest.approx(3 * 0.3)
    assert one.limit == "bandwidth"


def test_uneven_micro_batches_are_reported_as_limit() -> None:
    found = predict(replace(A_JOB, micro_batches=3), _two(gbit=1e4), "dense", CONFIG)
    assert found.limit == "uneven"
    assert found.efficiency < 0.8


def test_planned_bytes_match_exchange() -> None:
    """Compared with the buckets of the exchanges, on one process."""
    from torch import nn

    from hvdtrain.exchange.build import build_exchange
    from hvdtrain.runtime.init import initialize

    initialize()
    model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = buckets_of([*model.parameters()], dict.fromkeys(model.parameters(), 0.5))
    for strategy in ("topk", "powersgd"):
        config = ExchangeConfig(**STRATEGIES[strategy], start_step=0)  # type: ignore[arg-type]
        exchange: Any = build_exchange(config, 1, optimizer, model, elastic=False)
        exchange.begin(1)
        model(torch.ones(2, 64)).sum().backward()
        for number in exchange._hooks.incomplete():
            exchange._send(number)
        for bucket in exchange._buckets:
            bucket.send_second_round()
        bytes_sent = sum(bucket.receive() for bucket in exchange._buckets)
        assert bytes_sent == sum(sent(bucket, strategy, config).bytes for bucket in found)
        exchange._hooks.stop()


def test_buckets_for_unknown_shapes_match_real_buckets() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(40)]  # 1 MiB each
    known = buckets_of(parameters, {p: (40 - i) / 40 for i, p in enumerate(parameters)})
    guessed = even_buckets(40 << 18)
    assert [b.elements for b in guessed] == [b.elements for b in known]
    assert [b.ready for b in guessed] == pytest.approx([b.ready for b in known])


@settings(max_examples=60, deadline=None)
@given(st.floats(60, 1e7), st.floats(0.01, 30), st.floats(0, 300))
def test_daly_interval_maximizes_goodput(mtbf: float, save: float, restart: float) -> None:
    failures = FailureModel(mtbf, save, restart)
    best = daly(failures)
    assert best > 0
    at_best = goodput(failures, best)
    assert 0 < at_best < 1
    if save < mtbf / 10:
        for factor in (0.5, 2):
            assert goodput(failures, best * factor) <= at_best * (1 + 1e-3)


def test_daly_interval_approaches_youngs_for_short_saves() -> None:
    failures = FailureModel(mtbf=1e6, save_seconds=1e-3, restart_seconds=0)
    assert daly(failures) == pytest.approx(young(failures), rel=1e-3)
    assert young(FailureModel(86400, 5, 0)) == pytest.approx((2 * 5 * 86400) ** 0.5)


def test_elastic_run_has_higher_goodput_than_restarted_run() -> None:
    failures = FailureModel(3600, 1, 1)
    elastic = replace(failures, redone=False)
    assert goodput(elastic, 85) > goodput(failures, 85)
    assert goodput(replace(elastic, mtbf=inf), inf) == 1


def test_memory_matches_documentation() -> None:
    """As in docs/choosing-parallel.md, with AdamW's state of 2 P for parameters P."""
    p = float(A_JOB.parameter_bytes)
    assert memory(A_JOB, ModelLayout(), 8) == 4 * p
    assert memory(A_JOB, ModelLayout(zero_copies=2), 8) == 2 * p + 2 * p * 2 / 8
    assert memory(A_JOB, ModelLayout(zero_copies=2), 1) == 4 * p
    in_blocks = replace(A_JOB, blocks=10, block_bytes=1.0)
    assert memory(in_blocks, ModelLayout(shard=4), 8) == p + 3 * p / 10
    assert memory(in_blocks, ModelLayout(tensor=2, pipeline=2), 8) == p
    assert memory(replace(A_JOB, activation_bytes=7.0), ModelLayout(), 1) == 4 * p + 7


def test_bubble_matches_documentation() -> None:
    assert bubble(4, 1) == 0
    assert bubble(4, 2) == 1 / 5  # docs/pipeline.md: (p - 1) / (v m + p - 1)
    job = replace(A_JOB, optimizer_seconds=0.0, blocks=4, block_bytes=1e-6)
    alone = _two(1, 2, gbit=1e6)
    seconds = step_seconds(job, alone, ModelLayout(pipeline=2), CONFIG)
    assert seconds * (1 - bubble(8, 2)) == pytest.approx(8 * 0.3 / 2, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(jobs, clusters)
def test_layouts_divide_ranks(job: JobProfile, c: Cluster) -> None:
    whole = replace(job, blocks=8, block_bytes=1e6)
    for layout in layouts(whole, c, PREDICTED):
        assert c.ranks % layout.replica == 0
        assert c.ranks_per_host % layout.tensor == 0
        assert step_seconds(whole, c, layout, CONFIG) > 0


def test_layout_flags_are_valid_configuration_keys() -> None:
    from hvdtrain.config import parse

    job = replace(A_JOB, blocks=8, block_bytes=1e6)
    for layout in layouts(job, Cluster(2, 4, Link(1e9), Link(1e10)), PREDICTED):
        config = parse(layout.flags.split()).config
        assert (config.parallel.shard.degree, config.parallel.tensor) == (
            layout.shard,
            layout.tensor,
        )


def test_documented_table_of_published_systems_is_current() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for one in systems():
        assert row(one) in text, f"docs/benchmarks.md lacks\n{row(one)}"


def test_job_round_trips_through_json() -> None:
    job = replace(
        A_JOB, buckets=(GradientBucket(5, 0.5, ((1, 5),)), GradientBucket(7, 1.0)), blocks=2
    )
    assert job_from(json.loads(json.dumps(asdict(job)))) == job


def test_measurements_of_several_processes_are_averaged() -> None:
    slow = replace(A_JOB, forward_seconds=0.3)
    assert mean_of([A_JOB, slow]).forward_seconds == pytest.approx(0.2)
    assert mean_of([A_JOB, A_JOB]).buckets == A_JOB.buckets
    costs = costs_from({"1000": 0.001, "1001000": 0.101}, {"1000": 0.004}, ranks=2)
    assert costs.launch_seconds == 0.001 and costs.contention_seconds == pytest.approx(0.003)
    assert costs.busy_seconds_per_byte == pytest.approx(1e-7)


def test_bandwidth_and_time_units_are_parsed() -> None:
    assert [parse_bandwidth(t) for t in ("25gbit", "400Mbit/s", "1.5G")] == [25e9, 4e8, 1.5e9]
    assert [parse_seconds(t) for t in ("20us", "0.5ms", "1s")] == pytest.approx([2e-5, 5e-4, 1])


# --- the command ---------------------------------------------------------------------------------

ALLREDUCE = {
    "benchmark": "allreduce",
    "ranks": 4,
    "hosts": "node1:2,node2:2",
    "rows": [
        {"side": side, "bytes": size, "seconds": seconds}
        for side, times in {
            "Horovod, Gloo": (0.001, 0.311),
            "Horovod, Gloo, hierarchical": (0.001, 0.195),
            "MPI_Allreduce": (0.0001, 0.2),
        }.items()
        for size, seconds in zip((1024, 8 << 20), times, strict=True)
    ],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Files of a job and of all-reduces, as their commands print them."""
    job = replace(A_JOB, blocks=8, block_bytes=1e6, activation_bytes=1e8)
    content = {"job": {"benchmark": "plan", "job": asdict(job)}, "allreduce": ALLREDUCE}
    for name, value in content.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return {name: str(tmp_path / f"{name}.json") for name in content}


def _plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_recommends_layout_that_fits_memory(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given_ = ["--from", files["job"], "--hosts", "4", "--ranks", "2", "--price", "3"]
    code, out, _ = _plan(capsys, *given_, "--memory", "1", "--mtbf", "1000", "--format", "json")
    plan = json.loads(out)
    assert code == 0
    assert {row["hosts"] for row in plan["scaling"]} == {1, 2, 4}
    best = next(row for row in plan["layouts"] if row["flags"] == plan["best"])
    whole = [row for row in plan["layouts"] if "parallel.tensor" not in row["flags"]]
    assert best["fits"]
    assert best["price"] > 0
    assert best in whole
    assert 0.9 < plan["saving"]["supervised"] < plan["saving"]["elastic"] < 1
    # 4 P = 160 MB and activations of 100 MB: only shards fit into 200 MB.
    _, out, _ = _plan(capsys, *given_, "--memory", "0.15", "--format", "json")
    plan = json.loads(out)
    assert "parallel" in plan["best"]
    _, out, _ = _plan(capsys, *given_, "--memory", "0.001")
    assert "No layout fits" in out


def test_plan_names_cheapest_layout_if_memory_and_price_are_known(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--from", files["job"], "--hosts", "4", "--bandwidth", "1gbit", "--price", "2")
    _, out, _ = _plan(capsys, *given, "--memory", "64")
    assert "Cheapest that fits:" in out
    _, out, _ = _plan(capsys, *given)
    assert "Recommended, memory unknown:" in out


def test_plan_lists_unknown_inputs(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "plan.html"
    code, out, _ = _plan(
        capsys, "--from", files["job"], "--hosts", "4", "--bandwidth", "1gbit", "--plot", str(plot)
    )
    assert code == 0
    assert "Recommended, memory and price unknown:" in out and "Cheapest" not in out
    assert "python -m hvdtrain.train --exchange.wire" in out
    for word in ("--memory", "--mtbf", "--price", "slow ranks"):
        assert word in out[out.index("Unknown:") :]
    (chart,) = content(plot.read_text())["charts"]
    assert chart["title"] == "Efficiency" and {line["name"] for line in chart["series"]} >= {
        "dense"
    }
    assert chart["series"][0]["x"][-1] == 4


def test_tune_chooses_fastest_measured_settings(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _plan(capsys, "--tune", "--from", files["allreduce"])
    assert code == 0
    assert yaml.safe_load(out) == {"exchange": {"hierarchical": True, "wire": "float32"}}
    assert "1.59 x" in out
    both = ["--from", files["allreduce"], "--from", files["job"], "--hosts", "2", "--ranks", "2"]
    _, out, _ = _plan(capsys, "--tune", *both)
    assert yaml.safe_load(out)["exchange"]["wire"] in ("float16", "bfloat16")


def test_plan_uses_measured_network(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--from", files["allreduce"], "--from", files["job"], "--hosts", "2", "--ranks", "2"]
    _, out, _ = _plan(capsys, *both, "--format", "json")
    between = json.loads(out)["cluster"]["between"]
    # 8 MiB in 195 ms among 4 ranks, each byte 1.5 times over the link.
    assert between["bits_per_second"] == pytest.approx(8 * 1.5 * (8 << 20) / 0.195, rel=0.01)


def test_plan_uses_metrics_of_given_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train.duration=20", "--telemetry.exchange_every=5", "--eval.every=0"]
    train(tmp_path, "run", [*flags, "--checkpoint.every=20"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "ranks.jsonl").open()]
    code, out, _ = _plan(capsys, "--from", str(tmp_path / "run"), "--format", "json")
    plan = json.loads(out)
    assert code == 0
    model = load_file(next((tmp_path / "run" / "checkpoints").glob("*/model.safetensors")))
    held = sum(tensor.numel() for tensor in model.values())
    assert sum(bucket["elements"] for bucket in plan["job"]["buckets"]) == held
    batch = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch"]
    assert plan["job"]["micro_batches"] == batch["global_size"] // batch["micro_size"]
    # On one rank it predicts its input: the mean step of the run's windows.
    wall = sum(line["wall_seconds"][0] for line in lines) / sum(line["steps"] for line in lines)
    step = plan["scaling"][0]["step_seconds"]
    assert 0.4 * wall < step <= 1.05 * wall
    assert any("AdamW" in sentence for sentence in plan["unknown"])


def test_plan_uses_measured_exchanges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"side": "no exchange", "step_seconds": 0.3, "sent_bytes": None},
        {"side": "dense", "step_seconds": 0.6, "sent_bytes": 4e7},
    ]
    path = tmp_path / "exchange.json"
    path.write_text(json.dumps({"benchmark": "exchange", "ranks": 2, "rows": rows}))
    given_ = ["--from", str(path), "--hosts", "2", "--bandwidth", "1gbit", "--latency", "0us"]
    code, out, _ = _plan(capsys, *given_, "--format", "json")
    dense = next(
        r for r in json.loads(out)["scaling"] if (r["ranks"], r["strategy"]) == (2, "dense")
    )
    # 40 MB take 0.34 s at 1 Gbit/s; 0.2 s of backward hide some of it.
    assert code == 0
    assert 0.44 < dense["step_seconds"] < 0.5
    assert dense["limit"] == "bandwidth"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no job is given"),
        (["--from", "nowhere.json"], "cannot be read"),
        (["--from", "{allreduce}"], "no job is given"),
        (["--from", "{job}", "--bandwidth", "fast"], "not a bandwidth"),
        (["--from", "{job}", "--latency", "20"], "not a time"),
        (["--from", "{job}", "--strategies", "magic"], "magic is not one of"),
        (["--from", "{job}", "--measure"], "give one job"),
        (["--from", "{job}", "--plot", "plan.png"], "must end in .html"),
        (["--tune", "--from", "{job}"], "--tune needs"),
        (["--from", "{job}", "--", "--model.layers=2"], "require --measure or --gpu"),
        (["--gpu", "Voodoo2"], "its peak is unknown"),
    ],
)
def test_plan_reports_invalid_input_without_traceback(
    arguments: list[str],
    sentence: str,
    files: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = _plan(capsys, *(word.format(**files) for word in arguments))
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err


def test_plan_reports_damaged_file_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("{", "[]", '{"benchmark": "allreduce", "rows": []}', '{"benchmark": "plan"}'):
        path = tmp_path / "damaged.json"
        path.write_text(text)
        code, _, err = _plan(capsys, "--from", str(path))
        assert (code, "Traceback" in err) == (2, False), err


def test_plan_supports_gpu_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--model.layers=2", "--model.width=64", "--model.context=64"]
    code, out, _ = _plan(
        capsys, "--gpu", "H100", "--mfu", "0.5", "--hosts", "2", "--format", "json", "--", *tiny
    )
    plan = json.loads(out)
    assert code == 0
    assert plan["job"]["blocks"] == 2
    assert plan["job"]["block_bytes"] == 4 * 64 * 64 * 4
    assert plan["job"]["activation_bytes"] > 10 * plan["job"]["block_bytes"]
    assert any(re.search("0.5 is assumed", sentence) for sentence in plan["unknown"])
