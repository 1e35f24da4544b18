"""`hvdtrain top`: the ranks of a job on a terminal, and as plain text."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvdtrain.runtime.mesh import Grid
from hvdtrain.telemetry.config import TelemetryConfig
from hvdtrain.telemetry.exporter import Exporter, ExporterAddress, write_targets
from hvdtrain.top.scrape import Rank, Scraper, Target, read_targets
from hvdtrain.top.screen import RankTable, fit
from tests.support.job import Finished, Job, poll
from tests.support.runs import REPOSITORY, environment, forked_train, start

HOST = "127.0.0.1"
TOP = [sys.executable, "-m", "hvdtrain.cli", "top"]
PHASES = ("data", "forward", "backward", "comm_exposed", "optimizer", "eval", "checkpoint", "other")
TARGET = Target(f"{HOST}:1", "http", "mine", "0", "node1")
RECORD = {"world_size": 2, "step_seconds": 0.1, "samples_per_second": 80.0, "loss": 1.5}
RECORD |= {"grad_norm": 1.0, "lr": 0.1, "time": 0.0, "step": 1234, "epoch": 2.5}


def _top(*arguments: object) -> Finished:
    begin, argv = time.monotonic(), [*TOP, *map(str, arguments)]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - begin
    return Finished(argv, done.returncode, done.stdout, done.stderr, seconds)


def _rows(output: str) -> list[dict[str, str]]:
    """Return the lines of a plain table, by column head."""
    heads, *lines = [line.split() for line in output.splitlines()[2:]]
    return [dict(zip(heads, line, strict=False)) for line in lines]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    """A job that trains on 2 ranks, and its directory."""
    root = tmp_path_factory.mktemp("runs")
    flags = ["--task", "tests.support.tasks:Paced", "--train.duration", "100000"]
    flags += ["--batch.global_size", "4", "--batch.micro_size", "2", "--eval.every", "0"]
    flags += ["--telemetry.host", HOST, "--checkpoint.every=0"]
    flags += ["--run.root", str(root), "--run.id", "mine"]
    env = {"HVDTRAIN_TEST_PACE": "0.03"}
    running = start(root / "output", flags, "gloo:2", env, forked_train(2))
    metrics = root / "mine/metrics.jsonl"
    poll(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 25, 60, "steps")
    yield running, root / "mine"
    running.kill()


def test_docs_show_the_columns_that_top_prints(job: tuple[Job, Path]) -> None:
    heads = _top(job[1], "--once", "--interval", "1").stdout.splitlines()[2].split()
    page = (REPOSITORY / "docs/monitoring.md").read_text()
    (shown,) = (line.split() for line in page.splitlines() if line.startswith("rank  host "))
    assert shown == heads


def test_once_prints_the_values_that_ranks_export(job: tuple[Job, Path]) -> None:
    done = _top(job[1], "--once", "--interval", "1")
    assert done.returncode == 0, done
    assert re.match(
        r"run mine   step \d+   loss \d+\.\d{4}   world size 2   restarts 0\n", str(done.stdout)
    ), done
    assert "2 of 2 ranks answer   slow: none" in done.stdout, done
    rows = _rows(done.stdout)
    assert [row["rank"] for row in rows] == ["0", "1"], done
    for row in rows:
        assert row["host"] and int(row["step"]) > 20 and float(row["samples/s"]) > 1
        names = ("data", "forward", "backward", "exposed", "optim", "eval", "ckpt", "other")
        shares = [int(row[name].rstrip("%")) for name in names]
        assert 96 <= sum(shares) <= 104, "shares of the interval do not add up"
        assert int(row["forward"].rstrip("%")) > 40, "the forward pass sleeps most of the time"
        assert 0 < float(row["score"]) <= 1 and int(row["memory"].rstrip("M")) > 50
        assert int(row["peak"].rstrip("M")) > 50 and row["in"] in ("forward", "backward", *names)


class Screen:
    """`hvdtrain top` in a pseudo-terminal.

    Args:
        size: (lines, columns)
    """

    def __init__(self, size: tuple[int, int], arguments: Sequence[str]) -> None:
        self._master, slave = pty.openpty()
        self.resize(size)
        self._slave = slave
        self.before = termios.tcgetattr(slave)
        env = environment({"TERM": "xterm-256color"})
        env = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*TOP, *arguments],
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.output = ""

    def resize(self, size: tuple[int, int]) -> None:
        """Resize the terminal; the kernel sends SIGWINCH to the foreground process."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def read(self) -> str:
        """Return all output so far."""
        ready = select.poll()
        ready.register(self._master, select.POLLIN)
        while ready.poll(50):
            self.output += os.read(self._master, 65536).decode()
        return self.output

    def frames(self) -> list[list[str]]:
        """Return the drawn frames, line by line, without colors."""
        text = re.sub(r"\x1b\[[0-9;]*m", "", self.read())
        return [frame.split("\r\n") for frame in text.split("\x1b[H")[1:]]

    def wait_for(self, text: str, begin: int = 0) -> list[str]:
        """Wait for a complete frame with this text, after `begin`."""
        found: list[list[str]] = []

        def there() -> bool:
            found[:] = [f for f in self.frames()[begin:-1] if any(text in line for line in f)]
            return bool(found)

        poll(there, 20, f"{text!r} on the screen")
        return found[-1]

    def end(self) -> int:
        code = self.process.wait(20)
        self.read()
        assert termios.tcgetattr(self._slave) == self.before, "the terminal is not as it was"
        for on, off in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):
            assert self.output.count(on) == self.output.count(off) == 1
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def screens() -> Iterator[list[Screen]]:
    made: list[Screen] = []
    yield made
    for screen in made:
        screen.close()


