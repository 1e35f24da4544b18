"""The task `image` on several ranks: statistics of the global batch, and exact counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdtrain import comm
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.validation import ValidationData, validation_batches
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.callbacks.evaluate import Evaluate
from hvdtrain.engine.config import EvalConfig
from hvdtrain.errors import CollectiveError
from hvdtrain.runtime.mesh import Group, Topology
from hvdtrain.tasks.image import Image, ImageTaskConfig
from hvdtrain.tasks.sync_batchnorm import synchronize
from tests.support.contexts import replicated

SAMPLES, FEATURES, CPU = 6, 5, torch.device("cpu")


def _layers(dimensions: int) -> nn.Sequential:
    torch.manual_seed(0)
    if dimensions == 2:
        return nn.Sequential(nn.Linear(FEATURES, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))
    layers = (nn.Conv2d(FEATURES, 7, 3), nn.BatchNorm2d(7, momentum=0.3), nn.Tanh())
    return nn.Sequential(*layers, nn.Conv2d(7, 2, 3), nn.BatchNorm2d(2), nn.Flatten())


@pytest.mark.parametrize("dimensions", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batchnorm_statistics_and_gradients_cover_the_global_batch(
    topology: Topology, dtype: torch.dtype, dimensions: int
) -> None:
    whole, parts = _layers(dimensions).to(dtype), _layers(dimensions).to(dtype)
    assert synchronize(parts) == (1 if dimensions == 2 else 2)
    assert parts.state_dict().keys() == whole.state_dict().keys()
    shape = (topology.world_size * SAMPLES, FEATURES, *[6] * (dimensions - 2))
    mine = slice(topology.rank * SAMPLES, (topology.rank + 1) * SAMPLES)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {}
    for step in range(2):
        torch.manual_seed(step)
        # Each sample has a different mean, so that each rank has different statistics.
        rows = torch.randn(shape, dtype=dtype)
        rows += torch.arange(len(rows)).view(-1, *[1] * (dimensions - 1))
        weights = torch.linspace(-1, 2, len(rows), dtype=dtype)
        own, every = rows[mine].requires_grad_(), rows.clone().requires_grad_()
        out, expected = parts(own), whole(every)
        for model, found, scale in ((parts, out, weights[mine]), (whole, expected, weights)):
            model.zero_grad()
            ((found.sin().sum(1) * scale + found.square().sum(1)).sum() / len(rows)).backward()
        torch.testing.assert_close(out, expected[mine], **close)
        assert own.grad is not None and every.grad is not None
        torch.testing.assert_close(own.grad, every.grad[mine], **close)
        for parameter, other in zip(parts.parameters(), whole.parameters(), strict=True):
            assert parameter.grad is not None and other.grad is not None
            summed = comm.all_reduce(parameter.grad)
            torch.testing.assert_close(summed, other.grad, **close)
        for buffer, statistic in zip(parts.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(buffer, statistic, **close)
    torch.testing.assert_close(parts.eval()(rows), whole.eval()(rows), **close)


def test_synchronized_batchnorm_requires_exactly_one_micro_batch(
    topology: Topology,
) -> None:
    model = _layers(2)
    synchronize(model)
    batches = [torch.randn(SAMPLES, FEATURES) for _ in range(2)]
    with pytest.raises(CollectiveError, match=r"exactly one micro-batch .* not 2: set batch"):
        for batch in comm.COLLECTIVES.micro_batches(iter(batches), in_common=2, most=2):
            model(batch)
    for batch in comm.COLLECTIVES.micro_batches(iter(batches[:1]), in_common=1, most=1):
        model(batch)


def test_top_1_and_top_5_are_exact_over_all_images(topology: Topology) -> None:
    task = Image(ImageTaskConfig())
    data = task.datasets().validation
    assert data is not None
    torch.manual_seed(0)
    model = task.model()
    _, batch = next(validation_batches(data, [range(64)], Group(0, 1), seed=0))
    task.loss(model, batch)  # any statistics
    context = replicated(topology)
    evaluate = Evaluate(
        EvalConfig(batches=100),
        Accumulate(task, model, 1, context),
        ValidationData(data, 0),
        context,
    )
    # 359 images: 11 micro-batches of 32 and one of 7.
    found = evaluate.evaluate(BatchConfig(global_size=64, micro_size=32))
    right = [0, 0]
    model.eval()
    for image, label in data:  # type: ignore[attr-defined]
        scores = model(task._prepared(image[None], training=False))[0]
        better = int((scores > scores[label]).sum())
        right = [right[0] + (better < 1), right[1] + (better < 5)]
    assert [found["top1"], found["top5"]] == [right[0] / 359, right[1] / 359]
    assert 0 < right[0] < right[1] < 359
