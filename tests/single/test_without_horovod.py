"""One process trains without Horovod; several ranks need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import REPOSITORY, TINY, losses, start, train

pytestmark = pytest.mark.slow


@pytest.fixture
def without_horovod(tmp_path: Path) -> dict[str, str]:
    """The environment of processes that cannot import Horovod."""
    package = tmp_path / "hidden/horovod"
    package.mkdir(parents=True)
    message = "No module named 'horovod'"
    (package / "__init__.py").write_text(f'raise ModuleNotFoundError("{message}", name="horovod")')
    return {"PYTHONPATH": f"{package.parent}:{REPOSITORY}"}


@pytest.mark.parametrize("exchange", ["dense", "compression powersgd", "sync_every 2"])
def test_one_process_without_horovod_has_the_same_losses(
    tmp_path: Path, without_horovod: dict[str, str], exchange: str
) -> None:
    flags = ["--train.duration", "5", "--checkpoint.every", "2"]
    if exchange != "dense":
        flags += f"--exchange.{exchange}".split()
    run = ["--run.root", str(tmp_path), "--run.id", "without"]
    done = start(tmp_path, [*TINY, *flags, *run], env=without_horovod).wait(60)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done
    assert losses(tmp_path / "without") == losses(train(tmp_path, "with", flags))


@pytest.mark.parametrize("launcher", ["mpirun:2", "torchrun:2"])
def test_ranks_without_horovod_end_with_one_error_that_names_the_build(
    tmp_path: Path, without_horovod: dict[str, str], launcher: str
) -> None:
    done = start(tmp_path, [*TINY, "--run.root", str(tmp_path)], launcher, without_horovod).wait(60)
    assert done.returncode != 0 and done.stderr.count("hvdtrain: error:") == 1, done
    assert "build it for this torch and MPI with `hvdtrain horovod build --install`" in done.stderr
