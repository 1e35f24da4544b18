"""Runs of the task `tabular`: it learns, with the same curve on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.datasets import KEYS, sales, write
from tests.support.job import Finished
from tests.support.runs import losses, metrics, run

SHORT = (
    "--batch.global_size 48 --batch.micro_size 8 --train.duration 24 --eval.every 12"
    " --optim.lr 0.01 --schedule.warmup_steps 4 --telemetry.port 0"
)
PRETRAIN = "--tabular.objective pretraining"


def _train(root: Path, name: str, flags: str, launcher: str = "") -> Finished:
    """Train on `root`/sales.parquet."""
    file = root / "sales.parquet"
    if not file.exists():
        write(sales(3000), file, rows=500)
    where = f"--run.root {root} --run.id {name} --data.train {file}"
    arguments = [*KEYS, *f"{SHORT} {flags} {where}".split()]
    return run(root / "output", arguments, launcher, timeout=180)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the runs `classes` and `cells`, of one rank."""
    root = tmp_path_factory.mktemp("runs")
    for name, flags in (("classes", ""), ("cells", PRETRAIN)):
        done = _train(root, name, flags)
        assert done.returncode == 0, done
    return root


@pytest.mark.parametrize(
    ("name", "flags", "launcher"),
    [pytest.param("classes", "", "gloo:3", marks=pytest.mark.soak), ("cells", PRETRAIN, "gloo:3")],
)
def test_losses_and_metrics_do_not_depend_on_the_world_size(
    root: Path, name: str, flags: str, launcher: str
) -> None:
    other = f"{name}-{launcher.replace(':', '-')}"
    done = _train(root, other, flags, launcher)
    assert done.returncode == 0, done
    assert losses(root / other) == pytest.approx(losses(root / name), rel=1e-5)
    last, expected = metrics(root / other)[-1], metrics(root / name)[-1]
    assert last.keys() == expected.keys()
    for key in ("validation_loss", "validation_accuracy", "validation_auc"):
        if key in expected:
            assert last[key] == pytest.approx(expected[key], rel=1e-5), key
    assert ("validation_auc" in last) == (name == "classes")


def test_classifier_learns_and_reports_omitted_rows_and_columns(root: Path) -> None:
    done = _train(root, "longer", "--train.duration 60")
    assert done.returncode == 0, done
    for said in (
        "training rows have no sold and are omitted",
        "not used, because they are constant in the training rows: country",
        "in the validation rows",
        "sold yes predicted as yes",
    ):
        assert said in done.stdout + done.stderr, said
    again = _train(root, "longer", "--train.duration 120", "gloo:2")
    assert again.returncode == 0, again
    assert "resumed from the checkpoint of step 60" in again.stdout + again.stderr, again
    assert metrics(root / "longer")[-1]["validation_auc"] > 0.85


def test_pretrained_model_can_be_fine_tuned(root: Path) -> None:
    first = f"--run.init_from {root}/cells --run.init_strict false"
    tune = f"{first} --tabular.columns {root}/cells --tabular.label_fraction 0.1"
    done = _train(root, "tuned", tune, "gloo:2")
    assert done.returncode == 0, done
    said = done.stdout + done.stderr
    assert "2 missing (head.bias, head.weight)" not in said
    assert "missing (head.bias, head.weight, label_json)" in said, said
    assert "of another shape" not in said


def test_regression_learns_a_number(root: Path) -> None:
    flags = "--tabular.objective regression --tabular.label price --tabular.ignore sold"
    done = _train(root, "price", f"{flags} --train.duration 60")
    assert done.returncode == 0, done
    last = metrics(root / "price")[-1]
    assert last["validation_r2"] > 0.8 and 0 < last["validation_rmse"] < 7, last


def test_truncated_parquet_file_is_named(tmp_path: Path) -> None:
    file = write(sales(), tmp_path / "sales.parquet")
    file.write_bytes(file.read_bytes()[:2000])
    done = _train(tmp_path, "broken", "", "mpirun:2")
    assert done.returncode == 2, done
    assert f"{file}: cannot be read (" in done.stderr and "Traceback" not in done.stderr
