"""Arguments after the -- of `hvdtrain launch`: keys, or a command as for horovodrun."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from hvdtrain import cli
from hvdtrain.supervise import supervisor

KEYS = ["--run.id", "mine", "--train.duration", "7"]
MODULE = [sys.executable, "-m", "hvdtrain.train"]
HERE = Path(sys.executable).parent


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[supervisor.SupervisedRun]:
    """Plans of the launches that the test begins; nothing is started."""
    plans: list[supervisor.SupervisedRun] = []

    def run(self: supervisor.Supervisor) -> int:
        plans.append(self._plan)
        return 0

    monkeypatch.setattr(supervisor.Supervisor, "run", run)
    monkeypatch.setenv("PATH", str(HERE), prepend=":")
    monkeypatch.chdir(tmp_path)
    return plans


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("--", MODULE),
        ("-- python -m hvdtrain.train", MODULE),
        ("-- python3 -m hvdtrain.train", MODULE),
        ("python -m hvdtrain.train", MODULE),
        (f"-- {sys.executable} -m hvdtrain.train", MODULE),
        ("-- hvdtrain train", MODULE),
        (f"-- {HERE}/hvdtrain train", MODULE),
        ("-- python -u -X dev -m hvdtrain.train", [sys.executable, "-u", "-X", "dev", *MODULE[1:]]),
        ("-- env A=1 python -m hvdtrain.train", ["env", "A=1", *MODULE]),
    ],
)
def test_launch_accepts_horovodrun_style_training_command(
    planned: list[supervisor.SupervisedRun], tmp_path: Path, command: str, argv: list[str]
) -> None:
    assert cli.main(["launch", "--hosts", "a:2", *command.split(), *KEYS]) == 0
    (plan,) = planned
    assert plan.train == [*argv, *KEYS]
    assert plan.run == tmp_path / "runs/mine"


def test_launch_takes_any_script_and_knows_whether_it_uses_hvdtrain(
    planned: list[supervisor.SupervisedRun], tmp_path: Path
) -> None:
    for name, text in (("own", "from hvdtrain import training"), ("other", "import horovod")):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        command = ["python", str(script), "--run.id", "a"]
        assert cli.main(["launch", "--hosts", "a:2", "--", *command]) == 0
        assert planned[-1].train == [sys.executable, *command[1:]]
    assert [plan.steps_known for plan in planned] == [True, False]
    assert planned[0].run == tmp_path / "runs/a" and planned[1].run.name.startswith("launch-")


@pytest.mark.parametrize("command", ["train.py --epochs 3", "python other.py"])
def test_script_that_does_not_exist_is_named(
    planned: list[supervisor.SupervisedRun], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main(["launch", "--hosts", "a:2", "--", *shlex.split(command)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ".py does not exist here (" in line and not planned


@pytest.mark.parametrize("command", ["python -m other", "mine"])
def test_launch_rejects_program_other_than_training(
    planned: list[supervisor.SupervisedRun], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert cli.main(["launch", "--hosts", "a:2", "--", *shlex.split(command)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hvdtrain: error: `{command}` does not start training: keys of the ")
    assert "`python -m hvdtrain.train --key value ...`" in line and not planned


def test_launch_rejects_python_of_another_environment(
    planned: list[supervisor.SupervisedRun], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = Path(sys.base_prefix) / "bin" / Path(sys.executable).resolve().name
    (tmp_path / "hvdtrain").touch()
    for words in (
        [str(base), "-m", "hvdtrain.train"],
        ["python9.9", "-m", "hvdtrain.train"],
        [str(tmp_path / "hvdtrain"), "train"],
    ):
        assert cli.main(["launch", "--hosts", "a:2", "--", *words, *KEYS]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hvdtrain: error: `{words[0]}` (") and sys.executable in line
    assert not planned


def test_launch_validates_keys_before_starting_ranks(
    planned: list[supervisor.SupervisedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--run.id", "mine", "--train.durations", "7"]
    assert cli.main(["launch", "--hosts", "a:2", "--", *MODULE, *flags]) == 2
    assert "did you mean train.duration?" in capsys.readouterr().err
    assert not planned
