"""Adasum: training, resume and the configurations that it rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.config import Config
from hvdtrain.config_checks import Ranks, check_ranks
from hvdtrain.errors import UserError
from hvdtrain.exchange.config import ExchangeConfig
from tests.support import warm
from tests.support.runs import REPOSITORY, TINY, losses, run, start, train, weights

STEPS, HALF = 60, 30
ADASUM = ["--exchange.reduce", "adasum"]
FLAGS = [*ADASUM, "--train.duration", str(STEPS), "--checkpoint.every", str(HALF)]


def test_adasum_on_four_ranks_matches_the_paper(tmp_path: Path) -> None:
    command = [warm.python(4), "-m", "pytest", "-q"]
    tests = [str(REPOSITORY / "tests/parallel/test_adasum.py")]
    done = start(tmp_path, tests, "mpirun:4", command=command).wait(120)
    assert done.returncode == 0 and "3 passed" in done.stdout, done


@pytest.mark.soak
def test_adasum_run_learns_resumes_exactly_and_reports_rank_dependence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train(tmp_path, "adasum", FLAGS, "mpirun:2")
    curve = losses(directory)
    assert curve[-1] < 0.8 * curve[0]
    checkpoint = directory / f"checkpoints/step_{HALF:08}"
    resumed = train(tmp_path, "resumed", [*FLAGS, "--run.resume", str(checkpoint)], "mpirun:2")
    assert losses(resumed) == curve[HALF:]
    assert weights(resumed, STEPS) == weights(directory, STEPS)
    assert main(["audit", str(directory)]) == 0
    said = "the curve depends on the number of ranks: exchange.reduce adasum"
    assert said in capsys.readouterr().out


# Launcher, more flags, expected message. The global batch has 4 micro-batches.
MISTAKES = [
    ("gloo:2", "", "exchange.reduce adasum requires MPI"),
    ("mpirun:3", "", "it requires 2, 4, 8, ... ranks, not 3"),
    ("mpirun:2", "--batch.micro_size 8", "batch.micro_size = 1) must be a multiple of the 2 ranks"),
    (
        "",
        "--exchange.wire float16",
        "exchange.reduce adasum excludes exchange.wire float16: Adasum combines whole",
    ),
]


@pytest.mark.parametrize(("launcher", "flags", "said"), MISTAKES)
def test_unsupported_adasum_configuration_is_a_one_line_error(
    tmp_path: Path, launcher: str, flags: str, said: str
) -> None:
    where = ["--run.root", str(tmp_path)]
    done = run(tmp_path / "output", [*TINY, *where, *ADASUM, *flags.split()], launcher)
    assert done.returncode == 2, done
    output = done.stdout + done.stderr
    assert output.count(said) == 1 and output.count("hvdtrain: error:") == 1, done
    assert "Traceback" not in output, done


def test_elastic_run_rejects_adasum() -> None:
    config = Config(exchange=ExchangeConfig(reduce="adasum"))
    check_ranks(config, Ranks(1, elastic=False))
    with pytest.raises(UserError, match="requires MPI, and cannot be elastic"):
        check_ranks(config, Ranks(1, elastic=True))
