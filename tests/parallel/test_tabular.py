"""The task `tabular` on several ranks: metrics over all rows, and jointly computed columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hvdtrain.config import parse
from hvdtrain.data.config import BatchConfig
from hvdtrain.data.validation import ValidationData
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.callbacks.evaluate import Evaluate
from hvdtrain.engine.config import EvalConfig
from hvdtrain.errors import UserError
from hvdtrain.process.data import build_data
from hvdtrain.runtime.collectives import broadcast_json
from hvdtrain.runtime.mesh import Topology
from hvdtrain.runtime.mpi import Alone
from hvdtrain.tasks.tabular import of_classes
from hvdtrain.tasks.tabular_data import open_training, scan_columns
from tests.support.contexts import replicated
from tests.support.datasets import KEYS, sales, write


class _Scores:
    """A task whose rows already are a score and a class."""

    def __init__(self, lost: int = 0) -> None:
        self.seen: list[Tensor] = []
        self._lost = lost

    def measures(self, rows: Tensor) -> dict[str, float]:
        self.seen.append(rows)
        return of_classes(rows)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        rows = torch.stack(batch, dim=1)
        return {"loss": model(batch[0].float()[:, None]).mean(), "rows": rows[self._lost :]}


def _evaluate(task: _Scores, samples: int, micro_size: int, topology: Topology) -> dict[str, float]:
    draw = torch.Generator().manual_seed(3)
    labels = (torch.rand(samples, generator=draw) < 0.3).double()
    scores = (labels + 2 * torch.randn(samples, generator=draw)).round(decimals=1).double()
    context = replicated(topology)
    passes = Accumulate(task, nn.Linear(1, 1), 1, context)  # type: ignore[arg-type]
    data = TensorDataset(scores, labels)
    evaluate = Evaluate(EvalConfig(batches=100), passes, ValidationData(data, 0), context)
    found = evaluate.evaluate(BatchConfig(2 * micro_size, micro_size))
    torch.testing.assert_close(task.seen[0], torch.stack((scores, labels), dim=1), rtol=0, atol=0)
    assert found["auc"] == of_classes(torch.stack((scores, labels), dim=1))["auc"]
    return found


# 13 micro-batches, the last of 3; or one, which only rank 0 has.
@pytest.mark.parametrize(("samples", "micro_size"), [(99, 8), (20, 32)])
def test_auc_is_exact_over_the_rows_of_all_ranks(
    topology: Topology, samples: int, micro_size: int
) -> None:
    found = _evaluate(_Scores(), samples, micro_size, topology)
    assert 0.5 < found["auc"] < 1


def test_rank_with_too_few_rows_raises_on_every_rank(topology: Topology) -> None:
    lost = 1 if topology.rank == topology.world_size - 1 else 0
    with pytest.raises(UserError, match=r"rows for micro-batches of .*: a task with measures\(\)"):
        _evaluate(_Scores(lost), 99, 8, topology)


def test_ranks_find_the_same_columns_as_one_rank(topology: Topology, tmp_path: Path) -> None:
    directory = Path(broadcast_json(str(tmp_path), "directory"))
    file = directory / "t.parquet"
    if topology.rank == 0:
        write(sales(3000), file)
    broadcast_json(None, "written")
    settings = parse([*KEYS, "--data.train", str(file)])
    task, datasets = build_data(settings)
    config = settings.task_config
    alone = scan_columns(config.tabular, *open_training(config, {}, Alone()), Alone())
    assert task._data.columns == alone  # type: ignore[attr-defined]
    fingerprint = datasets.fingerprint
    assert broadcast_json(fingerprint, "fingerprint") == fingerprint


def test_quote_without_an_end_raises_on_every_rank(topology: Topology, tmp_path: Path) -> None:
    directory = Path(broadcast_json(str(tmp_path), "directory"))
    if topology.rank == 0:
        for number in range(topology.world_size):
            write(sales(), directory / f"{number}.csv")
        (directory / "1.csv").write_text('n,text\n1,"two\n')
    broadcast_json(None, "written")
    with pytest.raises(UserError, match=r"1.csv: cannot be read .the quote in line 2 has no end"):
        build_data(parse([*KEYS, "--data.train", str(directory)]))


def test_file_that_is_broken_for_one_rank_raises_on_every_rank(
    topology: Topology, tmp_path: Path
) -> None:
    file = write(sales(), tmp_path / "own.parquet")
    if topology.rank == topology.world_size - 1:
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"own.parquet: cannot be read"):
        build_data(parse([*KEYS, "--data.train", str(file)]))
