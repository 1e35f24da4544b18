"""When what is sent beside the backward pass has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """A collective of one bucket.

    Args:
        ready: seconds of the backward pass after which it can begin.
        seconds: that it occupies the network; one is sent after the other.
        busy: of these, seconds of the processor that computes the backward pass.
        after: seconds of arithmetic on what has arrived, and
        again: seconds of a second collective that this needs.
        beside: more seconds, if it begins before the pass is over.
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
        computed: the pass itself is done.
        done: all gradients are those of the global batch.
        sending: for how long the network was in use.
    """

    computed: float
    done: float
    sending: float

    @property
    def exposed(self) -> float:
        """What the step waits for after its last backward pass."""
        return self.done - self.computed


def overlap(transfers: Sequence[Transfer], backward: float) -> Overlapped:
    """Bucket by bucket: each is sent when it is ready and the one before it has arrived.

    Args:
        transfers: in the order in which they are sent.
        backward: seconds of the pass, were nothing sent.
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
    """When so many seconds of computing are done beside what is sent meanwhile."""
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
