"""`hvdtrain report --serve`: incremental reads, access control, and the pages in a browser."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from hvdtrain import cli
from hvdtrain.report.web import overview, pages
from hvdtrain.report.web.live import BINS, LiveRun, Series
from hvdtrain.report.web.overview import Overview, Tail
from hvdtrain.report.web.runs import Runs
from hvdtrain.run_files.owner_token import Claim
from hvdtrain.run_files.ownership import Ownership
from tests.support.browser import Tab, tab
from tests.support.history import History
from tests.support.job import Job, poll
from tests.support.runs import environment, forked_train

DARK_BLUE, BLUE, PURPLE, DARK = "#5fa4e0", "#2f78bd", "#8250c4", "#14181c"
ODD = '<img src=x onerror="document.title=1">&%2e '
SERVE = [sys.executable, "-m", "hvdtrain.cli", "report", "--serve"]


def _append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


# --- reading files that are being written ---------------------------------------


def test_tail_reads_only_appended_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    file = Tail(path)
    assert len(file.read().lines) == 1000
    with open(path, "r+") as written:
        written.write("x" * 5000)  # it would find this
    _append(path, '{"step": 1000}\n')
    news = file.read()
    assert (news.lines, news.torn, news.restarted) == ([{"step": 1000}], 0, False)
    assert file.read() == overview.News()


def test_incomplete_last_line_is_not_counted_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    file = Tail(path)
    news = file.read()
    assert (news.lines, news.torn, news.left) == ([{"step": 1}], 0, 0)
    _append(path, 'ep": 2}\n\n[3]\n')
    news = file.read()
    assert (news.lines, news.torn) == ([{"step": 2}], 1)


def test_rewritten_file_is_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "time": 1}\n')
    file = Tail(path)
    file.read()
    path.write_text('{"step": 1}\n{"step": 2, "time": 9}\n{"step": 3}\n')
    news = file.read()
    assert news.restarted and [line["step"] for line in news.lines] == [1, 2, 3]
    path.unlink()
    assert file.read().restarted and file.read() == overview.News()
    os.mkfifo(path)
    assert file.read() == overview.News()


def test_long_file_is_read_in_chunks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(overview, "CHUNK", 100)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' * 20 + "x" * 250 + '\n{"step": 2}\n')
    file = Tail(path)
    news = [file.read() for _ in range(8)]
    assert news[0].left == 503 - 96 and news[-1].left == 0
    found = [line["step"] for one in news for line in one.lines]
    assert found == [1] * 20 + [2]


def test_series_has_bounded_points_and_keeps_peaks() -> None:
    series = Series()
    for step in range(1, 100_001):
        series.add(step, 9.0 if step == 777 else 1.0)
    points = series.points()
    assert BINS < len(points["x"]) <= 2 * BINS and max(points["high"]) == 9
    assert min(points["y"]) == min(points["low"]) == 1
    width = points["x"][1] - points["x"][0]
    assert abs(points["x"][points["high"].index(9)] - 777) <= width / 2
    few = Series()
    few.add(3, 1.5)
    assert few.points() == {"x": [3], "y": [1.5]}


def test_series_is_interrupted_at_steps_without_a_finite_value() -> None:
    series = Series()
    series.add(1, None)
    assert series.points() == {"x": [], "y": []}
    for step in range(2, 3 * BINS):
        series.add(step, None if BINS < step < 2 * BINS else 1.0)
    points = series.points()
    for name in ("y", "low", "high"):
        assert points[name][1] == points[name][-1] == 1.0 and points[name][BINS * 3 // 4] is None


def _state(path: Path) -> str:
    overview = Overview(path)
    overview.refresh()
    return str(overview.row()["state"])


def test_run_state_follows_its_ownership_and_exit_code(tmp_path: Path) -> None:
    run = tmp_path / "run"
    history = History(run)
    history.launch(2)
    assert _state(run) == "killed"
    owner = Ownership(run)
    owner.acquire(Claim(1))
    assert _state(run) == "running"
    owner.release()
    launcher = Ownership(run, ".launch.")
    launcher.acquire(Claim(1))
    assert _state(run) == "restarting"
    launcher.release()
    os.utime(run / ".owner", (1, 1))
    assert _state(run) == "killed"
    for code, state in ((75, "stopped"), (3, "not finite"), (1, "failed"), (0, "finished")):
        history.end(code)
        assert _state(run) == state


def test_run_with_a_stale_owner_file_is_shown_as_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    History(run).launch(1)
    owner = Ownership(run)
    owner.acquire(Claim(1))
    left = (run / ".owner").read_bytes()
    owner.release()
    (run / ".owner").write_bytes(left)  # as a kill leaves it
    os.utime(run / ".owner", (1, 1))
    assert _state(run) == "killed"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    run = tmp_path / "damaged"
    run.mkdir()
    (run / "manifest.json").write_text('{"ta')
    (run / "metrics.jsonl").write_bytes(
        b'\xff\x00{\n{"step": 1e999}\n{"step": "x"}\n{"step": 3, "loss": 1e999, "time": "u"}\n{"st'
    )
    (run / "events.jsonl").write_text(
        '{"event": "start", "world_size": {}, "hosts": [1]}\n{"event": "start", "step": []}\n'
        '{"event": "straggler", "rank": {}}\n{"event": ["end"], "exit_code": []}\n'
    )
    (run / "ranks.jsonl").write_text(
        '{"step": 1, "phases": [1]}\n{"step": 1, "phases": {"data": ["x"]}}\n'
        '{"step": 1, "steps": -1, "phases": {"data": [1]}, "score": 7}\n'
    )
    (run / ".owner").write_text("[1]")
    return run


def test_damaged_files_do_not_break_the_view(damaged: Path) -> None:
    shown = LiveRun(damaged).refresh()
    json.dumps(pages.make({damaged: shown}), allow_nan=False)
    assert (shown["step"], shown["loss"], shown["torn"]) == (3, None, 1)
    assert shown["restarts"] == 0, "no step was done before the second start"
    assert shown["series"]["loss"]["x"] == []


def test_restart_is_shown_and_replaces_the_lost_steps(tmp_path: Path) -> None:
    history = History(tmp_path / "run", eval_every=6)
    history.launch(2)
    history.steps(13)
    live = LiveRun(history.directory)
    assert live.refresh()["series"]["loss"]["x"][-1] == 13
    history.crash(torn=True)
    history.launch(3)
    shown = live.refresh()
    assert shown["series"]["loss"]["x"][-1] == 10
    (restart,) = shown["restarted"]
    assert (restart["cause"], restart["step"]) == ("launch", 10)
    assert (restart["ranks_before"], restart["ranks_after"]) == (2, 3)
    (mark,) = pages.make({history.directory: shown})["marks"]
    assert (mark["number"], mark["step"]) == (1, 10) and mark["at_seconds"] > 13
    history.steps(10)
    shown = live.refresh()
    assert shown["step"] == 20 and shown["series"]["loss"]["x"] == list(range(1, 21))
    assert shown["validation"]["loss"] > 0 and shown["ranks"] == 3


def test_start_before_the_first_step_is_not_a_restart(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    history.launch(1)
    history.recover(2, "hosts")
    live = LiveRun(history.directory)
    assert live.refresh()["restarts"] == 0
    history.steps(3)
    history.recover(1)
    assert live.refresh()["restarts"] == 1 == LiveRun(history.directory).refresh()["restarts"]
    history.crash()
    history.launch(1)  # from the beginning: there is no checkpoint
    assert LiveRun(history.directory).refresh()["restarts"] == 2


def test_live_run_shows_its_remaining_time_and_log(tmp_path: Path) -> None:
    history = History(tmp_path / "run")
    history.launch(2)
    history.steps(30)
    (history.directory / "logs").mkdir()
    line = {"time": 3600.5, "level": "info", "message": "rank 1 is slow"}
    (history.directory / "logs/rank_00000.jsonl").write_text(json.dumps(line) + "\n{")
    owner = Ownership(history.directory)
    owner.acquire(Claim(1))
    try:
        page = pages.make({history.directory: LiveRun(history.directory).refresh()})
    finally:
        owner.release()
    assert (page["state"], page["mood"]) == ("running", "good")
    steps = page["tiles"][0]
    assert (
        steps["value"] == "30 of 60" and steps["note"] == "31.3 s left" and len(page["tiles"]) == 6
    )
    assert page["texts"][0]["text"] == "01:00:00 rank 1 is slow"
    assert page["clocks"][0]["seconds"][-1] - page["clocks"][0]["seconds"][0] == 30.25


def test_only_runs_inside_the_root_are_visible(tmp_path: Path) -> None:
    root = tmp_path / "root"
    History(root / "inside")
    History(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "circle").symlink_to(root / "circle")
    (root / "no run").mkdir()
    runs = Runs(root)
    assert [row["name"] for row in runs.rows()] == ["inside"]
    for name in ("../outside", "..", ".", "", "link", "no run", str(tmp_path / "outside"), "a\0"):
        with pytest.raises(KeyError):
            runs.path(name)
    assert [row["name"] for row in Runs(root, "inside").rows()] == ["inside"]
    assert Runs(root, "other").rows() == []


def test_runs_viewed_in_turn_are_not_read_again(
    tmp_path: Path,
) -> None:
    names = [f"run{number}" for number in range(20)]
    for name in names:
        History(tmp_path / name)
    runs = Runs(tmp_path)
    for name in names:
        runs.run(name)
    kept = {name: found.live for name, found in runs._live.items()}
    for name in names:
        runs.run(name)
    assert {name: found.live for name, found in runs._live.items()} == kept and len(kept) == 20


# --- the server -------------------------------------------------------------------


class Served:
    """The command, and requests to it."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self.job = Job([], [*SERVE, *arguments, "--port", "0"], environment(), output)
        self.job.wait_for("until Ctrl-C", 60)
        (self.url,) = re.findall(r"http://\S+", self.job.output())
        self.port = int(re.findall(r":(\d+)/", self.url)[0])
        (self.token,) = re.findall(r"\?token=([\w-]{40,})", self.url)

    def get(self, path: str, **headers: str) -> tuple[int, str, Any]:
        """Send a request with the token; return status, body and headers."""
        return self.get_without_token(path, Authorization=f"Bearer {self.token}", **headers)

    def get_without_token(self, path: str, **headers: str) -> tuple[int, str, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=30) as answer:
                return answer.status, answer.read().decode(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), error.headers


