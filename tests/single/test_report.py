"""`hvdtrain report`: correct metrics from the files of any run, on readable pages."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain import cli
from hvdtrain.audit.report import audit
from hvdtrain.report import html, units
from hvdtrain.report.charts import COLUMNS, clock, heat, of_runs, to_points
from hvdtrain.report.metrics import remaining_seconds
from hvdtrain.report.texts import differences
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership
from tests.support.browser import content, show, tab
from tests.support.history import RECOVERING, STARTING, WARMING, History
from tests.support.recorded import SLOW, LongRun

PHASES = ("data", "forward", "backward", "comm_exposed", "optimizer", "eval", "checkpoint", "other")
BLUE, ORANGE, PURPLE = "#2f78bd", "#d46f12", "#8250c4"  # lines, and the marks of restarts


def _ranks_line(history: History, step: int, steps: int, **phases: list[float]) -> None:
    """Return a window in which unnamed phases took no time."""
    ranks = len(next(iter(phases.values())))
    nothing = [0.0] * ranks
    exposed = phases.get("comm_exposed", nothing)
    line = {
        "step": step,
        "steps": steps,
        "time": history.clock,
        "phases": {phase: phases.get(phase, nothing) for phase in PHASES},
        "wall_seconds": [float(steps)] * ranks,
        "inflight_seconds": [1.5 + seconds if ranks > 1 else 0.0 for seconds in exposed],
        "bytes": [1000 if ranks > 1 else 0] * ranks,
        "host_memory_bytes": [2**30 + step * rank * 2**20 for rank in range(ranks)],
        "device_memory_bytes": [0] * ranks,
        "most_memory_bytes": {"forward": 2**30 + step, "backward": 2**31 - step},
        "score": [1.0, 0.5][:ranks],
    }
    with open(history.directory / "ranks.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def _straggler(history: History, event: str, step: int, **score: float) -> None:
    fields = {"step": step, "rank": 1, "host": "node1", "phase": "data", **score}
    history.events.write(event, time=history.clock, **fields)


@pytest.fixture
def history(tmp_path: Path) -> History:
    """2 ranks, killed in step 14, again from step 10; one rank dies after step 20; 1 rank ends."""
    history = History(tmp_path / "run", eval_every=6)
    (history.directory / "config.yaml").write_text("telemetry: {exchange_every: 75}")
    history.launch(2)
    history.steps(5)
    _ranks_line(
        history,
        5,
        5,
        data=[0.5, 1.0],
        forward=[1.0, 1.0],
        backward=[2.0, 2.0],
        comm_exposed=[1.0, 0.5],
        optimizer=[0.5, 0.5],
    )
    _straggler(history, "straggler", 5, score=0.5)
    history.events.write("deal", time=history.clock, step=6, micro_batches=[3, 1])
    history.steps(4)
    _straggler(history, "straggler_ended", 9)
    history.steps(4)
    history.crash()
    history.launch(2)
    _straggler(history, "straggler", 10, score=0.4)
    history.steps(10)
    history.recover(1)
    history.steps(3)
    _ranks_line(history, 23, 3, forward=[1.0], backward=[1.5], other=[0.5])
    history.steps(60)
    history.end(0)
    return history


def _metrics(capsys: pytest.CaptureFixture[str], *runs: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["report", *map(str, runs), "--format", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_metrics_equal_values_computed_by_hand(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _metrics(capsys, history.directory)
    assert found["state"] == "finished" and found["exit_code"] == 0
    assert (found["steps"], found["total_steps"], found["ranks"]) == (60, 60, 1)
    assert found["deals"] == [{"step": 6, "micro_batches": [3, 1]}]
    assert (found["final_loss"], found["final_validation_loss"]) == (1.0, 2.0)
    assert found["final_validation"] == {"perplexity": 60.0}
    assert found["median_samples_per_second"] == 10 and found["median_step_seconds"] == 1
    # 5 steps of 2 ranks and 3 of one: 13 rank steps of a second each.
    assert found["phase_seconds_per_step"]["data"] == pytest.approx(1.5 / 13)
    assert found["phase_shares"]["backward"] == pytest.approx(5.5 / 13)
    assert sum(found["phase_shares"].values()) == pytest.approx(1)
    assert found["exposed_share"] == pytest.approx(1.5 / 13)
    assert found["overlap"] == pytest.approx(1 - 1.5 / 4.5)
    # 2 ranks, so the factor 2(n-1)/n is 1; the single rank sends nothing.
    assert found["bus_bandwidth_bytes_per_second"] == pytest.approx(2000 / 4.5)
    assert (found["peak_host_memory_bytes"], found["peak_host_memory_rank"]) == (
        2**30 + 5 * 2**20,
        1,
    )
    assert found["peak_device_memory_bytes"] is None
    most = found["peak_memory_bytes_by_phase"]
    assert most == {"forward": 2**30 + 23, "backward": 2**31 - 5}, "not the most of a phase"
    assert (found["slowest_rank"], found["slowest_rank_median_score"]) == (1, 0.5)
    assert found["checkpoints"] == 12 and found["last_checkpoint_step"] == 60
    assert found["median_checkpoint_seconds"] == 0.25 and found["failed_checkpoints"] == 0
    assert found["missing"] == []


def test_restarts_and_stragglers_are_reported(
    history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _metrics(capsys, history.directory)
    launched, recovered = found["restarts"]
    assert (launched["cause"], launched["step"], launched["redone_steps"]) == ("launch", 10, 3)
    assert launched["seconds_without_steps"] == pytest.approx(30 + STARTING + WARMING)
    assert (recovered["cause"], recovered["step"]) == ("failure", 20)
    assert (recovered["ranks_before"], recovered["ranks_after"]) == (2, 1)
    # The checkpoint of step 20 was written in between.
    assert recovered["seconds_without_steps"] == pytest.approx(RECOVERING + 0.25)
    (slow,) = found["stragglers"]
    assert (slow["rank"], slow["host"], slow["phase"]) == (1, "node1", "data")
    # From 5 to 9, and from 10 until the generation ended at 20.
    assert (slow["times"], slow["steps"], slow["lowest_score"]) == (2, 14, 0.4)
    goodput = audit(history.directory).goodput
    assert found["goodput_share"] == goodput.share and found["seconds_by_part"] == goodput.parts


def test_early_start_is_not_counted_as_a_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(tmp_path / "run")
    history.launch(1)
    history.recover(2, "hosts")  # before the first step
    history.steps(3)
    history.recover(1)
    history.steps(2)
    (restart,) = _metrics(capsys, history.directory)["restarts"]
    assert (restart["number"], restart["step"], restart["cause"]) == (1, 3, "failure")
    assert restart["at_seconds"] == pytest.approx(STARTING + WARMING + 2 * RECOVERING + 3)


def test_remaining_time_is_shown_only_while_a_run_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(tmp_path / "run")
    history.launch(1)
    history.steps(20)
    assert _metrics(capsys, history.directory)["remaining_seconds"] is None
    owner = Ownership(history.directory)
    owner.acquire(Claim(1))
    try:
        # 5 checkpoints of 0.25 s in 19 steps of 1 s; 40 of 60 steps are left.
        left = _metrics(capsys, history.directory)["remaining_seconds"]
        assert left == pytest.approx(40 * (19 + 3 * 0.25) / 19)
    finally:
        owner.release()
    assert remaining_seconds([(1, 0.0), (10**308, 1.0)], 10**308) == 0
    assert remaining_seconds([(1, 0.0), (1, 9.0)], 50) is None


def _page(run: Path) -> dict[str, Any]:
    assert cli.main(["report", str(run)]) == 0
    return content((run / "report.html").read_text())


def _titles(page: dict[str, Any]) -> list[str]:
    return [chart["title"] for chart in page["charts"]]


TITLES = [
    *("Loss", "Throughput", "Step time", "Exposed communication", "Memory per rank"),
    *("Time per rank and phase", "Straggler score of each rank"),
]


def test_page_is_complete_and_self_contained(history: History) -> None:
    page = _page(history.directory)
    assert _titles(page) == TITLES
    assert len(page["tiles"]) == 6 and len(page["marks"]) == 2
    text = json.dumps(page, ensure_ascii=False)
    for part in (
        "60 of 60 steps (9.38 epochs) in",
        "on 1 rank, 1 host, with 2 restarts. It finished.",
        "the program was restarted (state from checkpoint)",
        "a rank failed (state from memory)",
        "1 on node1",
        "444 B/s",
        "One rank was slow: rank 1 on node1 in data",
        "The training loss went from 60 to 1, the last validation loss is 2",
        "telemetry: {exchange_every: 75}",
    ):
        assert part in text, part
    whole = (history.directory / "report.html").read_text()
    assert re.findall(r"<[^>]*(?:href|src)=[^>]*>", whole) == ['<link rel="icon" href="data:,">']
    assert "@import" not in whole and "url(" not in whole
    assert len(re.findall(r"<script", whole)) == 2  # the content, and one script


def test_vendored_files_match_their_checksums() -> None:
    directory = Path(html.__file__).parent / "uplot"
    sums = dict(line.split()[::-1] for line in (directory / "SHA256SUMS").read_text().splitlines())
    assert sums.keys() == {"LICENSE", "uPlot.iife.min.js", "uPlot.min.css"}
    for name, expected in sums.items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == expected, name


def test_text_of_a_run_cannot_end_the_script_of_the_page(history: History) -> None:
    logs = history.directory / "logs"
    logs.mkdir()
    line = {"time": 0, "level": "warning", "message": "</script><script>alert(1)</script>\x1b[2J"}
    (logs / "rank_00000.jsonl").write_text(json.dumps(line) + "\n")
    (history.directory / "config.yaml").write_text("a: <!--<script>")
    page = _page(history.directory)
    log, configuration = (text["text"] for text in page["texts"])
    assert log == "00:00:00 warning: </script><script>alert(1)</script>\\x1b[2J"
    assert configuration == "a: <!--<script>"
    whole = (history.directory / "report.html").read_text()
    assert whole.count("</script>") == 2 and "<!--" not in whole


@pytest.mark.slow
def test_page_renders_in_a_browser_without_complaints(history: History, tmp_path: Path) -> None:
    _page(history.directory)
    shown = show(history.directory / "report.html", tmp_path, 3200)
    assert not shown.complaints
    assert not shown.blank_stretches()
    # The throughput and the step time are constant, so their charts are folded.
    assert shown.dom.count("<canvas") == 5 and "constant: 10" in shown.text
    assert shown.count(BLUE) > 1000  # lines and bars
    assert shown.count(PURPLE) > 300  # the restarts
    assert shown.count("#1b1f24") > 1000 and shown.count("#ffffff") > 10**6


@pytest.mark.slow
def test_zoom_axes_and_smoothing_apply_to_all_charts(history: History, tmp_path: Path) -> None:
    _page(history.directory)
    with tab(tmp_path, 1600) as page:
        page.open((history.directory / "report.html").as_uri())
        page.wait("document.querySelectorAll('canvas').length == 5", 60, "charts")
        page.value("window.over = (at) => document.querySelectorAll('.u-over')[at]")
        page.value("window.legend = (at) => document.querySelectorAll('.u-legend')[at].innerText")
        loss = page.value("(({x, y, width}) => [x, y, width])(over(0).getBoundingClientRect())")
        middle = loss[1] + 50
        page.drag((loss[0] + loss[2] / 4, middle), (loss[0] + loss[2] / 2, middle))
        # Steps 1 to 60: the cursor is at the end of the zoomed stretch, in other charts too.
        page.value(
            "over(0).dispatchEvent(new MouseEvent('mousemove', {clientX: 600, clientY: 600}))"
        )
        page.wait("legend(0).includes('training')", 10, "legend")
        page.drag((loss[0] + loss[2] - 2, middle), (loss[0] + loss[2] - 1, middle))
        step = "Number(legend(%d).match(/step:?\\s*([\\d.]+)/)?.[1])"
        page.wait(f"{step % 0} == 30", 10, "value at the cursor")
        assert 20 <= page.value(step % 2) <= 30, "the cursors are linked"
        page.value("document.querySelector('select').value = 'time'")
        page.value("document.querySelector('select').dispatchEvent(new Event('change'))")
        page.wait("legend(0).includes('time')", 10, "axis of time")
        last = "Number(legend(0).match(/training:?\\s*([\\d.]+)/)[1])"
        assert page.value(last) == 1
        page.value("document.querySelector('input[type=range]').value = 0.9")
        page.value("document.querySelector('input[type=range]').dispatchEvent(new Event('input'))")
        page.wait(f"{last} > 1.1", 10, "smoothed loss")
        page.value("document.querySelector('.chart .tools button').click()")
        pressed = "document.querySelector('.chart .tools button').getAttribute('aria-pressed')"
        assert page.value(pressed) == "true"
        page.value(
            "URL.createObjectURL = (blob) => { blob.text().then((text) => { window.csv = text; });"
            "return '#'; };"
            "HTMLAnchorElement.prototype.click = function () { window.file = this.download; }"
        )
        page.value("document.querySelectorAll('.chart .tools button')[1].click()")
        page.wait("window.csv", 10, "CSV")
        assert page.value("window.file") == "run-loss.csv"
        rows = page.value("window.csv").splitlines()
        assert rows[0] == "step,training,validation" and rows[6] == "6,10,11"
        assert not page.complaints


@pytest.mark.slow
def test_pages_fit_a_narrow_screen(history: History, tmp_path: Path) -> None:
    _page(history.directory)
    with tab(tmp_path, 900) as page:
        page.resize(390, 900)
        page.open((history.directory / "report.html").as_uri())
        page.wait("document.querySelectorAll('canvas').length == 5", 60, "charts")
        assert page.value("document.documentElement.scrollWidth") == 390
        assert page.value("document.querySelector('canvas').getBoundingClientRect().width") > 340


@pytest.mark.slow
def test_page_blocks_requests_to_other_hosts(history: History, tmp_path: Path) -> None:
    assert cli.main(["report", str(history.directory)]) == 0
    page = history.directory / "report.html"
    requests: list[str] = []

    class OtherHost(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), OtherHost) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        image = f'<img src="http://127.0.0.1:{server.server_port}/x.png"></body>'
        text = page.read_text().replace("</body>", image)
        page.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text))
        show(page, tmp_path, 800)
        assert requests, "without the policy, the page would send the request"
        requests.clear()
        page.write_text(text)
        complaints = show(page, tmp_path, 800).complaints
        server.shutdown()
    assert not requests
    assert complaints and all("Content Security Policy" in line for line in complaints)


@pytest.mark.slow
def test_page_is_readable_in_dark_mode(history: History, tmp_path: Path) -> None:
    assert cli.main(["report", str(history.directory)]) == 0
    shown = show(history.directory / "report.html", tmp_path, 3200, dark=True)
    assert shown.count("#14181c") > 10**6  # the background, also of the plots; the text
    assert shown.count("#e6e9ec") > 1000  # the ink
    assert shown.count("#000000", near=3) < 500


@pytest.mark.slow
def test_two_runs_are_compared(
    history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = History(tmp_path / "o$ther$<b>")
    other.launch(2)
    other.steps(30)
    found = _metrics(capsys, history.directory, other.directory)
    assert found["a"]["steps"] == 60 and found["b"]["state"] == "no end"
    assert found["ratios"]["steps"] == 0.5 and found["ratios"]["final_loss"] == 2
    assert found["ratios"]["overlap"] is None  # the other run has no ranks.jsonl
    assert found["ratios"]["data_seconds_per_step"] is None
    out = tmp_path / "two.html"
    assert (
        cli.main(["report", str(history.directory), str(other.directory), "--out", str(out)]) == 0
    )
    page = content(out.read_text())
    loss = page["charts"][0]
    assert [(line["name"], line["dash"]) for line in loss["series"]] == [("A", False), ("B", True)]
    (apart,) = loss["difference"]["series"]
    assert apart["name"] == "B − A" and apart["y"] == [0] * 30
    tiles = {tile["label"]: (tile["value"], tile["note"]) for tile in page["tiles"]}
    assert tiles["Final loss, A → B"] == ("1 → 2", "+100.0%") and len(tiles) <= 6
    assert tiles["Samples per second, median"] == ("10 → 10", "equal")
    assert ["telemetry.exchange_every", "75", "–"] in page["first"][0]["rows"]
    shown = show(out, tmp_path, 1800)
    assert not shown.complaints and not shown.blank_stretches()
    assert "difference at equal steps: constant 0" in shown.text
    assert "o$ther$&lt;b&gt;" in shown.text and "ranks.jsonl has no lines" in shown.text
    assert shown.count(BLUE) > 300 and shown.count(ORANGE) > 300
    assert cli.main(["report", str(history.directory), str(other.directory)]) == 0
    assert (other.directory / "compare.html").exists()


def test_difference_of_configurations_leaves_out_the_name_of_the_run() -> None:
    one = "train: {duration: 400}\nrun: {id: a}\noptim: {lr: 0.1}"
    other = "train: {duration: 400}\nrun: {id: b}\noptim: {lr: 0.2}"
    assert differences({"A": one, "B": other}).rows == [["optim.lr", "0.1", "0.2"]]
    for nothing in ("", "[1]", "{}", "a: ["):
        assert differences({"A": nothing, "B": nothing}).rows == []


def _without_events(history: History) -> None:
    (history.directory / "events.jsonl").unlink()


def _without_ranks(history: History) -> None:
    (history.directory / "ranks.jsonl").unlink()
    (history.directory / "config.yaml").write_text("telemetry: {exchange_every: 0}")


def _torn(history: History) -> None:
    for name in ("events", "metrics", "ranks"):
        with open(history.directory / f"{name}.jsonl", "a") as file:
            file.write('{"step": 61, "phases": {"data": [0.1, 0.')


def _without_steps(history: History) -> None:
    for name in ("metrics", "superseded_metrics", "ranks"):
        (history.directory / f"{name}.jsonl").write_text("")


def _damaged(history: History) -> None:
    (history.directory / "manifest.json").write_text('{"task": ')
    (history.directory / "config.yaml").write_text("a: [")


DAMAGES = {
    "no events": (_without_events, ["There is no events.jsonl"], TITLES),
    "no ranks": (_without_ranks, ["telemetry.exchange_every is 0"], TITLES[:3]),
    "torn": (_torn, [f"skipped in {name}.jsonl" for name in ("metrics", "ranks")], TITLES),
    "no steps": (_without_steps, ["no step was logged", "ranks.jsonl has no lines"], []),
    "damaged": (
        _damaged,
        ["config.yaml is missing", "manifest.json is damaged"],
        TITLES,
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_report_lists_missing_data_and_shows_the_rest(
    name: str, history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, sentences, titles = DAMAGES[name]
    damage(history)
    found = _metrics(capsys, history.directory)
    page = _page(history.directory)
    for sentence in sentences:
        assert any(sentence in line for line in found["missing"]), found["missing"]
        assert any(sentence in note["text"] for note in page["notes"])
    assert _titles(page) == titles


def test_report_shows_an_unfinished_run_of_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = History(tmp_path / "alone")
    history.launch(1)
    history.steps(1)
    _ranks_line(history, 1, 1, forward=[1.0])
    found = _metrics(capsys, history.directory)
    assert found["overlap"] is None and found["exposed_share"] == 0
    assert found["bus_bandwidth_bytes_per_second"] is None and found["slowest_rank"] is None
    assert found["state"] == "no end" and found["steps"] == 1
    assert cli.main(["report", str(history.directory)]) == 0
    page = (history.directory / "report.html").read_text()
    assert "the run was killed, or it is still running" in page and "one rank" in page


def test_long_step_switches_step_time_to_a_logarithmic_axis(history: History) -> None:
    (chart,) = [c for c in _page(history.directory)["charts"] if c["title"] == "Step time"]
    assert "log" not in chart
    path = history.directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[9]["step_seconds"] = 100.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (chart,) = [c for c in _page(history.directory)["charts"] if c["title"] == "Step time"]
    assert chart["log"] == "y" and max(chart["series"][0]["y"]) == 100


def test_nonfinite_losses_and_skipped_steps_are_counted(history: History) -> None:
    path = history.directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[7] |= {"loss": None, "skipped": True}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["report", str(history.directory)]) == 0
    page = (history.directory / "report.html").read_text()
    assert "1 step had a non-finite loss." in page
    assert "1 step skipped because the gradient was not finite." in page
    assert "Omitted: 1 step with a non-finite loss." in page


def test_invalid_usage_ends_with_a_clear_error(
    history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    out = tmp_path / "nowhere" / "x.html"
    assert cli.main(["report", str(history.directory), "--out", str(out)]) == 2
    assert "choose another place with --out" in capsys.readouterr().err
    assert cli.main(["report", str(history.directory), "--out", "x", "--format", "json"]) == 2
    assert "exclude each other" in capsys.readouterr().err


_MEASURED = """
import json, re, sys, time
from pathlib import Path
from hvdtrain import cli
begin = time.process_time()
code = cli.main(["report", sys.argv[1]])
end = time.process_time()
for path in Path(sys.argv[1]).glob("*.jsonl"):
    with path.open() as lines:
        for line in lines:
            json.loads(line)
