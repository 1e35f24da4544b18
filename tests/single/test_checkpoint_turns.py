"""Communication of ranks about a save: rank 0's decision, and any rank's failures."""

from __future__ import annotations

from functools import partial

import pytest

from hvdtrain.engine.callbacks.checkpoint import Turn, Votes, agree_on_turn, count_votes
from tests.support.thread_ranks import exchange, on_ranks


@pytest.fixture(autouse=True)
def _ranks_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "hvdtrain.engine.callbacks.checkpoint"
    monkeypatch.setattr(f"{module}.sum_", lambda values, name: sum(exchange(name, values)))


@pytest.mark.parametrize("failed", [None, 1, 2])
@pytest.mark.parametrize("turn", Turn)
def test_all_ranks_learn_the_turn_of_rank_0_and_any_failure(turn: Turn, failed: int | None) -> None:
    own = [turn, Turn.DONE, Turn.DONE]
    found = on_ranks([partial(agree_on_turn, own[rank], rank == failed) for rank in range(3)])
    assert found == [(turn, failed is not None)] * 3


def test_votes_count_ranks() -> None:
    answers = [(True, False, False), (False, True, False), (False, True, True)]
    found = on_ranks([partial(count_votes, *answer) for answer in answers])
    assert found == [Votes(begin=1, busy=2, failed=1)] * 3