def test_screen_follows_resizes_and_ctrl_c_restores_the_terminal(
    job: tuple[Job, Path], screens: list[Screen]
) -> None:
    screen = Screen((30, 140), [str(job[1]), "--interval", "0.3"])
    screens.append(screen)
    frame = screen.wait_for("%")
    assert len(frame) == 30 and all(len(line) <= 140 for line in frame)
    assert any("exposed" in line and "eval" in line for line in frame)
    for size in ((10, 80), (4, 50), (50, 200)):
        begin = len(screen.frames())
        screen.resize(size)
        time.sleep(0.5)
        frame = screen.wait_for("run mine", begin + 1)
        assert len(frame) == size[0] and all(len(line) <= size[1] for line in frame), frame
    assert any("eval" in line for line in frame), "columns do not come back"
    screen.type(b"\x03")
    assert screen.end() == 130
    assert "Traceback" not in screen.output


def test_sigterm_restores_the_terminal(job: tuple[Job, Path], screens: list[Screen]) -> None:
    screen = Screen((30, 130), [str(job[1])])
    screens.append(screen)
    screen.wait_for("run mine")
    screen.process.send_signal(signal.SIGTERM)
    assert screen.end() == 128 + signal.SIGTERM


def _serve(directory: Path, **config: Any) -> Exporter:
    """Serve an exporter with metrics; write the file with its address."""
    directory.mkdir(exist_ok=True)
    exporter = Exporter(TelemetryConfig(host=HOST, port=1, **config), 0)
    began = time.monotonic()
    exporter.watch_totals(
        "phase_seconds", "", "phase", lambda: dict.fromkeys(PHASES, time.monotonic() - began)
    )
    exporter.step(RECORD, 8, False)
    tls = "tls_cert_file" in config
    write_targets(
        directory / "targets.json", "mine", [ExporterAddress(HOST, 0, exporter.port)], tls
    )
    return exporter


def test_top_reports_the_end_of_the_run_and_exits(tmp_path: Path, screens: list[Screen]) -> None:
    exporter = _serve(tmp_path)
    screen = Screen((20, 100), [str(tmp_path), "--interval", "0.2"])
    screens.append(screen)
    screen.wait_for("1 of 1 ranks answer")
    exporter.close()
    screen.wait_for("0 of 1 ranks answer")
    screen.wait_for("no answer: Connection refused")
    (tmp_path / "targets.json").unlink()
    assert screen.end() == 0
    assert "the run has ended" in screen.output.replace("\r\n", "")


