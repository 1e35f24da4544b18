"""Summary of a finished run: an error while it is printed does not fail the run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.job import Finished
from tests.support.runs import TRAIN, start
from tests.support.tasks import INJECTED

FLAGS = "--batch.global_size 8 --batch.micro_size 8 --telemetry.port 0 --eval.every 0 --run.id case"
SHELL = ["sh", "-c", 'exec "$@" > /dev/full', "sh"]


def _run(root: Path, sample: str, command: list[str] = TRAIN, **env: str) -> Finished:
    flags = ["--task", "tests.support.tasks:Sampled", *FLAGS.split(), "--run.root", str(root)]
    env["HVDTRAIN_TEST_SAMPLE"] = sample
    return start(root / "output", flags, env=env, command=command).wait(60)


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, "na\ufffdve ? end"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "na?ve ? end"),
        ({"PYTHONIOENCODING": "utf-8"}, "na\u00efve \u2192 end"),
    ],
)
def test_sample_that_the_terminal_cannot_encode_is_shown_with_substitutes(
    tmp_path: Path, env: dict[str, str], shown: str
) -> None:
    done = _run(tmp_path, r"na\u00efve \u2192 end", **env)
    assert done.returncode == 0, done
    assert shown in done.stdout and "WARNING" not in done.stderr.upper(), done
    assert "files of this run" in done.stderr, done


def test_sample_that_raises_does_not_fail_a_finished_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "")
    assert done.returncode == 0, done
    warning = f"warning: the sample could not be shown (RuntimeError: {INJECTED})"
    assert done.stderr.count(warning) == 1 and "Traceback" not in done.stderr, done
    assert "files of this run" in done.stderr, done


def test_full_disk_behind_stdout_does_not_fail_a_finished_run(tmp_path: Path) -> None:
    done = _run(tmp_path, "text", [*SHELL, sys.executable, "-m", "hvdtrain.train"])
    assert done.returncode == 0, done
    assert "warning: the sample could not be shown (OSError: [Errno 28]" in done.stderr, done
