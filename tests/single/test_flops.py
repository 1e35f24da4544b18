"""Model FLOPs, their share of the peak, and NVML readings of a GPU.

A stand-in with the functions of nvidia-ml-py replaces NVML and the GPU.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.config import parse
from hvdtrain.engine.flops import ModelFlops, count
from hvdtrain.process.build import build_model
from hvdtrain.process.data import build_data
from hvdtrain.tasks import Datasets
from hvdtrain.telemetry.gpu import GAUGES, PEAKS, peak_flops, readings
from tests.support.runs import CORPUS, metrics, run
from tests.support.tasks import FEATURES, Regression

CPU = torch.device("cpu")


def test_flops_count_matrix_products_without_changing_the_model() -> None:
    task = Regression()
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = count(task, model, task.datasets().train, samples=4)
    # Forward; backward for the weights; backward for earlier layers.
    assert found == 3 * 2 * 4 * FEATURES
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p.is_meta for p in model.parameters())
    assert ModelFlops(found, peak=1e6).utilization(10, 0.5, ranks=2) == found * 10 / 1e6


class _Looking(Regression):
    def loss(self, model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        assert float(batch.abs().max()) < 100
        return super().loss(model, batch)


def test_flops_of_a_value_dependent_loss_are_unknown() -> None:
    task = _Looking()
    assert count(task, task.model(), task.datasets().train, samples=4) is None


@pytest.mark.parametrize("preset", ["gpt-nano", "digits"])
def test_flops_of_built_in_tasks_are_counted(preset: str) -> None:
    settings = parse(["--config", preset])
    task, datasets = build_data(settings)
    assert isinstance(datasets, Datasets)
    model = build_model(task, settings.config, CPU)
    found = count(task, model, datasets.train, samples=2)
    assert found is not None
    if preset == "gpt-nano":  # 6 for each weight and token, and attention
        plain = 6 * sum(p.numel() for p in model.parameters()) * 2 * 128
        assert plain < found < 1.3 * plain


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--data.document_mask", "true"],
        [*("--model.kv_heads", "1", "--model.norm", "rms"), *("--model.mlp", "swiglu")],
    ],
    ids=["plain", "documents", "llama"],
)
def test_flops_of_language_model_variants_match_the_formula(flags: list[str]) -> None:
    settings = parse(["--data.train", str(CORPUS), *flags])
    task, datasets = build_data(settings)
    assert isinstance(datasets, Datasets)
    model = build_model(task, settings.config, CPU)
    found = count(task, model, datasets.train, samples=2)
    assert found is not None
    tokens, context, width, layers = 2 * 128, 128, 128, 4
    matrices = 6 * tokens * sum(p.numel() for p in model.parameters() if p.dim() == 2)
    # Scores and sums each count once forward, twice backward; fused kernels recompute scores.
    product = layers * 2 * tokens * context * width
    assert found - matrices in (6 * product, 7 * product)


def test_peak_flops_depend_on_gpu_model_and_dtype() -> None:
    h100, pcie = "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"
    assert peak_flops(h100, torch.bfloat16, tf32=False) == 989.4e12
    assert peak_flops(pcie, torch.float16, tf32=False) == 756e12
    assert peak_flops(h100, torch.float32, tf32=False) == 67e12
    assert peak_flops(h100, torch.float32, tf32=True) == 494.7e12
    assert peak_flops("NVIDIA L40S", torch.bfloat16, tf32=False) == 362e12
    assert peak_flops("NVIDIA GeForce GT 710", torch.float32, tf32=False) is None


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("A100-PCIE-40GB", "A100"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GH200 144G HBM3e", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", None),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A16", None),
        ("NVIDIA A2", "A2"),
        ("NVIDIA RTX A2000 12GB", None),
        ("NVIDIA A30", "A30"),
        ("NVIDIA RTX A3000 Laptop GPU", None),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX 4000 Ada Generation", None),
        ("Quadro RTX 6000", None),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L20", "L20"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40G", None),
        ("Tesla T4", "T4"),
        ("NVIDIA T400 4GB", None),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe"),
        ("Tesla V100S-PCIE-32GB", "V100S"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA Graphics Device", None),
    ],
)
def test_peak_flops_match_whole_words_of_device_names(name: str, entry: str | None) -> None:
    expected = PEAKS[entry].half if entry is not None else None
    assert peak_flops(name, torch.bfloat16, tf32=False) == expected


class _NvmlError(Exception):
    pass


def _no_power(handle: str) -> int:
    raise _NvmlError("Not Supported")


def test_gpu_readings_use_base_units_and_tolerate_missing_sensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = SimpleNamespace(
        NVMLError=_NvmlError,
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=73),
        nvmlDeviceGetPowerUsage=_no_power,
        nvmlDeviceGetClockInfo=lambda handle, clock: 1980 if handle == "GPU-1-2" else 0,
    )
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2")
    )
    found = {name: read() for name, read in readings(torch.device("cuda", 0)).items()}
    assert found.keys() == GAUGES.keys()
    assert found["gpu_utilization"] == 0.73 and found["gpu_clock_hertz"] == 1.98e9
    assert math.isnan(found["gpu_power_watts"])
    stand_in.nvmlDeviceGetHandleByUUID = _no_power
    assert all(math.isnan(read()) for read in readings(torch.device("cuda", 0)).values())
    assert all(math.isnan(read()) for read in readings(CPU).values())


def test_metrics_include_mfu(tmp_path: Path) -> None:
    flags = "--task tests.support.tasks:Regression --train.duration 3 --telemetry.port 0"
    flags += f" --telemetry.peak_flops 1e6 --run.root {tmp_path} --run.id mfu"
    done = run(tmp_path / "output", flags.split())
    assert done.returncode == 0, done
    for line in metrics(tmp_path / "mfu"):
        # 32 samples; the gradient of the data is not computed.
        expected = 2 * 2 * 32 * FEATURES / (line["step_seconds"] * 1e6)
        assert line["mfu"] == pytest.approx(expected, rel=1e-6)
