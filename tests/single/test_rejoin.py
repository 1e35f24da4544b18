"""Between two generations: the state that a process keeps, and the status that it reports."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hvdtrain.checkpoint.config import CheckpointConfig
from hvdtrain.config import Config
from hvdtrain.elastic.membership import Membership
from hvdtrain.elastic.rendezvous import DriverAddress
from hvdtrain.elastic.status import TRAINING, Identity
from hvdtrain.parallel.agreement import Agreement
from hvdtrain.process import session
from hvdtrain.process.session import Failure, Rejoin
from hvdtrain.process.strategy import Replicated, Spanning
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.signals import StopFlag

STEP = 7
SPARE = {"rank": -1, "spare": True}
RANKS = {
    **{"rank": 1, "size": 2, "local_rank": 1, "local_size": 2, "cross_rank": 0, "cross_size": 1},
    **{"job": 5, "generation": 3},
}


@dataclass
class _Launcher:
    """A launcher that answers like the elastic driver and keeps the received statuses."""

    answers: list[dict[str, Any]]
    statuses: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, what: str, number: int, body: dict[str, Any]) -> Any:
        self.statuses.append(body)
        return self.answers.pop(0)


Start = Callable[[list[dict[str, Any]]], tuple[Rejoin, _Launcher]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """A process after step `STEP`, which holds shard 0 of a model of two ranks."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(heartbeat, "HEARTBEAT", Heartbeat())
    monkeypatch.setattr(session, "shut_down", lambda: None)
    monkeypatch.setattr(session, "initialize", lambda threads, gpu: None)

    def make(answers: list[dict[str, Any]]) -> tuple[Rejoin, _Launcher]:
        launcher = _Launcher(answers)
        monkeypatch.setattr(DriverAddress, "ask", launcher.ask)
        config: Any = SimpleNamespace(
            checkpoint=CheckpointConfig(),
            elastic=SimpleNamespace(hang_seconds=60.0),
            parallel=SimpleNamespace(degrees={"tensor": 2}),
            runtime=SimpleNamespace(threads=1),
        )
        prepared: Any = SimpleNamespace(
            config=config,
            device=torch.device("cpu"),
            identity=lambda digest: Identity("cpu", digest, 8, None),
            progress=SimpleNamespace(step=STEP),
        )
        persistent: Any = SimpleNamespace(trained=True, phase=TRAINING, set_aside=lambda: None)
        launched: Any = SimpleNamespace(settings=SimpleNamespace(config=config), digest="")
        own = Membership("127.0.0.1", 1, 4, StopFlag())
        strategy = Spanning(config, elastic=True)
        return Rejoin(own, launched, prepared, persistent, strategy, own_loop=False), launcher

    return make


def _lose(agreement: Agreement, take: Callable[[], None]) -> None:
    """Let the generation fail while this rank waits until the others can take the next step."""

    def lost(values: Tensor, name: str) -> Tensor:
        raise RankLostError(name)

    with patch("hvdtrain.parallel.agreement.sum_", lost), pytest.raises(RankLostError):
        agreement.wait(STEP + 1, take)


@pytest.mark.parametrize(
    ("answers", "spare"),
    [
        ([RANKS], False),
        ([SPARE, RANKS], True),
        ([SPARE, SPARE, RANKS], True),
        ([{**RANKS, "spare": True}], True),
    ],
    ids=["takes part", "spare", "spare notified twice", "spare whose first answer was lost"],
)
def test_pending_step_is_kept_unless_the_process_is_a_spare(
    start: Start, answers: list[dict[str, Any]], spare: bool
) -> None:
    process, launcher = start([*answers])
    agreement, taken = Agreement(), list[int]()
    components: Any = SimpleNamespace(agreement=agreement, exchange=None)
    assert isinstance(process.strategy, Spanning)
    process.strategy._components, process.strategy._before = components, 0
    _lose(agreement, lambda: taken.append(STEP + 1))
    process(Failure(TRAINING, "a rank died"), components)
    reached = [status["reachable_step"] for status in launcher.statuses]
    assert reached == [STEP + 1, *[STEP] * (len(answers) - 1)]
    # The other ranks have redone the step without the spare, which receives its shard from them.
    status = process.strategy.status(process.persistent, STEP)
    assert status.holds(STEP + 1) == (None if spare else 0)
    assert status.holds(STEP) == 0
    agreement.catch_up(STEP, newest=STEP + 1)
    assert taken == ([] if spare else [STEP + 1])


def test_next_generation_can_read_checkpoints(start: Start) -> None:
    process, _ = start([RANKS])
    heartbeat.HEARTBEAT.generation_over = True
    with pytest.raises(RankLostError):
        heartbeat.HEARTBEAT.advance()
    process(Failure(TRAINING, "a rank died"), None)
    heartbeat.HEARTBEAT.advance()


def test_end_of_a_generation_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Heartbeat()
    monkeypatch.setattr(heartbeat, "HEARTBEAT", own)
    monkeypatch.setattr(session, "abort_collectives", lambda: None)
    this: Any = SimpleNamespace(_strategy=Replicated(Config(), elastic=True))
    session.Session._abort(this)
    with pytest.raises(RankLostError):
        own.advance()