@contextmanager
def serving(output: Path, *arguments: str) -> Iterator[Served]:
    served = Served(output, *arguments)
    try:
        yield served
    finally:
        served.job.kill()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: two that ended, and one with an unusual name that did not."""
    root = tmp_path_factory.mktemp("view") / "runs"
    for name, steps in (("short", 30), ("whole", 60), (ODD, 20)):
        history = History(root / name, eval_every=6)
        history.launch(2)
        history.steps(steps)
        if name != ODD:
            history.end(0)
    return root


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Served]:
    with serving(root.parent / "serve", str(root)) as served:
        yield served


def test_server_refuses_foreign_host_names_and_paths_outside_runs(served: Served) -> None:
    assert json.loads(served.get("/api/runs")[1])["runs"][0]["name"] == ODD
    for host in ("localhost", "127.0.0.1:1", "[::1]:80", socket.gethostname()):
        assert served.get("/api/runs", Host=host)[0] == 200, host
    for host in ("evil.example", "127.0.0.1.evil.example", "", "[", "a:b:c"):
        assert served.get("/api/runs", Host=host)[0] == 403, host
    for path in ("/..%2f..%2fetc/passwd", "/server.py", "/static/live.js"):
        assert served.get(path)[0] == 404, path
    for name in ("..", "%2e%2e%2f", "../view", "whole/checkpoints", "%00", "%ff"):
        assert served.get(f"/api/run?name={name}")[0] == 404, name
        assert served.get(f"/report?name={name}")[0] == 404, name
    assert served.get("/api/run?" + "a=1&" * 100)[0] == 400
    status, answer, _ = served.get("/api/run?" + "&".join(f"name={at}" for at in range(9)))
    assert status == 400 and "at most 8 runs can be compared" in answer
    status, _, headers = served.get("/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and "script-src 'sha256-" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_silent_clients_do_not_block_the_server(served: Served) -> None:
    silent = [socket.create_connection(("127.0.0.1", served.port), 10) for _ in range(64)]
    try:
        assert served.get("/api/runs")[0] == 200
    finally:
        for client in silent:
            client.close()


def test_server_generates_the_full_report(served: Served) -> None:
    path = f"/report?name={quote(ODD)}"
    poll(lambda: 'id="page"' in served.get(path)[1], 120, "the report")
    status, page, headers = served.get(path)
    assert status == 200 and "20 of 60 steps" in page
    assert "script-src 'sha256-" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_server_survives_the_removal_of_a_run(root: Path, served: Served) -> None:
    history = History(root / "gone")
    history.launch(1)
    assert served.get("/api/run?name=gone")[0] == 200
    for path in sorted(history.directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    history.directory.rmdir()
    status, answer, _ = served.get("/api/run?name=gone")
    assert status == 404 and "was removed" in json.loads(answer)["problem"]
    poll(lambda: '"gone"' not in served.get("/api/runs")[1], 10, "the list without it")


def test_server_requires_the_token_from_the_printed_url(root: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "serve", str(root / "whole")) as served:
        get, token, query = served.get_without_token, served.token, served.url.partition("?")[2]
        assert query == f"token={token}&run=whole"
        paths = ("/", "/api/runs", "/report?name=whole", f"/?token={token[:-1]}", "/?token=%ff")
        for path in paths:
            status, said, _ = get(path)
            assert status == 403 and said.count("\n") == 1, path
            assert "open the URL that hvdtrain report --serve printed" in said
        status, _, headers = get(f"/?{query}")
        assert status == 303 and headers["Location"] == "?run=whole"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        pair = cookie.partition(";")[0]
        assert get("/api/runs", Cookie=f"a=b; {pair}")[0] == 200
        assert get("/api/runs", Cookie=f"{pair}x")[0] == 403
        assert get("/api/runs", Authorization=f"Bearer {token}")[0] == 200
        rows = json.loads(get("/api/runs", Cookie=pair)[1])["runs"]
        assert [row["name"] for row in rows] == ["whole"], "only this one was asked for"
        assert get("/api/run?name=short", Cookie=pair)[0] == 404
        served.job.send(signal.SIGINT)
        done = served.job.wait(20)
        assert done.returncode == 0 and done.stderr == "", done


def test_server_on_all_interfaces_names_its_host_in_the_url(root: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "serve", str(root), "--host", "0.0.0.0") as served:
        assert served.url.startswith(f"http://{socket.gethostname()}:{served.port}/?token=")
        assert served.get("/api/runs")[0] == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--serve", "nowhere"], "is not a directory"),
        (["--serve", ".", "--host", "192.0.2.1"], "cannot listen on"),
        (["--serve", ".", "--host", "a..b"], "cannot listen on"),
        (["--serve", ".", "--port", "70000"], "ports lie in 0..65535"),
        (["--serve", ".", "other"], "accepts one directory"),
        (["--serve", "--out", "x.html"], "neither --out"),
        ([".", "--port", "1"], "require --serve"),
        ([], "a run directory is required"),
    ],
)
def test_invalid_usage_ends_with_a_clear_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", *arguments]) == 2
    assert said in capsys.readouterr().err


# --- in a browser -------------------------------------------------------------------


def _rows(page: Tab) -> list[str]:
    found: list[str] = page.value(
        "[...document.querySelectorAll('tbody a')].map(a => a.textContent)"
    )
    return found


@pytest.mark.slow
def test_run_list_sorts_filters_and_compares_in_a_browser(served: Served, tmp_path: Path) -> None:
    with tab(tmp_path, 900) as page:
        page.open(served.url)
        page.wait("document.querySelectorAll('tbody tr').length == 3", 60, "list")
        assert page.value("document.querySelector('tbody img')") is None
        page.value("document.querySelectorAll('th button')[3].click()")  # step
        assert _rows(page) == [ODD, "short", "whole"]
        page.value("document.querySelectorAll('th button')[3].click()")
        assert _rows(page) == ["whole", "short", ODD]
        filtered = "{const i = document.querySelector('input'); i.value = '%s';"
        filtered += " i.dispatchEvent(new Event('input'))}"
        page.value(filtered % "Finished wh")
        assert _rows(page) == ["whole"]
        page.value(filtered % "")
        for name in (0, 2):
            page.value(f"document.querySelectorAll('tbody input')[{name}].click()")
        assert page.value("document.querySelector('.tools a').textContent") == "compare 2 runs"
        page.value("document.querySelector('.tools a').click()")
        # The losses; their differences are constant.
        page.wait("document.querySelectorAll('canvas').length == 2", 60, "curves")
        legend = "document.querySelector('.u-legend').innerText"
        assert ODD.strip() in page.value(legend) and "whole" in page.value(legend)
        assert page.value("document.querySelector('img')") is None
        assert ODD.strip() in page.value("document.querySelector('table').innerText")
        assert not page.complaints


@pytest.mark.slow
def test_run_list_fits_a_narrow_screen(served: Served, tmp_path: Path) -> None:
    with tab(tmp_path, 900) as page:
        page.resize(390, 900)
        page.open(served.url)
        page.wait("document.querySelectorAll('tbody tr').length == 3", 60, "list")
        assert page.value("document.documentElement.scrollWidth") == 390
        hidden = "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)"
        assert page.value(f"{hidden}(document.querySelector('.scroll'))") == 0
        shown = "[...document.querySelectorAll('th')].filter(th => th.offsetParent)"
        names = page.value(f"{shown}.map(th => th.innerText.trim())")
        assert names == ["", "run", "state", "step", "loss"]


@pytest.mark.slow
def test_run_page_is_readable_in_dark_mode(served: Served, tmp_path: Path) -> None:
    with tab(tmp_path, 900, dark=True) as page:
        page.open(served.url + "&run=whole")
        page.wait("document.querySelectorAll('canvas').length", 60, "curves")
        shown = page.shown(tmp_path / "dark.png")
    assert not shown.complaints and shown.count(DARK) > 500_000
    assert shown.count("#e6e9ec") > 1000 and shown.count(DARK_BLUE) > 300  # the text, a curve
    assert shown.count("#000000", near=3) < 500


@pytest.fixture
def elastic(tmp_path: Path) -> Iterator[Job]:
    """Two ranks that train until they are killed, under horovodrun's elastic launcher."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    launcher = shlex.split(
        "horovodrun --gloo -np 2 --min-np 1 --max-np 2 --network-interfaces lo"
        f" --host-discovery-script 'cat {tmp_path}/hosts'"
    )
    flags = (
        "--task tests.support.tasks:Slow --train.duration 99999 --eval.every 0 --telemetry.port 0"
        f" --batch.global_size 4 --batch.micro_size 2 --run.id live --run.root {tmp_path}/runs"
    )
    command = [*launcher, *forked_train(2), *flags.split()]
    job = Job([], command, environment(), tmp_path / "job")
    yield job
    job.kill()


