"""How a rank learns from its host's agent that its generation is over."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.agent.protocol import AGENT_VARIABLE, RANK
from hvdtrain.elastic.membership import Membership
from hvdtrain.elastic.rendezvous import RANKS
from hvdtrain.runtime.signals import StopFlag
from tests.support.job import poll

SECONDS = 20


class Rank:
    """A process that an agent, the test, notifies of generations that are over.

    Attributes:
        aborted: generation of each call of `on_over`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{name}")
        self._listener.listen()
        self._listener.settimeout(SECONDS)
        monkeypatch.setenv(AGENT_VARIABLE, name)
        for variable in ("GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT"):
            monkeypatch.setenv(f"HOROVOD_{variable}", "")
        monkeypatch.setenv("HOROVOD_RENDEZVOUS_GENERATION", "")
        for field in RANKS:
            monkeypatch.setenv(f"HOROVOD_{field.upper()}", "")
        self.aborted: list[int] = []
        self.membership = Membership("127.0.0.1", 1, 0, StopFlag())
        self._driver: Any = self.membership._driver
        monkeypatch.setattr(self._driver, "follow", lambda: False)
        self.membership.listen(lambda: self.aborted.append(self.membership.generation))
        self.agent = self._listener.accept()[0]
        assert self.agent.recv(1) == RANK

    def enter(self, monkeypatch: pytest.MonkeyPatch, generation: int) -> None:
        answer = dict.fromkeys(RANKS, 1) | {"generation": generation, "job": 1}
        monkeypatch.setattr(self._driver, "ask", lambda *_: answer)
        status: Any = _status
        self.membership.join(status, lambda: None)

    def close(self) -> None:
        self.agent.close()
        self._listener.close()


def _status() -> Any:
    from hvdtrain.elastic.status import Identity, ProcessStatus

    return ProcessStatus(Identity("cpu", "", 1, None))


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(monkeypatch, f"hvdtrain-test-{os.getpid()}")
    yield rank
    rank.close()


def test_collectives_are_aborted_until_the_next_generation_is_entered(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.enter(monkeypatch, 3)
    rank.agent.sendall(b"2\n")
    rank.agent.sendall(b"3\n")
    poll(lambda: len(rank.aborted) > 1, SECONDS, "aborts, because a collective may begin later")
    assert set(rank.aborted) == {3}
    rank.enter(monkeypatch, 4)
    count = rank.aborted.count(3)
    time.sleep(0.6)
    assert rank.aborted.count(3) == len(rank.aborted) == count


def test_process_is_aborted_if_its_generation_was_over_before_it_entered(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.agent.sendall(b"5\n")
    time.sleep(0.5)
    assert not rank.aborted, "it has not entered any generation"
    rank.enter(monkeypatch, 5)
    poll(lambda: rank.aborted[:1] == [5], SECONDS, "an abort")


def test_rank_without_an_agent_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(AGENT_VARIABLE, "hvdtrain-no-such-agent")
    monkeypatch.setattr("hvdtrain.log.logger.propagate", True)
    before = threading.active_count()
    Membership("127.0.0.1", 1, 0, StopFlag()).listen(lambda: None)
    poll(lambda: "agent is not reached" in caplog.text, SECONDS, "a warning")
    poll(lambda: threading.active_count() <= before, SECONDS, "the end of the thread")
