"""The `hvdtrain` command: starts quickly and reports user errors without a traceback."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.errors import UserError
from tests.support.runs import REPOSITORY, environment

HEAVY = ("torch", "horovod", "numpy", "jsonargparse")


def _hvdtrain(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-m", "hvdtrain.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    done = _hvdtrain("--help", flags=("-X", "importtime"))
    assert done.returncode == 0
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & set(HEAVY)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_version_names_the_parts_without_importing_them() -> None:
    done = _hvdtrain("--version", flags=("-X", "importtime"))
    assert done.returncode == 0, done
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names[:3] == ["hvdtrain", "torch", "Horovod"] and names[4:] == ["Python"]
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & set(HEAVY)


def test_train_command_equals_the_module() -> None:
    bad, train = ["--train.step", "3"], [sys.executable, "-m", "hvdtrain.train"]
    for flags in (["--help"], ["--print_config=skip_default", "--seed", "5"], bad):
        module = subprocess.run([*train, *flags], capture_output=True, text=True, timeout=60)
        command = _hvdtrain("train", *flags)
        assert (command.returncode, command.stdout) == (module.returncode, module.stdout)
        assert command.stderr == module.stderr


@pytest.mark.alone
def test_help_takes_less_than_a_second() -> None:
    took = []
    for _ in range(3):  # the best of three, because other programs may use the cores
        started = time.monotonic()
        _hvdtrain("--help")
        took.append(time.monotonic() - started)
    assert min(took) < 1.0


def test_closed_pipe_causes_no_traceback() -> None:
    shell = f"{sys.executable} -m hvdtrain.cli --help | true; exit ${{PIPESTATUS[0]}}"
    listing = f"{sys.executable} -m hvdtrain.cli report tests/data/recorded --format json | true"
    for command in (shell, listing):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr, done


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "train"])
def test_every_command_has_a_module_with_arguments_and_run(name: str) -> None:
    module = importlib.import_module(f"hvdtrain.commands.{name}")
    assert callable(module.add_arguments) and callable(module.run)


@pytest.mark.parametrize("arguments", [(), ("horovod",), ("discover", "--hosts")])
def test_incomplete_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    done = _hvdtrain(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.startswith("usage:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "hvdtrain: error: unknown command 'trian'; did you mean train?"),
        ("horovodd", "hvdtrain: error: unknown command 'horovodd'; did you mean horovod?"),
        ("xyzzy", "hvdtrain: error: unknown command 'xyzzy'; choose from train, launch, "),
        ("bench layouts", "hvdtrain bench: error: unknown action 'layouts'; choose from "),
        ("ckpt lst", "hvdtrain ckpt: error: unknown action 'lst'; did you mean list?"),
        ("top --onse x", "hvdtrain top: error: unknown argument --onse; did you mean --once?"),
        ("ckpt list a b", "hvdtrain ckpt list: error: unknown argument b; see hvdtrain ckpt list"),
        (
            "launch --hosts a:1 --controller glo",
            "hvdtrain launch: error: --controller: unknown value 'glo'; did you mean gloo?",
        ),
        (
            "launch --hosts a:1 --run.id mine",
            "hvdtrain launch: error: unknown argument --run.id; configuration keys follow ",
        ),
    ],
)
def test_unknown_argument_gets_a_one_line_suggestion(line: str, message: str) -> None:
    done = _hvdtrain(*line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_user_error_is_one_line_and_keeps_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Odd(UserError):
        exit_code = 75

    def run() -> int:
        raise Odd("no wheels today")

    monkeypatch.setattr("hvdtrain.horovod_wheel.check.run", run)
    assert cli.main(["horovod", "check"]) == 75
    assert capsys.readouterr().err == "hvdtrain: error: no wheels today\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "train",
        "plan --gpu H100",
        "data columns --out c.json -- --data.train rows.csv --tabular.label last",
    ],
)
def test_missing_horovod_is_reported_without_traceback(command: str, tmp_path: Path) -> None:
    (tmp_path / "horovod.py").write_text("raise ImportError(\"No module named 'horovod'\")\n")
    (tmp_path / "rows.csv").write_text("first,last\n1,2\n")
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain.cli", *command.split()],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and "hvdtrain horovod build --install" in done.stderr