def _rank(root: Path, rank: int) -> psutil.Process:
    found = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["cmdline"] or [])[1:3] == ["-m", "hvdtrain.train"]
        and str(root) in process.info["cmdline"]
        and process.info["environ"].get("HOROVOD_RANK") == str(rank)
    ]
    return found[0]


@pytest.mark.slow
def test_restart_of_a_live_run_appears_without_a_reload(elastic: Job, tmp_path: Path) -> None:
    metrics = tmp_path / "runs/live/metrics.jsonl"
    poll(lambda: metrics.exists() and metrics.read_text().count("\n") > 12, 120, "steps")
    step = "Number(document.querySelector('.value').textContent.split(' ')[0].replace(',', ''))"
    live = str(tmp_path / "runs/live")
    with serving(tmp_path / "serve", live) as served, tab(tmp_path, 900) as page:
        page.open(served.url)
        page.wait("document.querySelector('.headline strong.good')", 60, "run")
        page.value("window.kept = 'since it was opened'")
        before = page.value(step)
        page.wait(f"{step} > {before}", 30, "new step")
        _rank(tmp_path / "runs", 1).kill()
        page.wait("document.body.innerText.includes('a rank failed')", 90, "restart")
        assert "2 → 1" in page.value("document.body.innerText")
        after = page.value(step)
        page.wait(f"{step} > {after}", 60, "step after it")
        assert page.value("window.kept") == "since it was opened"
        shown = page.shown(tmp_path / "live.png")
        assert shown.count(BLUE) > 1000 and shown.count(PURPLE) > 50 and not shown.complaints
        served.job.kill()
        page.wait("!document.querySelector('#problem').hidden", 30, "word of the lost server")
        assert page.value(step) > after
