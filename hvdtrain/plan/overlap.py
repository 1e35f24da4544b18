"""Completion time of transfers that overlap with the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """A collective of one bucket.

    Args:
        ready: seconds of the backward pass after which it can begin.
        seconds: time that it occupies the network; transfers are sent one after the other.
        busy: part of `seconds` taken from the processor that computes the backward pass.
        after: seconds of arithmetic on the received data.
        again: seconds of a second collective that follows.
        beside: extra seconds if it begins before the pass is over.
    """

    ready: float
    seconds: float
    busy: float = 0.0
    after: float = 0.0
    again: float = 0.0
    beside: float = 0.0


@dataclass(frozen=True)
class Overlapped:
    """Seconds since the beginning of the backward pass.

    Args:
        computed: when the pass itself is done.
        done: when all gradients of the global batch are complete.
        sending: how long the network was in use.
    """

    computed: float
    done: float
    sending: float

    @property
    def exposed(self) -> float:
        """Seconds that the step waits after its last backward pass."""
        return self.done - self.computed


def overlap(transfers: Sequence[Transfer], backward: float) -> Overlapped:
    """Overlap bucket by bucket: each is sent when it is ready and the previous one has arrived.

    Args:
        transfers: in the order in which they are sent.
        backward: seconds of the pass if nothing were sent.
    """
    sent: list[tuple[float, float, float]] = []  # beginning, end, busy
    free = 0.0
    for transfer in transfers:
        begin = max(free, _when(transfer.ready, sent))
        free = begin + transfer.seconds
        if begin < _when(backward, sent):
            free += transfer.beside
        sent.append((begin, free, min(transfer.busy, transfer.seconds)))
    computed = _when(backward, sent)
    now = computed
    for transfer, (_, end, _) in zip(transfers, sent, strict=True):
        now = max(now, end) + transfer.after + transfer.again
    sending = sum(transfer.seconds + transfer.again for transfer in transfers)
    return Overlapped(computed, now, sending)


def _when(work: float, sent: Sequence[tuple[float, float, float]]) -> float:
    """Time at which `work` seconds of computing are done, given the concurrent transfers."""
    now, done = 0.0, 0.0
    for begin, end, busy in sent:
        if done + begin - now >= work:
            break
        done += begin - now
        gained = end - begin - busy
        if done + gained >= work:
            return begin + (work - done) * (end - begin) / gained if gained > 0 else begin
        now, done = end, done + gained
    return now + work - done
