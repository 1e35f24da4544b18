"""BatchNorm's running statistics depend on the global batch, not on how ranks share it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hvdtrain.engine.accumulate import BatchStatistics, SavedBuffers, Totals

MICRO_BATCHES, FEATURES = 3, 4


def _totals(numel: int, exact: bool) -> Totals:
    return Totals(torch.zeros(Totals.number_of_parts(exact), numel, dtype=torch.float64))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_statistics_average_over_micro_batches(dtype: torch.dtype, exact: bool) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(FEATURES, momentum=0.3, dtype=dtype)
    saved = SavedBuffers(nn.Sequential(layer))
    statistics = BatchStatistics(saved, MICRO_BATCHES)
    expected = layer.running_mean.clone()
    for step in range(3):
        batches = [torch.randn(5, FEATURES, dtype=dtype) + step for _ in range(MICRO_BATCHES)]
        changes = _totals(statistics.numel, exact)
        saved.keep()
        statistics.begin()
        for batch in batches:
            statistics.prepare()
            # Backward runs it a second time.
            loss = checkpoint(layer, batch.requires_grad_(), use_reentrant=False).square().sum()
            statistics.collect(changes)
            loss.backward()
        statistics.apply(changes.value())
        means = torch.stack([batch.detach().mean(0) for batch in batches])
        expected = 0.7 * expected + 0.3 * means.mean(0)
        torch.testing.assert_close(layer.running_mean, expected)
        assert layer.num_batches_tracked == step + 1


def test_layer_in_eval_mode_keeps_its_buffers_and_allows_backward() -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(FEATURES)
    layer(torch.randn(5, FEATURES))
    layer.eval()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    saved = SavedBuffers(layer)
    statistics = BatchStatistics(saved, MICRO_BATCHES)
    changes = _totals(statistics.numel, exact=True)
    saved.keep()
    statistics.begin()
    for _ in range(MICRO_BATCHES):
        statistics.prepare()
        loss = layer(torch.randn(5, FEATURES)).square().sum()
        statistics.collect(changes)
        loss.backward()
    statistics.apply(changes.value())
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.named_buffers())
