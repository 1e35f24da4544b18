"""Selection of the exchange that the `exchange` keys configure."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from hvdtrain.exchange.adasum import adasum_exchange
from hvdtrain.exchange.base import Exchange
from hvdtrain.exchange.config import ExchangeConfig
from hvdtrain.exchange.dense import DenseExchange
from hvdtrain.exchange.exact import exact_exchange
from hvdtrain.exchange.local_sgd import LocalSgd, Nesterov
from hvdtrain.exchange.powersgd import powersgd_exchange
from hvdtrain.exchange.topk import topk_exchange
from hvdtrain.runtime.mesh import Mesh


def spanning_exchange(optimizer: Optimizer, model: nn.Module, mesh: Mesh) -> Exchange:
    """Build the exchange of a model that spans ranks."""
    from hvdtrain.exchange.spanning import SpanningExchange

    return SpanningExchange(optimizer, model, mesh)


def build_exchange(
    config: ExchangeConfig,
    micro_batches: int,
    optimizer: Optimizer,
    model: nn.Module,
    elastic: bool,
) -> Exchange:
    """Build the exchange of the trained parameters of `model`.

    Args:
        micro_batches: in a step, over all ranks together.
        elastic: the number of ranks may change.
    """
    if config.sync_every:
        nesterov = Nesterov(config.outer_lr, config.outer_momentum)
        outer = nesterov if config.outer == "nesterov" else None
        return LocalSgd(optimizer, model, micro_batches, config.sync_every, outer)
    if config.exact:
        return exact_exchange(optimizer, model, micro_batches)
    if config.reduce == "adasum":
        return adasum_exchange(optimizer, model)
    if config.compression == "topk":
        return topk_exchange(optimizer, model, config.ratio)
    if config.compression == "powersgd":
        return powersgd_exchange(optimizer, model, config)
    return DenseExchange(optimizer, model, elastic, config.wire)