ratio = (end - begin) / (time.process_time() - end)
heavy = [name for name in ("torch", "horovod") if name in sys.modules]
# Not ru_maxrss, which begins with the value of the process that started this one.
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(json.dumps([code, ratio, int(peak[1]) / 1000, heavy]))
"""


@pytest.mark.soak
@pytest.mark.slow
def test_report_of_a_long_run_stays_within_time_and_memory_limits(tmp_path: Path) -> None:
    LongRun(tmp_path / "long", 100_000, 64, failures=(20_005, 60_000))
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(tmp_path / "long")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    code, ratio, megabytes, heavy = json.loads(done.stdout.splitlines()[-1])
    assert code == 0 and not heavy
    # CPU time against reading the run's files once.
    assert ratio < 99 and megabytes < 500
    page = tmp_path / "long" / "report.html"
    assert page.stat().st_size < 2_000_000
    shown = show(page, tmp_path, 4400)
    assert not shown.complaints and not shown.blank_stretches()
    assert f"rank {SLOW} on node{SLOW // 8} in data" in shown.text
    # The slow rank is a bar with its own color in a map that is pale elsewhere.
    assert shown.count("#d65a3f", near=40) > 800


def test_curve_is_interrupted_at_values_that_are_not_finite() -> None:
    x, y = np.arange(4.0), np.array([1.0, np.nan, np.inf, 2.0])
    assert to_points(x, y) == {"x": [0, 3], "y": [1, 2]}
    assert to_points(x, y, gaps=True) == {"x": [0, 1, 2, 3], "y": [1, None, None, 2]}
    assert to_points(x, y * np.nan, gaps=True) == {"x": [], "y": []}
    x, y = np.arange(10.0), np.array([1.0] * 4 + [np.nan] * 4 + [2.0] * 2)
    assert to_points(x, y, limit=5, gaps=True)["high"] == [1, 1, None, None, 2]


def test_binned_curve_keeps_peaks() -> None:
    x = np.arange(100_000.0)
    y = np.ones(100_000)
    y[[777, 99_999]], y[50_000], y[60_000] = 9, -3, np.nan
    found = to_points(x, y)
    assert {len(values) for values in found.values()} == {COLUMNS}
    assert found["high"][3] == 9 and found["high"][-1] == 9 and found["low"][250] == -3
    assert set(found["y"]) == {1} and found["x"][0] < found["x"][-1] <= 99_999
    assert to_points(x[:5], y[:5]) == {"x": [0, 1, 2, 3, 4], "y": [1] * 5}
    of_ranks = to_points(x[:3], np.array([[1.0, 5.0], [np.nan, np.nan], [2.0, np.nan]]))
    assert of_ranks == {"x": [0, 2], "y": [3, 2], "low": [1, 2], "high": [5, 2]}


def test_binned_heat_map_keeps_slow_ranks() -> None:
    step = np.arange(10.0, 100_010, 10)
    values = np.ones((len(step), 300))
    values[5000, 290], values[:, 7], values[20:40, 250:] = 0.3, 0.8, np.nan
    found = heat(step, np.full(len(step), 10.0), values)
    cells = found["cells"]
    assert (len(cells), len(cells[0]), found["per_row"]) == (100, COLUMNS, 3)
    assert (found["left"], found["right"]) == (0, 100_000)
    assert cells[96][250] == 30 and set(cells[2]) == {80}
    assert cells[90][1] is None and cells[90][2] == 100


def test_clock_of_a_long_run_keeps_its_pauses() -> None:
    seconds = np.arange(100_000.0)
    seconds[70_001:] += 5000
    found = clock(np.arange(100_000.0), seconds)
    assert len(found["step"]) < 2 * COLUMNS and found["step"][-1] == 99_999
    at = found["step"].index(70_000)
    assert found["step"][at + 1] == 70_001
    assert found["seconds"][at : at + 2] == [70_000, 75_001]
    assert clock(seconds[:0], seconds[:0]) == {"step": [], "seconds": []}


def test_difference_of_long_runs_has_points_of_equal_number() -> None:
    steps = np.arange(5000.0)
    loss = to_points(steps, 1 / (1 + steps))
    (chart,) = of_runs({"A": {"loss": loss}, "B": {"loss": loss | {"y": [None, *loss["y"][1:]]}}})
    (apart,) = chart["difference"]["series"]
    assert len(apart["x"]) == len(apart["y"]) == COLUMNS and "low" not in apart
    assert apart["y"][:2] == [None, 0]


def test_difference_of_runs_is_interpolated_at_equal_steps() -> None:
    a = {"loss": {"x": [1.0, 2.0, 3.0, 4.0], "y": [4.0, 3.0, 2.0, 1.0]}}
    b = {"loss": {"x": [1.0, 3.0], "y": [5.0, 3.0]}, "lr": {"x": [1.0], "y": [0.1]}}
    loss, rate = of_runs({"A": a, "B": b})
    (apart,) = loss["difference"]["series"]
    assert (apart["x"], apart["y"]) == ([1, 2, 3], [1, 1, 1])
    a["loss"]["y"][1] = None
    assert of_runs({"A": a, "B": b})[0]["difference"]["series"][0]["y"] == [1, None, 1]
    assert rate["caption"] == "Unknown for A." and rate["difference"]["series"] == []


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(59.96), "60 s"),
        (units.seconds(3599.6), "1 h 0 min"),
        (units.seconds(90_000), "1 d 1 h"),
        (units.size(1536), "1.5 KiB"),
        (units.bandwidth(2.5e9), "2.5 GB/s"),
        (units.number(None), units.UNKNOWN),
        (units.ranks([0, 1, 2, 6]), "0-2, 6"),
    ],
)
def test_numbers_are_formatted_with_units(shown: str, expected: str) -> None:
    assert shown == expected
