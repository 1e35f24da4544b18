"""`python -m tests.soak.published`: predictions of `hvdtrain plan` for published systems.

Prints the rows of docs/benchmarks.md. The inputs are published, or assumed as this file states.
Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.plan.cluster import Cluster, Link
from hvdtrain.plan.job import BACKWARD_SHARE, GradientBucket, JobProfile
from hvdtrain.plan.predict import predict

_MIB = 1 << 20
# Latencies and set-up times of NCCL's rings, "simple" protocol: the constants by which NCCL itself
# chooses (src/graph/tuning.cc), over PCIe, NVLink and a network.
_PCIE, _NVLINK, _NET = 5.7e-6, 3.4e-6, 14e-6
_NCCL_LAUNCH = 8.4e-6


@dataclass(frozen=True)
class System:
    """A published measurement.

    Args:
        name: name of the system.
        hosts, per_host: number of hosts, and of GPUs per host.
        published: efficiency; None: only a curve without a number.
        source: source of the measurement.
        assumed: inputs that were not published.
        job, cluster: the inputs.
    """

    name: str
    hosts: int
    per_host: int
    published: float | None
    source: str
    assumed: str
    job: JobProfile
    cluster: Cluster

    @property
    def predicted(self) -> float:
        """Predicted efficiency, relative to that many times the throughput of one GPU."""
        return predict(self.job, self.cluster, "dense", ExchangeConfig()).efficiency


@dataclass(frozen=True)
class _Layer:
    """A layer of a network, in forward order."""

    parameters: int
    multiplications: float


def systems() -> list[System]:
    """All systems of the table in docs/benchmarks.md."""
    return [*_horovod(), *_ddp()]


def row(one: System) -> str:
    """Return a row of the table in docs/benchmarks.md."""
    said, error = "no number", ""
    if one.published is not None:
        said = f"{one.published:.0%}"
        error = f"{100 * (one.predicted - one.published):+.0f} points"
    gpus = one.hosts * one.per_host
    return f"| {one.name} | {gpus} | {one.predicted:.0%} | {said} | {error} |"


def _horovod() -> list[System]:
    """128 hosts of 4 Pascal GPUs on 25 Gbit/s with RoCE, batches of 64 per GPU."""
    paper = "arXiv:1802.05799, Horovod's docs/benchmarks"
    older = "Horovod's README of 2017"
    assumed = "PCIe at 96 Gbit/s, NCCL's latencies, half a cycle of 5 ms a buffer of 64 MiB"
    published = [
        ("ResNet-101", 4, 0.914, older),
        ("ResNet-101", 128, 0.90, paper),
        ("Inception V3", 4, 0.940, older),
        ("Inception V3", 128, 0.90, paper),
        ("VGG-16", 4, 0.853, older),
        ("VGG-16", 32, 0.79, older),
        ("VGG-16", 128, 0.68, paper),
    ]
    # Images per second of one of these GPUs (Horovod's README of 2017), and the model's layers.
    models = {
        "ResNet-101": (119.4, _even(44_549_160)),
        "Inception V3": (134.4, _even(23_834_568)),
        "VGG-16": (130.9, _vgg16()),
    }
    found = []
    for name, hosts, efficiency, source in published:
        rate, layers = models[name]
        cluster = Cluster(
            hosts, 4, Link(25e9, _NET), Link(96e9, _PCIE), "ring", 2.5e-3 + _NCCL_LAUNCH
        )
        job = _job(64 / rate, 64, hosts * 4, _buckets(layers, 64 * _MIB))
        title = f"Horovod, {name}"
        found.append(System(title, hosts, 4, efficiency, source, assumed, job, cluster))
    return found


def _ddp() -> list[System]:
    """Hosts of 8 V100."""
    paper = "arXiv:2006.15704"
    readme = "PyTorch's benchmarks/distributed/ddp/README"
    network = "100 Gbit/s a host, NVLink at 400 Gbit/s, NCCL's latencies"
    resnet = _buckets(_even(25_557_032), 25 * _MIB)
    bert = _buckets(_even(340_000_000), 25 * _MIB)
    rows = [
        ("ResNet50", 2, 0.930, readme, network, 32 / 329, resnet),
        ("ResNet50", 32, 0.50, paper, f"{network}; batches of 32", 32 / 329, resnet),
        ("BERT", 32, None, paper, f"{network}; 340M parameters, 0.2 s", 0.2, bert),
    ]
    found = []
    for name, hosts, efficiency, source, assumed, seconds, buckets in rows:
        cluster = Cluster(hosts, 8, Link(100e9, _NET), Link(400e9, _NVLINK), "best", _NCCL_LAUNCH)
        job = _job(seconds, 32, hosts * 8, buckets)
        found.append(System(f"DDP, {name}", hosts, 8, efficiency, source, assumed, job, cluster))
    return found


def _job(seconds: float, batch: int, ranks: int, buckets: tuple[GradientBucket, ...]) -> JobProfile:
    return JobProfile(
        forward_seconds=seconds * (1 - BACKWARD_SHARE),
        backward_seconds=seconds * BACKWARD_SHARE,
        optimizer_seconds=0.0,  # included in the published rate of one GPU
        other_seconds=0.0,
        micro_batches=ranks,
        micro_size=batch,
        buckets=buckets,
        control_bytes=0,
    )


def _buckets(layers: Sequence[_Layer], limit: int) -> tuple[GradientBucket, ...]:
    """Return buckets of gradients in backward order, fused up to `limit` bytes."""
    total = sum(layer.multiplications for layer in layers)
    found: list[GradientBucket] = []
    elements, done = 0, 0.0
    backward = [*reversed(layers)]
    for layer, following in pairwise([*backward, None]):
        assert layer is not None
        elements += layer.parameters
        done += layer.multiplications
        if following is None or 4 * (elements + following.parameters) > limit:
            found.append(GradientBucket(elements, min(1.0, done / total)))
            elements = 0
    return tuple(found)


def _even(parameters: int, layers: int = 100) -> list[_Layer]:
    """Return layers of which only the sum is known."""
    size = parameters // layers
    return [_Layer(size, 1.0)] * (layers - 1) + [_Layer(parameters - size * (layers - 1), 1.0)]


def _vgg16() -> list[_Layer]:
    """Simonyan and Zisserman, arXiv:1409.1556, configuration D, images of 224 x 224."""
    layers, channels, width = [], 3, 224
    for number, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            weights = 9 * channels * number
            layers.append(_Layer(weights + number, float(weights * width * width)))
            channels = number
        width //= 2
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        layers.append(_Layer(inputs * outputs + outputs, float(inputs * outputs)))
    return layers


if __name__ == "__main__":
    for system in systems():
        print(row(system))
