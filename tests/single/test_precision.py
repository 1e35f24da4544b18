"""16-bit runs: loss curves, resuming, exports and rejected options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.config import parse
from hvdtrain.errors import UserError
from hvdtrain.optim import precision
from hvdtrain.process.prepare import _build_precision
from hvdtrain.telemetry.gpu import gain_of_bf16
from tests.support.job import Finished, Job
from tests.support.runs import REPOSITORY, TINY, environment, metrics, run, train

STEPS = 30
FLAGS = [*("--train.duration", str(STEPS)), *("--eval.every", str(STEPS)), *("--eval.batches", "4")]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def auto(directory: Path) -> Finished:
    where = ["--run.root", str(directory), "--run.id", "auto", "--precision.name", "auto"]
    done = run(directory / "output", [*TINY, *FLAGS, *where])
    assert done.returncode == 0, done
    return done


@pytest.fixture(scope="module")
def in_float32(directory: Path, auto: Finished) -> list[dict]:
    return metrics(directory / "auto")


def test_auto_precision_is_float32_on_cpu_and_logged(directory: Path, auto: Finished) -> None:
    assert "precision.name auto: float32, on cpu" in auto.stderr, auto
    events = (directory / "auto/events.jsonl").read_text().splitlines()
    [start] = [event for event in map(json.loads, events) if event["event"] == "start"]
    assert start["precision"] == "float32"
    assert "loss_scale" not in metrics(directory / "auto")[-1]


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-params"])
def test_loss_curve_in_16_bits_stays_close_to_float32(
    directory: Path, in_float32: list[dict], name: str
) -> None:
    lines = metrics(train(directory, name, [*FLAGS, "--precision.name", name]))
    for line, expected in zip(lines, in_float32, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=0.01)
    assert lines[-1]["validation_loss"] == pytest.approx(
        in_float32[-1]["validation_loss"], rel=0.01
    )
    assert [line["loss"] for line in lines] != [line["loss"] for line in in_float32]
    scales = {line.get("loss_scale") for line in lines}
    assert scales == ({2.0**16} if name == "fp16" else {None})
    if name == "bf16-params":
        _exported_as_they_are(directory)


def _exported_as_they_are(directory: Path) -> None:
    for form in ("hvdtrain", "huggingface"):
        out = directory / f"exported-{form}"
        argv = [
            sys.executable,
            "-m",
            "hvdtrain.cli",
            "ckpt",
            "export",
            str(directory / "bf16-params"),
        ]
        argv += ["--out", str(out), "--format", form]
        done = Job([], argv, environment(), directory / f"export-{form}").wait(60)
        assert done.returncode == 0 and "in bfloat16" in done.stdout, done
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_resume_rejects_precision_change(directory: Path, in_float32: list[dict]) -> None:
    where = ["--run.root", str(directory), "--run.id", "auto"]
    done = run(directory / "output", [*TINY, *FLAGS, *where, "--precision.name", "bf16"])
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    message = "precision.name was float32 at the checkpoint of step 30 and is bf16 now"
    assert message in done.stderr.splitlines()[-1], done


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--precision.name fp8", "precision.name: expected one of .*not fp8"),
        (
            "--precision.name bf16-params --exchange.sync_every 4",
            "exchange.sync_every 4 excludes precision.name bf16-params",
        ),
        (
            "--precision.cudnn_benchmark true --exchange.name exact --runtime.threads 1",
            "precision.cudnn_benchmark excludes exchange.name exact",
        ),
    ],
)
def test_invalid_precision_options_are_rejected(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse(flags.split())
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


def test_fp16_rejects_float16_parameters(tmp_path: Path) -> None:
    flags = "--task tests.support.tasks:Half --precision.name fp16 --batch.global_size 8"
    where = ["--batch.micro_size", "2", "--run.root", str(tmp_path), "--telemetry.port", "0"]
    done = run(tmp_path, [*flags.split(), *where])
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert "parameter weight is float16, and precision.name fp16" in done.stderr, done


@pytest.mark.parametrize("name", ["gpt-small", "gpt-medium", "gpt-1b3", "llama-7b", "resnet50"])
def test_presets_for_gpus_use_16_bits_where_the_device_has_them(name: str) -> None:
    assert parse(["--config", name]).config.precision.name == "auto"


def test_choice_of_auto_must_fit_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU without units for bfloat16.
    monkeypatch.setattr(precision, "_of_device", lambda device: "fp16")
    cpu, flags = torch.device("cpu"), ["--precision.name", "auto"]
    assert _build_precision(parse(flags).config, cpu).name == "fp16"
    spans = parse([*flags, "--parallel.tensor", "2"]).config
    with pytest.raises(UserError, match=r"auto is fp16 here: parallel\.tensor 2 excludes"):
        _build_precision(spans, cpu)


@pytest.mark.parametrize(
    ("gpu", "tf32", "gain"),
    [
        ("NVIDIA H100 80GB HBM3", False, "about 15 times as fast"),
        ("NVIDIA H100 80GB HBM3", True, "about 2 times as fast"),
        ("NVIDIA GeForce RTX 4090", False, "several times as fast"),
        ("Tesla T4", False, ""),
    ],
)
def test_float32_on_a_gpu_with_bfloat16_units_is_reported(
    monkeypatch: pytest.MonkeyPatch, gpu: str, tf32: bool, gain: str
) -> None:
    # Stand-ins for CUDA, which this machine may not have.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bool(gain))
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=tf32))
    assert gain_of_bf16(torch.device("cuda"), torch.float32) == gain
    assert gain_of_bf16(torch.device("cuda"), torch.bfloat16) == ""
    assert gain_of_bf16(torch.device("cpu"), torch.float32) == ""


# There may be no GPU here: the device reports a gain.
GAIN = """
from hvdtrain.process import build
from hvdtrain.tasks.language_model import LanguageModel

build.gain_of_bf16 = lambda device, dtype: "about 15 times as fast"


class Task(LanguageModel):
    pass
"""


def test_log_names_the_gain_of_bf16(tmp_path: Path) -> None:
    (tmp_path / "gain.py").write_text(GAIN)
    where = ["--run.root", str(tmp_path), "--train.duration", "1", "--eval.every", "0"]
    done = run(
        tmp_path / "output",
        [*TINY, *where, "--task", "gain:Task"],
        env={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
    )
    line = "precision.name float32: this GPU multiplies bfloat16 about 15 times as fast"
    assert done.returncode == 0 and done.stderr.count(line) == 1, done