def test_ranks_added_by_a_resize_of_the_run_are_shown(
    tmp_path: Path, screens: list[Screen]
) -> None:
    exporter = _serve(tmp_path)
    screen = Screen((20, 100), [str(tmp_path), "--interval", "0.2"])
    screens.append(screen)
    screen.wait_for("1 of 1 ranks answer")
    there = ExporterAddress(HOST, 0, exporter.port)
    write_targets(tmp_path / "targets.json", "mine", [there, there], tls=False)
    screen.wait_for("2 of 2 ranks answer")
    exporter.close()


@pytest.mark.alone
def test_silent_ranks_do_not_delay_the_scrape_of_other_ranks(tmp_path: Path) -> None:
    exporter = _serve(tmp_path)
    with socket.create_server((HOST, 0)) as silent:
        there = ExporterAddress(HOST, 0, exporter.port)
        gone = [ExporterAddress(HOST, 0, silent.getsockname()[1])] * 100
        write_targets(tmp_path / "targets.json", "mine", [*gone, there], tls=False)
        scraper, targets = Scraper(None, None), read_targets(tmp_path / "targets.json")
        rounds = []
        for _ in range(3):
            begin = time.monotonic()
            rounds.append(scraper.ranks(targets))
            assert time.monotonic() - begin < 6
        scraper.close()
    exporter.close()
    # In the first round the silent ranks may have used all connections.
    assert [ranks[-1].problem for ranks in rounds[1:]] == ["", ""]
    ranks = rounds[-1]
    assert all(rank.problem for rank in ranks[:-1])
    assert ranks[-1].shares == pytest.approx(dict.fromkeys(PHASES, 1 / 8))


