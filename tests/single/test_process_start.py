"""How patched Horovod starts a process on this host: exit code, output and termination."""

from __future__ import annotations

import io
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from horovod.runner.common.util import env
from horovod.runner.util import guarded_exec

from hvdtrain.launch.commands import horovodrun
from tests.support.job import Job, poll
from tests.support.runs import environment

pytestmark = pytest.mark.slow

SETTINGS = SimpleNamespace(prefix_output_with_timestamp=False)


def _run(code: str, events: Sequence[threading.Event] = ()) -> tuple[int, str]:
    """Run a Python program; return (exit code, output)."""
    out = io.StringIO()
    command = shlex.join(["env", "NAME=a=b", sys.executable, "-c", code])
    exit_code = guarded_exec.execute(
        command, None, SETTINGS, guarded_exec.Output(out, out), list(events)
    )
    return exit_code, out.getvalue()


def test_launcher_starts_ranks_without_importing_torch(tmp_path: Path) -> None:
    # 2 s in each start, to find out that Gloo is available.
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')\n")
    argv = horovodrun(1, ["true"])
    done = Job([], argv, environment({"PYTHONPATH": str(tmp_path)}), tmp_path / "job").wait(60)
    assert done.returncode == 0, done


IN_A_SINGLETON = """
import subprocess, sys
from mpi4py import MPI
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""
A_COMMAND = """
from hvdtrain import cli
from hvdtrain.launch.commands import mpirun
import os
cli.main(["ls", "/nothing"])
os.execvp("mpirun", mpirun(2, ["echo", "started"]))
"""


def test_mpirun_starts_ranks_from_process_that_imported_mpi(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", IN_A_SINGLETON, A_COMMAND]
    done = Job([], argv, environment({}), tmp_path / "job").wait(60)
    assert done.returncode == 0 and done.stdout.count("started") == 2, done


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(0)", 0), ("sys.exit(75)", 75), ("os.kill(os.getpid(), 11)", 139)],
)
def test_exit_code_is_passed_through(end: str, code: int) -> None:
    assert _run(f"import os, sys; {end}") == (code, "")


def test_missing_program_is_named() -> None:
    out = io.StringIO()
    code = guarded_exec.execute("env A=1 not-there", None, SETTINGS, guarded_exec.Output(out, out))
    assert code == 127
    assert "not-there cannot be started: No such file" in out.getvalue()


def test_home_directory_may_be_unwritable() -> None:
    arguments = ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2", "true"]
    done = subprocess.run(
        arguments, env={**environment(), "HOME": "/sys"}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done


def test_program_path_may_contain_equals_sign(tmp_path: Path) -> None:
    program = tmp_path / "lr=0.1" / "run"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho $A\n")
    program.chmod(0o755)
    out = io.StringIO()
    command = shlex.join(["env", "A=b=/c", str(program)])
    code = guarded_exec.execute(command, None, SETTINGS, guarded_exec.Output(out, out))
    assert (code, out.getvalue()) == (0, "b=/c\n")


def test_output_before_kill_is_complete() -> None:
    code, text = _run("import os; os.write(1, b'x' * 300_000 + b'!'); os.kill(os.getpid(), 9)")
    assert (code, len(text), text[-1]) == (137, 300_001, "!")


def test_non_utf8_output_does_not_block_process() -> None:
    code, text = _run("import os; os.write(1, b'\\xff\\n' + b'x' * 300_000 + b'!')")
    assert (code, text[0], text[-1]) == (0, "\N{REPLACEMENT CHARACTER}", "!")


@pytest.mark.alone
@pytest.mark.parametrize("detach", ["", "os.setsid()", "os.setsid(); os.fork() and os._exit(0)"])
def test_helper_is_killed_with_its_process(detach: str) -> None:
    began = time.monotonic()
    code, _ = _run(
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    {detach or 'pass'}\n"
        "    time.sleep(60)\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert code == 137
    # It holds the output's pipe, so a reader of the pipe waits for the helper.
    assert time.monotonic() - began < 2


def test_process_that_ignores_sigterm_is_killed(
    tmp_path: Path,
) -> None:
    event, ready = threading.Event(), tmp_path / "ready"

    def wish() -> None:
        deadline = time.monotonic() + 10
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        event.set()

    threading.Thread(target=wish, daemon=True).start()
    began = time.monotonic()
    code, _ = _run(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(60)",
        [event],
    )
    assert code == 137
    assert time.monotonic() - began < 20


def test_signal_to_starter_process_is_forwarded_to_rank() -> None:
    code, _ = _run(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "time.sleep(60)"
    )
    assert code == 75


@pytest.mark.alone
def test_process_is_killed_when_its_starter_is_killed() -> None:
    began = time.monotonic()
    code, _ = _run("import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(60)")
    assert code == 137
    assert time.monotonic() - began < 1.5, "it holds the pipe of the output"


def test_process_starts_under_kubeflow_agent_without_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Replacement of Kubeflow's agent, which exists only in its containers.
    agent = tmp_path / "kubexec.sh"
    agent.write_text('#!/bin/sh\nshift\nexec /bin/sh -c "$*" < /dev/null\n')
    agent.chmod(0o755)
    monkeypatch.setattr(env, "KUBEFLOW_MPI_EXEC", str(agent))
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", str(agent))
    out = io.StringIO()
    command = "env A='a b' sh -c 'echo $A in $PWD; exit 3'"
    directory = tmp_path / "it's here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    code = guarded_exec.execute(command, "pod", SETTINGS, guarded_exec.Output(out, out))
    assert (code, out.getvalue()) == (3, f"a b in {directory}\n")


def test_environment_larger_than_pipe_buffer_arrives_complete() -> None:
    values = {f"NAME_{i}": "x" * 100_000 for i in range(5)}
    code = "import os; print(sum(len(v) for k, v in os.environ.items() if k[:5] == 'NAME_'))"
    out = io.StringIO()
    words = ["env", *(f"{name}={value}" for name, value in values.items()), sys.executable]
    command = shlex.join([*words, "-c", code])
    assert guarded_exec.execute(command, None, SETTINGS, guarded_exec.Output(out, out)) == 0
    assert out.getvalue() == "500000\n"


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP])
def test_signal_to_horovodrun_lets_all_ranks_save(
    tmp_path: Path, controller: str, number: signal.Signals
) -> None:
    if controller == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    seconds = 6 if controller == "gloo" else 3  # old launchers killed ranks sooner
    save = (
        "import os, signal, sys, time\n"
        "def save(number, frame):\n"
        f"    time.sleep({seconds})\n"
        "    os.write(1, f'saved after {number}\\n'.encode())\n"
        "    sys.exit(75)\n"
        "for number in (1, 10, 12, 15):\n"
        "    signal.signal(number, save)\n"
        "os.write(1, b'ready\\n')\n"
        "time.sleep(60)\n"
    )
    command = horovodrun(2, [sys.executable, "-c", save], controller=controller)
    job = Job([], command, environment(), tmp_path / "output")
    poll(lambda: job.output().count("ready") == 2, 30, "both ranks")
    job.send(number)
    time.sleep(0.2)
    job.send(number)  # of a pair
    done = job.wait(40)
    passed_on = {"mpi": {}, "gloo": {n: n for n in (signal.SIGUSR2, signal.SIGHUP)}}[controller]
    sent = passed_on.get(number, signal.SIGUSR1 if controller == "mpi" else signal.SIGTERM)
    assert done.returncode == 75, done
    assert done.stdout.count(f"saved after {int(sent)}") == 2, done


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_second_signal_to_horovodrun_ends_ranks(tmp_path: Path, controller: str) -> None:
    if controller == "mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    ignore = (
        "import os, signal, time\n"
        "for number in (10, 15):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "os.write(1, b'ready\\n')\n"
        "time.sleep(60)\n"
    )
    command = horovodrun(1, [sys.executable, "-c", ignore], controller=controller)
    job = Job([], command, environment(), tmp_path / "output")
    job.wait_for("ready", 30)
    job.send(signal.SIGTERM)
    time.sleep(1.5)
    job.send(signal.SIGTERM)
    assert job.wait(30).returncode != 0


def test_mpirun_leaves_stdin_to_the_shell() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun")
    read = horovodrun(1, [sys.executable, "-c", "input()"], controller="mpi")
    loop = f"{shlex.join(read)} 2>/dev/null; cat"
    done = subprocess.run(
        ["sh", "-c", loop], input="kept\n", env=environment(), capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert "kept" in done.stdout
