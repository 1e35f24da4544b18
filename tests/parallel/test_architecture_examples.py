"""The examples of docs/architecture.md run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.runtime.mesh import Topology
from tests.support.runs import REPOSITORY

PAGE = (REPOSITORY / "docs/architecture.md").read_text()


def _example(heading: str) -> str:
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.splitlines()) <= 30
    return str(code)


@pytest.mark.parametrize(
    "heading", ["A parallel axis", "A launcher", "A metric", "A change of ranks"]
)
def test_example_passes_its_own_assertions(heading: str) -> None:
    exec(_example(heading), {"__name__": "example"})


def test_example_of_an_exchange_sums_the_gradients_of_all_ranks(topology: Topology) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    exec(_example("An exchange strategy"), names)
    model = nn.Linear(3, 2)
    exchange = names["FlatExchange"](torch.optim.SGD(model.parameters()), model)
    exchange.begin(1)
    model(torch.full((1, 3), float(topology.rank + 1))).sum().backward()
    exchange.reduce()
    expected = float(sum(range(1, topology.world_size + 1)))
    assert model.weight.grad is not None and (model.weight.grad == expected).all()


def test_example_of_a_fault_test_is_in_the_cluster_tests() -> None:
    tests = (REPOSITORY / "tests/cluster/test_faults_of_ranks.py").read_text()
    assert _example("A fault test") in tests