def test_top_scrapes_over_https_with_a_password(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("me:open sesame\n")
    exporter = _serve(
        tmp_path,
        tls_cert_file=certificate[0],
        tls_key_file=certificate[1],
        auth_file=str(secret),
    )
    flags = (tmp_path, "--once", "--interval", "0.1")
    done = _top(*flags, "--auth-file", secret, "--ca-file", certificate[0])
    assert done.returncode == 0 and "run mine   step 1234   loss 1.5000" in done.stdout, done
    refused = _top(*flags, "--ca-file", certificate[0])
    assert refused.returncode == 1 and "no answer: 401 Unauthorized" in refused.stdout, refused
    unknown = _top(*flags, "--auth-file", secret)
    assert unknown.returncode == 1 and "no answer: self-signed certificate" in unknown.stdout
    exporter.close()
    assert "sesame" not in done.stdout + refused.stdout + refused.stderr + unknown.stderr


WRONG = {
    "no file": ({}, ["--once"], "does not exist; it exists while a run"),
    "no json": ({"targets.json": "{"}, ["--once"], "is not a list of targets"),
    "no targets": ({"targets.json": '[{"labels": {}}]'}, ["--once"], "is not a list of targets"),
    "no list": ({"targets.json": "[1]"}, ["--once"], "is not a list of targets"),
    "no auth file": ({}, ["--once", "--auth-file", "nowhere"], "--auth-file nowhere cannot"),
    "no ca file": ({}, ["--once", "--ca-file", "nowhere"], "--ca-file nowhere cannot"),
    "no terminal": ({"targets.json": "[]"}, [], "use --once"),
    "no interval": ({}, ["--interval", "0"], "0 is not >= 0.1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistake_is_reported_without_a_traceback(tmp_path: Path, case: str) -> None:
    files, flags, message = WRONG[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    done = _top(tmp_path, *flags)
    assert done.returncode == 2 and message in done.stderr, done
    assert "Traceback" not in done.stderr, done


def _ranks(count: int) -> list[Rank]:
    shares = dict.fromkeys(PHASES, 0.125)
    return [
        Rank(
            replace(TARGET, rank=str(number), host=f"node{number // 8}"),
            values={"straggler_score": 0.9 + number / 100_000, "last_step": 1234.0},
            phases=shares,
            shares=shares,
        )
        for number in range(count)
    ]


def _drawn(ranks: Sequence[Rank], width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(RankTable(ranks))
    return captured.get().splitlines()


def test_slow_rank_is_first_and_a_thousand_ranks_fit_the_screen() -> None:
    ranks = _ranks(1000)
    ranks[700] = replace(ranks[700], values={"straggler_score": 0.4}, slow="data")
    lines = _drawn(ranks, 80, 24)
    assert len(lines) == 24 and all(len(line) <= 80 for line in lines)
    assert "slow: rank 700 (data)" in lines[1]
    assert lines[3].split()[0] == "700" and lines[4].split()[0] == "0"
    assert lines[-1].startswith("the slowest ranks; 980 more do not fit")


def test_silent_ranks_fill_at_most_half_of_the_rows() -> None:
    ranks = _ranks(100)
    silent = [replace(rank, problem="timed out") for rank in ranks[:60]]
    shown, left = fit([*silent, *ranks[60:]], 20)
    assert [bool(rank.problem) for rank in shown] == [True] * 10 + [False] * 10
    assert "80 more" in left


def test_shares_start_again_when_a_process_is_replaced() -> None:
    seconds = iter((100.0, 5.0, 6.0))
    exporter = Exporter(TelemetryConfig(host=HOST, port=1), 0)
    exporter.watch_totals(
        "phase_seconds", "", "phase", lambda: dict.fromkeys(PHASES, next(seconds))
    )
    scraper = Scraper(None, None)
    target = replace(TARGET, address=f"{HOST}:{exporter.port}")
    found = [scraper.ranks([target])[0].shares for _ in range(3)]
    scraper.close()
    exporter.close()
    assert found == [{}, {}, pytest.approx(dict.fromkeys(PHASES, 0.125))]


def test_top_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "targets.json").write_text("[]")
    code = (
        "import sys; from hvdtrain.cli import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'horovod', 'numpy'} & sys.modules.keys()))"
    )
    argv = [sys.executable, "-c", code, "top", str(tmp_path), "--once", "--interval", "0.1"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
    assert json.loads((tmp_path / "targets.json").read_text()) == []


def test_top_exits_cleanly_if_the_targets_file_breaks(
    tmp_path: Path, screens: list[Screen]
) -> None:
    exporter = _serve(tmp_path)
    screen = Screen((20, 100), [str(tmp_path), "--interval", "0.2"])
    screens.append(screen)
    screen.wait_for("1 of 1 ranks answer")
    exporter.close()
    (tmp_path / "targets.json").write_text("{")
    assert screen.end() == 2
    assert "is not a list of targets" in screen.output and "Traceback" not in screen.output


def test_layout_is_shown_without_hiding_ranks(tmp_path: Path) -> None:
    grid = Grid((0, 1, 2, 3), {"pipeline": 2, "tensor": 1})
    there = [ExporterAddress(f"node{rank // 2}", 0, 1) for rank in range(4)]
    write_targets(tmp_path / "targets.json", "mine", there, tls=False, grid=grid)
    waits = {"pipeline_wait_seconds": 3.0, "pipeline_schedule_seconds_total": 10.0}
    ranks = [
        replace(rank, target=target, values={**waits, "pipeline_bubble_formula": 0.2})
        for rank, target in zip(_ranks(4), read_targets(tmp_path / "targets.json"), strict=True)
    ]
    lines = _drawn(ranks, 120, 24)
    assert lines[2] == "4 ranks = data 2 x pipeline 2   bubble 30% (formula 20%)"
    assert lines[3].split()[:5] == ["rank", "host", "dp", "pp", "tp"]
    assert [line.split()[:5] for line in lines[4:8]] == [
        [str(rank), f"node{rank // 2}", str(rank // 2), str(rank % 2), "0"] for rank in range(4)
    ]
    assert lines[8] == "replica 0 on node0: rank 0 (pipeline 0), rank 1 (pipeline 1)"
    low = _drawn(ranks, 120, 9)
    assert len(low) == 9 and [line.split()[0] for line in low[4:8]] == ["0", "1", "2", "3"]
    assert not any("layout" in line or "replica" in line for line in _drawn(_ranks(4), 120, 24))
