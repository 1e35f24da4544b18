"""The task `language_model` on several ranks: validation metrics are sums over all ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from hvdtrain.data.config import BatchConfig, DataConfig
from hvdtrain.data.validation import ValidationData
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.callbacks.evaluate import Evaluate
from hvdtrain.engine.config import EvalConfig
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.runtime.mesh import Topology
from hvdtrain.tasks.language_model import LanguageModel, LanguageModelConfig
from tests.support.contexts import replicated

CONTEXT = 13


def test_perplexity_and_bits_per_byte_are_exact_over_all_ranks(
    topology: Topology, tmp_path: Path
) -> None:
    for number in range(6):  # of different lengths, so that samples have different bytes
        (tmp_path / f"{number}.txt").write_text("a text of some length. " * (number + 1))
    data = DataConfig(train=str(tmp_path), validation=str(tmp_path), document_mask=True)
    sizes = GPTConfig(layers=1, heads=2, width=16, context=CONTEXT)
    task = LanguageModel(LanguageModelConfig(sizes, data))
    validation = task.datasets().validation
    assert validation is not None
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():
        model.embedding.weight.mul_(20)  # so that losses differ
    context = replicated(topology)
    passes, data_seen = Accumulate(task, model, 1, context), ValidationData(validation, 0)
    evaluate = Evaluate(EvalConfig(batches=100), passes, data_seen, context)
    found = evaluate.evaluate(
        BatchConfig(global_size=8, micro_size=4)
    )  # the last micro-batch has fewer
    samples = torch.stack([validation[i] for i in range(len(validation))])  # type: ignore[arg-type]
    assert len(samples) % 4
    documents = (samples[:, :-1] == 0).cumsum(dim=1)
    model.eval()
    with torch.no_grad():
        nats = model.loss(samples[:, :-1], samples[:, 1:], documents).double() * (
            len(samples) * CONTEXT
        )
    of_text = int((samples[:, 1:] != 0).sum())
    assert of_text < len(samples) * CONTEXT
    expected = {
        "loss": float(nats) / (len(samples) * CONTEXT),
        "perplexity": math.exp(float(nats) / (len(samples) * CONTEXT)),
        "bits_per_byte": float(nats) / math.log(2) / of_text,
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
