"""Checkpoints of models that span ranks: any layout reads any other layout's, bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.spanned_checkpoints import read_by_others
from tests.support.torch_ranks import on_torch_ranks

pytestmark = pytest.mark.slow

# Layouts of 8 ranks; the remaining factor is the data axis.
LAYOUTS = {
    "data": {},
    "data, tensor": {"tensor": 2},
    "pipeline, context, tensor": {"pipeline": 2, "context": 2, "tensor": 2},
    "pipeline, shard, tensor": {"pipeline": 2, "shard": 2, "tensor": 2},
}


def test_every_layout_reads_checkpoints_of_every_other_bitwise(tmp_path: Path) -> None:
    for rank in on_torch_ranks(8, read_by_others, tmp_path, LAYOUTS, timeout=280):
        assert len(rank) == len(LAYOUTS) ** 2
        assert not {names: wrong for names, wrong in rank.items() if wrong}
