"""Ranks as threads of this process that exchange through memory: any number, any death."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hvdtrain.runtime.collectives import RankLostError

_SECONDS = 30.0
_place = threading.local()


class DiedError(Exception):
    """This rank is gone."""


@dataclass(frozen=True)
class Death:
    """Ranks that die in an exchange.

    Args:
        ranks: the ranks.
        at: prefix of the exchange's name; they die in the `count`-th exchange with it.
        received: ranks that receive the result nevertheless; the other ranks see it fail.
    """

    ranks: tuple[int, ...]
    at: str
    count: int = 1
    received: tuple[int, ...] = ()


class World:
    """The ranks of one generation.

    Args:
        death: death in this generation.
    """

    def __init__(self, size: int, death: Death | None = None) -> None:
        self.size = size
        self._death = death
        self._lock = threading.Condition()
        self._given: dict[tuple[str, int], dict[int, Any]] = {}
        self._lost = False

    def exchange(self, rank: int, name: str, value: Any) -> list[Any]:
        """Return every rank's value, in rank order."""
        death = self._death
        with self._lock:
            number = next(n for n in range(10**6) if rank not in self._given.get((name, n), {}))
            given = self._given.setdefault((name, number), {})
            given[rank] = value
            ends = death is not None and name.startswith(death.at)
            ends = ends and death is not None and self._seen(death.at) == death.count
            self._lock.notify_all()
            whole = self._lock.wait_for(
                lambda: len(given) == self.size or self._lost, timeout=_SECONDS
            )
            assert whole, f"rank {rank} waits for {name}: {sorted(given)}"
            if ends and death is not None and len(given) == self.size:
                self._lost = True
                self._lock.notify_all()
                if rank in death.ranks:
                    raise DiedError
                if rank in death.received:
                    return [given[r] for r in range(self.size)]
            if self._lost:
                raise RankLostError(name)
            return [given[r] for r in range(self.size)]

    def _seen(self, at: str) -> int:
        return sum(name.startswith(at) for name, _ in self._given)


def _sum(values: Tensor, name: str) -> Tensor:
    return torch.stack(exchange(name, values.clone())).sum(dim=0)


def _gather_rows(rows: Tensor, name: str) -> Tensor:
    return torch.cat(exchange(name, rows.clone()))


def _broadcast_tensors(tensors: dict[str, Tensor], name: str, root: int = 0) -> None:
    given = exchange(name, {key: tensor.clone() for key, tensor in tensors.items()})
    assert all(g.keys() == given[0].keys() for g in given), "ranks send other tensors"
    for key, tensor in tensors.items():
        tensor.copy_(given[root][key])


def exchange(name: str, value: Any) -> list[Any]:
    """Return every rank's value; called in a thread of `on_ranks`."""
    world: World = _place.world
    return world.exchange(_place.rank, name, value)


@contextmanager
def _patched() -> Iterator[None]:
    room = "hvdtrain.parallel"
    with (
        patch(f"{room}.agreement.sum_", _sum),
        patch(f"{room}.zero.gather_rows", _gather_rows),
        patch(f"{room}.zero_state.gather_json", lambda value, name: exchange(name, value)),
        patch(f"{room}.zero_state.broadcast_tensors", _broadcast_tensors),
        patch(
            "hvdtrain.engine.callbacks.copies.gather_json",
            lambda value, name: exchange(name, value),
        ),
    ):
        yield


def on_ranks(work: Sequence[Callable[[], Any]], death: Death | None = None) -> list[Any]:
    """Call one function per rank, each in a thread.

    Returns:
        Each rank's result, or the RankLostError or DiedError that it raised.
    """
    world = World(len(work), death)
    results: list[Any] = [AssertionError("it has not ended")] * len(work)

    def run(rank: int) -> None:
        _place.world, _place.rank = world, rank
        try:
            results[rank] = work[rank]()
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(len(work))]
    with _patched():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _SECONDS)
    _raise_others(results)
    return results


def _raise_others(results: Iterable[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RankLostError | DiedError):
            raise result
