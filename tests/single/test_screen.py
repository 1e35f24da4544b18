"""Console output of training: a progress bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import time
from io import StringIO
from pathlib import Path

import pytest

from hvdtrain import log
from hvdtrain.agent.output import rank_prefix
from hvdtrain.launch.commands import horovodrun, mpirun
from hvdtrain.supervise.launcher import Launcher
from tests.support.runs import REPOSITORY, TINY, TRAIN, environment, metrics

SECONDS = 100


def _on_a_terminal(argv: list[str], directory: Path) -> str:
    """Run a command on a terminal of 120 columns; return its output."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.chdir(directory)
        os.execve("/usr/bin/timeout", ["timeout", str(SECONDS), *argv], environment())
    shown = b""
    try:
        while block := os.read(terminal, 1 << 16):
            shown += block
    except OSError:  # the last process on the terminal has ended
        pass
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0, shown.decode(errors="replace")
    return shown.decode(errors="replace")


def _flags(root: Path, steps: int) -> list[str]:
    steps_and_place = ["--train.duration", str(steps), "--run.root", str(root), "--run.id", "a"]
    return [*TINY, "--checkpoint.every", "0", *steps_and_place]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["none", "mpi", "gloo"])
def test_terminal_shows_a_progress_bar_without_launcher_prefixes(
    tmp_path: Path, launcher: str
) -> None:
    argv = [*TRAIN, *_flags(tmp_path, 30)]
    if launcher != "none":
        argv = horovodrun(1, argv, controller=launcher)
    said = _on_a_terminal(argv, tmp_path)
    assert re.search(r"\rstep 30/30 \|█+\| loss .* tokens/s  ETA 0:00", said), said
    assert "hvdtrain: step" not in said
    for line in said.splitlines():
        assert not re.match(r"\[.*<stderr>:", line), said
    assert f"\nhvdtrain: files of this run: {tmp_path}/a" in said.replace("\r", "")


@pytest.mark.slow
def test_redirected_output_does_not_reach_the_terminal(tmp_path: Path) -> None:
    argv = mpirun(1, [*TRAIN, *_flags(tmp_path, 3)])
    for number, end in enumerate((f"2>{tmp_path}/0", f"2>&1 | cat >{tmp_path}/1")):
        shown = _on_a_terminal(["bash", "-c", f"{shlex.join(argv)} {end}"], tmp_path)
        assert "hvdtrain" not in shown and "%|" not in shown
        assert "hvdtrain: " in (tmp_path / str(number)).read_text()
        shutil.rmtree(tmp_path / "a")


@pytest.mark.soak
@pytest.mark.slow
def test_make_train_prints_few_lines_without_launcher_prefixes(tmp_path: Path) -> None:
    arguments = shlex.join([*_flags(tmp_path, 60), "--eval.every", "25"])
    make = ["make", "--no-print-directory", "-n", "train", "NP=2", f"ARGS={arguments}"]
    *_, recipe = subprocess.check_output(make, cwd=REPOSITORY, text=True).splitlines()
    recipe = recipe.replace(str(REPOSITORY / ".venv/bin"), str(Path(sys.executable).parent))
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", recipe],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("hvdtrain: ") for line in lines), done.stderr
    steps = [int(step) for step in re.findall(r"^hvdtrain: step (\d+)/60 ", done.stderr, re.M)]
    assert {1, 25, 50, 60} <= set(steps) and steps == sorted(steps)
    assert len(steps) <= 4 + (time.monotonic() - began) / 2
    assert "<stdout>" not in done.stdout
    assert [line["step"] for line in metrics(tmp_path / "a")] == list(range(1, 61))


def test_log_line_is_written_in_one_call() -> None:
    class Stream(StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.pieces: list[str] = []

        def write(self, text: str) -> int:
            self.pieces.append(text)
            return len(text)

    stream = Stream()
    log.to_screen(stream)
    try:
        logging.getLogger("hvdtrain").warning("slow")
    finally:
        log.close()
    assert stream.pieces == ["hvdtrain: warning: slow\n"]


def test_lines_of_ranks_other_than_0_name_their_rank() -> None:
    assert rank_prefix(0, "stdout", "text\n") == rank_prefix(0, "stderr", "Traceback\n") == ""
    assert rank_prefix(3, "stderr", "Traceback\n") == "[3]<stderr>:"
    assert rank_prefix(3, "stderr", "hvdtrain: error: rank 3 on a: full\n") == ""
    assert rank_prefix(1, "stdout", "hvdtrain: x\n") == "[1]<stdout>:"


def test_supervisor_forwards_output_and_keeps_last_lines(capfd: pytest.CaptureFixture[str]) -> None:
    script = r"printf 'hvdtr' >&2; sleep 0.1; printf 'ain: step 1/9\nthe end' >&2; printf 'text\n'"
    launcher = Launcher(["sh", "-c", script], os.environ, "/")
    deadline = time.monotonic() + 10
    while launcher.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert launcher.last_lines() == ["hvdtrain: step 1/9", "the end"]
    said = capfd.readouterr()
    assert (said.out, said.err) == ("text\n", "hvdtrain: step 1/9\nthe end")
