"""Memory and step time of a job on each layout, and the cheapest one that fits.

Memory is computed as in docs/choosing-parallel.md (Rajbhandari et al., "ZeRO", arXiv:1910.02054),
the bubble of a pipeline as in Huang et al., "GPipe", arXiv:1811.06965.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from hvdtrain.exchange.config import STRATEGIES, ExchangeConfig
from hvdtrain.plan.cluster import Cluster, all_gather, all_reduce, reduce_scatter
from hvdtrain.plan.job import JobProfile
from hvdtrain.plan.predict import COMPRESSIONS, predict
from hvdtrain.runtime.mesh import key_of_degree

_ALL_REDUCES_OF_A_BLOCK = 4  # two forward, two backward, along `tensor`
# Full-size copies of the gradient in a compression: its sum, its residual, the received result.
_COPIES = dict.fromkeys(COMPRESSIONS, 3)
_DEGREES = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class ModelLayout:
    """Layout of a model on ranks.

    Args:
        tensor, pipeline, shard: number of ranks along each axis of a replica.
        zero_copies: ranks that hold each shard of the optimizer state; 0: every rank holds all.
        strategy: exchange strategy between replicas.
    """

    tensor: int = 1
    pipeline: int = 1
    shard: int = 1
    zero_copies: int = 0
    strategy: str = "dense"

    @property
    def replica(self) -> int:
        """Number of ranks that hold the model together."""
        return self.tensor * self.pipeline * self.shard

    @property
    def flags(self) -> str:
        """Keys of the configuration; empty: the defaults."""
        axes = {"tensor": self.tensor, "pipeline": self.pipeline, "shard": self.shard}
        found = [f"--{key_of_degree(axis)} {degree}" for axis, degree in axes.items() if degree > 1]
        if self.zero_copies:
            found.append(f"--parallel.shard.stage 1 --parallel.shard.copies {self.zero_copies}")
        keys = STRATEGIES[self.strategy].items()
        return " ".join([*found, *(f"--exchange.{key} {value}" for key, value in keys)])


def layouts(job: JobProfile, cluster: Cluster, strategies: Iterable[str]) -> Iterator[ModelLayout]:
    """Layouts that the ranks and the job allow: one axis at a time, and `tensor` with `pipeline`.

    Args:
        strategies: for whole models; if ranks split something, the exchange is dense.
    """
    for strategy in strategies:
        yield ModelLayout(strategy=strategy)
    if cluster.ranks > 1:
        yield ModelLayout(zero_copies=1)
    if cluster.ranks > 2:
        yield ModelLayout(zero_copies=2)
    degrees = [d for d in _DEGREES if cluster.ranks % d == 0]
    if not job.blocks or not job.block_bytes:
        return
    yield from (ModelLayout(shard=d) for d in degrees)
    tensors = [1, *(d for d in degrees if cluster.ranks_per_host % d == 0)]
    for tensor in tensors:
        for pipeline in [1, *degrees]:
            fits = pipeline <= job.blocks and cluster.ranks % (tensor * pipeline) == 0
            if fits and tensor * pipeline > 1:
                yield ModelLayout(tensor=tensor, pipeline=pipeline)


def memory(job: JobProfile, layout: ModelLayout, ranks: int) -> float:
    """Bytes on a rank: parameters, gradients, optimizer state, activations, copies.

    Activations are omitted if they are unknown.
    """
    parts = layout.replica
    whole = 2.0 * job.parameter_bytes / parts
    whole += _COPIES.get(layout.strategy, 0) * job.parameter_bytes
    held = 1 / parts if not layout.zero_copies else min(1.0, layout.zero_copies / ranks)
    if layout.shard > 1 and job.blocks:
        whole += _whole_block_bytes(job)
    # 1F1B keeps one micro-batch per stage, each for 1 / stages of the blocks.
    activations = (job.activation_bytes or 0.0) / layout.tensor
    return whole + held * job.optimizer_bytes + activations


def _whole_block_bytes(job: JobProfile) -> float:
    """Peak bytes of whole parameters in the backward pass.

    The computing block, its gradient and the block that FSDP2 gathers meanwhile; in addition the
    parameters outside all blocks and their gradient, which is summed after all blocks.
    """
    block = (job.parameter_bytes - job.outside_bytes) / job.blocks
    return 3 * block + 2 * job.outside_bytes


def bubble(micro_batches: int, stages: int) -> float:
    """Fraction of a pipeline's time that each rank waits, with one equal stage per rank."""
    return (stages - 1) / (micro_batches + stages - 1)


def step_seconds(
    job: JobProfile, cluster: Cluster, layout: ModelLayout, config: ExchangeConfig
) -> float:
    """Step time of a layout in seconds."""
    if layout.replica == 1:
        return _whole(job, cluster, layout, config)
    replicas = cluster.ranks // layout.replica
    readers = replicas * layout.shard  # ranks that have their own micro-batches
    passes = ceil(job.micro_batches / readers)
    inside = _inside(cluster, layout.replica)
    pass_seconds = job.forward_seconds + job.backward_seconds
    split = layout.tensor * layout.pipeline
    if layout.tensor > 1:
        row = _inside(cluster, layout.tensor)
        calls = _ALL_REDUCES_OF_A_BLOCK * job.blocks
        pass_seconds += layout.tensor * calls * all_reduce(job.block_bytes, row)
    if layout.shard > 1:
        # FSDP2 gathers the next block while one computes: the slower one determines the time.
        part = job.parameter_bytes / layout.shard
        moved = 2 * all_gather(part, inside) + reduce_scatter(job.parameter_bytes, inside)
        pass_seconds = max(pass_seconds, moved)
    handed = 0.0
    if layout.pipeline > 1:
        link = cluster.between if layout.replica > cluster.ranks_per_host else cluster.within
        handed = 2 * (link.latency + job.block_bytes / link.bytes_per_second)
    slots = passes + layout.pipeline - 1
    own = slots * (pass_seconds / split + handed)
    own += job.optimizer_seconds / layout.replica + job.other_seconds
    return own + _between_replicas(job, cluster, layout)


def _whole(job: JobProfile, cluster: Cluster, layout: ModelLayout, config: ExchangeConfig) -> float:
    step = predict(job, cluster, layout.strategy, config).step_seconds
    if not layout.zero_copies:
        return step
    held = min(1.0, layout.zero_copies / cluster.ranks)
    gathered = all_gather(job.parameter_bytes / cluster.ranks, cluster)
    return step - (1 - held) * job.optimizer_seconds + gathered


def _between_replicas(job: JobProfile, cluster: Cluster, layout: ModelLayout) -> float:
    """Time after the last backward pass to sum all shards of the model at once over one link."""
    replicas = cluster.ranks // layout.replica
    if replicas == 1:
        return 0.0
    parts_on_host = min(layout.replica, cluster.ranks_per_host)
    per_host = max(1, cluster.ranks_per_host // layout.replica)
    hosts = max(1, replicas // per_host)
    link = cluster.between
    shared = replace(link, bits_per_second=link.bits_per_second / parts_on_host)
    group = replace(cluster, hosts=hosts, ranks_per_host=per_host, between=shared)
    return all_reduce(job.parameter_bytes / layout.replica, group) + cluster.launch_seconds


def _inside(cluster: Cluster, ranks: int) -> Cluster:
    """A cluster of the first `ranks` ranks, with whole hosts if several are needed."""
    if ranks <= cluster.ranks_per_host:
        return replace(cluster, hosts=1, ranks_per_host=ranks)
    return replace(cluster, hosts=ceil(ranks / cluster.ranks_per_host))
