"""Models that Horovod or the optimizer would reject: trained, or refused in one sentence.

On one process and on two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hvdtrain import cli
from hvdtrain.errors import UserError
from hvdtrain.optim.trainable import check_device, check_model
from tests.support.job import Finished
from tests.support.runs import losses, metrics, run

FLAGS = (
    "--batch.global_size 8 --batch.micro_size 2 --telemetry.port 0 --train.duration 6"
    " --train.replica_check_every 2 --eval.every 2 --checkpoint.every 3 --run.id case"
)
LAUNCHERS = ["", "mpirun:2"]
REFUSED = {
    "SparseGradient": "parameter table gets sparse gradients",
    "Reentrant": "received its gradient more than once in a backward pass",
    "ThawedLate": "parameter bias was frozen when the run began",
    "SometimesWeighted": "'loss' was (sum, weight) for ",
    "StreamedShort": "the dataset _Rows ended after 35 samples, but its __len__() says 37",
}


def _run(root: Path, task: str, launcher: str, *flags: str) -> Finished:
    where = ["--run.root", str(root), "--task", f"tests.support.unusual:{task}"]
    return run(root / "output", [*FLAGS.split(), *where, *flags], launcher)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("task", REFUSED)
def test_untrainable_model_ends_the_run_with_one_sentence(
    tmp_path: Path, task: str, launcher: str
) -> None:
    done = _run(tmp_path, task, launcher)
    assert done.returncode == 2, done
    output = done.stdout + done.stderr
    assert output.count(REFUSED[task]) == 1 and output.count("hvdtrain: error:") == 1, done
    assert "Traceback" not in output, done


def test_channels_last_weights_train_like_row_major_ones(
    tmp_path: Path,
) -> None:
    constant, curves = "--schedule.name=constant", []
    # The last two resume from a checkpoint.
    for task, launcher, parts in (
        ("RowMajor", "", ["8"]),
        ("ChannelsLast", "", ["6", "8"]),
        ("ChannelsLast", "mpirun:2", ["6", "8"]),
    ):
        root = tmp_path / task / (launcher[:3] or "one")
        for steps in parts:
            done = _run(root, task, launcher, "--train.duration", steps, constant)
            assert done.returncode == 0, done
        assert len(metrics(root / "case")) == 8
        curves.append(losses(root / "case"))
    alone, *others = curves
    for other in others:
        assert other == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("task", ["Float16", "BFloat16"])
def test_16_bit_weights_train_the_same_on_any_number_of_ranks(tmp_path: Path, task: str) -> None:
    found = []
    for launcher in (*LAUNCHERS, "gloo:2"):
        root = tmp_path / (launcher[:4] or "one")
        done = _run(root, task, launcher)
        assert done.returncode == 0, done
        found.append(losses(root / "case"))
    assert found[1] == pytest.approx(found[0], rel=1e-2)
    assert found[2] == found[1]


def test_iterable_dataset_has_the_same_curve_on_two_ranks_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = []
    for launcher, parts in (("", ["7"]), ("mpirun:2", ["4", "7"])):
        root = tmp_path / (launcher[:3] or "one")
        for steps in parts:
            done = _run(
                root, "Streamed", launcher, "--train.duration", steps, "--schedule.name=constant"
            )
            assert done.returncode == 0, done
        lines = metrics(root / "case")
        assert len(lines) == 7
        curves.append([m[key] for m in lines for key in ("loss", "validation_loss") if key in m])
    assert len(curves[0]) == 7 + 4
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert cli.main(["audit", str(tmp_path / "mpi/case")]) == 0
    said = capsys.readouterr().out
    assert "1.51 epochs of 37 samples, in the dataset's own order" in said


def _embedding(**flags: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Embedding(4, 2, **flags))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, dtype=torch.complex64), "parameter weight is complex64"),
        (nn.LazyLinear(2), "parameter weight has no shape yet"),
        (nn.Linear(2, 2, device="meta"), "parameter weight is on the device meta"),
        (_embedding(sparse=True), "parameter 1.weight gets sparse gradients"),
        (nn.ReLU(), "nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "nothing to train"),
    ],
)
def test_untrainable_model_is_refused_with_the_reason(model: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(model)


def test_trainable_model_is_accepted() -> None:
    frozen = nn.Linear(2, 2, dtype=torch.complex64).requires_grad_(False)
    halves = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2).bfloat16())
    model = nn.Sequential(frozen, halves, nn.Linear(2, 2).double(), _embedding())
    check_model(model)
    check_device(model, torch.device("cpu"))


def test_parameter_on_the_wrong_device_is_named() -> None:
    with pytest.raises(UserError, match="parameter weight is on cpu, not on cuda:0"):
        check_device(nn.Linear(2, 2), torch.device("cuda", 0))
