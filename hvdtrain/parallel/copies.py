"""Copies of shards in the memory of other hosts: `checkpoint.memory`.

Every few steps each rank of a model that spans ranks copies its shard to host memory (`take`). A
thread hashes the copy and sends it to ranks on other hosts (`buddies`), which verify the hash and
keep the copy. If all ranks that hold a shard are lost, the other ranks return to the newest step of
which every shard has a copy (`common_step`; see Spanning.regroup).

    after step s         each rank copies its shard; the step waits for this only
    during step s + 1    the copies are sent
    before the update    the ranks wait, at most as long as a step, until their own copies are
    of step s + 1        verified; the ranks' agreement on the update counts those that are not

So, unless the network is too slow, no rank counts step s + 1 before all copies of step s exist, and
at most as many steps are repeated as lie between two copies. New copies are taken only when the
previous ones are complete on all ranks. The copies of the last two steps are kept, so there is
always a complete one.

The idea is that of Gemini (Wang et al., SOSP 2023), and of the flash checkpoints of DLRover, which
keep backups of shards on other hosts too. torchft needs no copies, but replicas of the model.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from hvdtrain.agent import protocol
from hvdtrain.log import logger
from hvdtrain.parallel.spanned import HeldShard
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.pinned import pinned

_ALIGNMENT = 16
_HASHED = 8 << 20  # bytes; hashing releases the GIL
_SENT = 1 << 20  # bytes; unit of pacing
_RECEIVED = 16 << 20  # bytes that must arrive within _IDLE_SECONDS
_IDLE_SECONDS = 30.0
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 1.0
# Copies are sent in this fraction of a step, so that they are complete before its update.
_PACE = 0.5

Address = tuple[str, int]
Held = tuple[int, int]  # shard, step


def buddies(hosts: Sequence[str], rank: int, copies: int) -> list[int]:
    """Return the ranks that keep copies of a rank's shard.

    They are on `copies` different hosts other than the rank's own; if there are fewer other hosts,
    on all of them. If all ranks share one host, they are other ranks of that host.

    Args:
        hosts: host of each rank.
    """
    by_host: dict[str, list[int]] = {}
    for other, host in enumerate(hosts):
        by_host.setdefault(host, []).append(other)
    groups = list(by_host.values())
    if len(groups) == 1:
        ranks = len(hosts)
        return [(rank + n) % ranks for n in range(1, min(copies, ranks - 1) + 1)]
    at = [*by_host].index(hosts[rank])
    place = groups[at].index(rank)
    following = [*groups[at + 1 :], *groups[:at]]
    return [group[place % len(group)] for group in following[:copies]]


def common_step(held: Sequence[Collection[Held]], shards: int) -> int | None:
    """Return the newest step of which some rank holds a copy of every shard; None if there is none.

    Args:
        held: (shard, step) of the copies of each rank.
        shards: number of shards.
    """
    known = {copy for own in held for copy in own}
    steps = {step for _, step in known}
    whole = [s for s in steps if all((number, s) in known for number in range(shards))]
    return max(whole, default=None)


@dataclass(frozen=True)
class ShardCopy:
    """A copy of a shard; its hash covers header and content.

    Args:
        number: of the shard, see HeldShard.
        step: the step after which it is the state.
        header: JSON: what a HeldShard has besides tensors, and [name, dtype, shape] of each tensor.
        content: the tensors one after the other, uint8, in host memory.
        sha256: hexadecimal.
    """

    number: int
    step: int
    header: bytes
    content: Tensor
    sha256: str

    def intact(self) -> bool:
        """Whether header and content still have the hash.

        Raises:
            RankLostError: this rank's generation has ended.
        """
        progressed = heartbeat.HEARTBEAT.advance
        return _sha256(self.header, self.content, progressed) == self.sha256

    def shard(self) -> HeldShard:
        """Return the shard; its tensors do not share memory with the copy."""
        facts = json.loads(self.header)
        views = _views(self.content, facts["layout"])
        tensors = {name: view.clone() for name, view in views.items()}
        return HeldShard(self.number, facts["progress"], facts["applied"], tensors)


Layout = list[tuple[str, str, list[int]]]  # name, dtype and shape of each tensor


def _layout(shard: HeldShard) -> Layout:
    return [
        (name, str(t.dtype).removeprefix("torch."), [*t.shape]) for name, t in shard.tensors.items()
    ]


def _size(layout: Layout) -> int:
    """Bytes of a copy with this layout."""
    return sum(_space(dtype, shape) for _, dtype, shape in layout)


def _space(dtype: str, shape: Sequence[int]) -> int:
    size: int = prod(shape) * getattr(torch, dtype).itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(content: Tensor, layout: Layout) -> dict[str, Tensor]:
    views, start = {}, 0
    for name, dtype, shape in layout:
        kind = getattr(torch, dtype)
        stop = start + prod(shape) * kind.itemsize
        views[name] = content[start:stop].view(kind).view(shape)
        start += _space(dtype, shape)
    return views


def _sha256(header: bytes, content: Tensor, progressed: Callable[[], None]) -> str:
    digest, data = hashlib.sha256(header), content.numpy().data
    for start in range(0, len(data), _HASHED):
        digest.update(data[start : start + _HASHED])
        progressed()
    return digest.hexdigest()


class CopyStore:
    """The copies that this process holds, its own and other ranks'. Any thread may use it.

    Attributes:
        claim: the generation whose copies it accepts; None: of no generation.
    """

    def __init__(self) -> None:
        self.claim: str | None = None
        self._copies: dict[Held, ShardCopy] = {}
        self._free: list[Tensor] = []  # memory of dropped copies
        self._lock = threading.Lock()

    def held(self) -> list[Held]:
        """Return (shard, step) of each copy."""
        with self._lock:
            return sorted(self._copies)

    def nbytes(self) -> int:
        """Return the bytes of host memory in use."""
        with self._lock:
            contents = [copy.content for copy in self._copies.values()]
            return sum(t.nbytes for t in (*contents, *self._free))

    def shards(self, step: int, wanted: Collection[int]) -> dict[int, HeldShard]:
        """Return those of the wanted shards of which it has a copy as of a step, by number."""
        with self._lock:
            found = [copy for (n, at), copy in self._copies.items() if at == step and n in wanted]
        return {copy.number: copy.shard() for copy in found}

    def keep(self, copy: ShardCopy, claim: str) -> bool:
        """Add a copy; return False if its generation is over."""
        with self._lock:
            if claim != self.claim:
                return False
            self._copies[copy.number, copy.step] = copy
            return True

    def drop(self, unwanted: Callable[[int], bool]) -> None:
        """Drop the copies of unwanted steps; the next copies use their memory."""
        with self._lock:
            dropped = [held for held in self._copies if unwanted(held[1])]
            if dropped:
                self._free = [self._copies.pop(held).content for held in dropped]

    def drop_damaged(self, step: int) -> list[int]:
        """Drop the copies of a step whose hash is wrong; return the numbers of their shards."""
        with self._lock:
            of_step = [copy for (_, at), copy in self._copies.items() if at == step]
        damaged = [copy.number for copy in of_step if not copy.intact()]
        with self._lock:
            for number in damaged:
                del self._copies[number, step]
        return damaged

    def buffer(self, size: int, gpu: torch.device | None = None) -> Tensor:
        """Return memory for a copy of `size` bytes; pinned if it is copied from a GPU."""
        with self._lock:
            for number, free in enumerate(self._free):
                if free.nbytes == size and free.is_pinned() == (gpu is not None):
                    return self._free.pop(number)
        return torch.empty(size, dtype=torch.uint8) if gpu is None else pinned(size, gpu)


class _Sent(NamedTuple):
    """How a copy is sent.

    Args:
        claim: of the generation.
        since: see MemoryCopies.take; 0: not known.
        seconds: the least time to send it in.
    """

    claim: str
    since: int
    seconds: float


class MemoryCopies:
    """Takes copies of this process's shard, sends them to buddies, and keeps the buddies' copies.

    It outlives generations. A daemon thread sends and receives, over connections that are
    authenticated with the job's secret (agent/protocol.py).

    Args:
        secret: of the job.

    Attributes:
        store: the copies.
        complete_step: newest step of which all ranks have reported their copies as verified.
        seconds: from the end of the step until this rank's newest copy was verified.
        stall_seconds: seconds in all in which steps waited.
    """

    def __init__(self, secret: bytes) -> None:
        self.store = CopyStore()
        self.complete_step = 0
        self.seconds = 0.0
        self.stall_seconds = 0.0
        self._key = hmac.digest(secret, b"memory copies", "sha256")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = 0
        self._buddies: list[Address] = []
        self._sending: concurrent.futures.Future[None] | None = None

    def begin(self, claim: str, step: int, address: str) -> int:
        """Begin a generation: accept copies of its ranks; return the port.

        Args:
            claim: of the generation; all its ranks have the same.
            step: step at which it begins: the run has left the states of later steps.
            address: of this host, on which this process listens from its first generation on.
        """
        self.go_back(step)
        self.store.claim = claim
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(
                target=self._loop.run_forever, name="memory copies", daemon=True
            ).start()
            started = asyncio.start_server(self._serve, address, 0, limit=_SENT)
            server = asyncio.run_coroutine_threadsafe(started, self._loop).result(_CONNECT_SECONDS)
            self._port = server.sockets[0].getsockname()[1]
        return self._port

    def send_to(self, buddies: Sequence[Address]) -> None:
        """Send copies of this generation to ranks that listen there, all of which have begun it."""
        self._buddies = [*buddies]

    def go_back(self, step: int) -> None:
        """Drop copies of steps after `step`: the run has left their states."""
        self._cancel()
        self.store.drop(lambda at: at > step)
        self.complete_step = min(self.complete_step, step)

    def leave(self) -> None:
        """End a generation: send and accept no more copies. The copies are kept."""
        self.store.claim = None
        self._cancel()

    def _cancel(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    @property
    def unverified(self) -> bool:
        """Whether the newest copy of this rank is still to be verified by all its buddies."""
        sending = self._sending
        if sending is None:
            return False
        return not sending.done() or sending.cancelled() or sending.exception() is not None

    def wait(self, seconds: float) -> None:
        """Wait until the newest copy is verified; return earlier if the generation is over."""
        begin, sending = time.monotonic(), self._sending
        if sending is None or sending.done():
            return
        with heartbeat.HEARTBEAT.waiting():
            while not sending.done() and time.monotonic() - begin < seconds:
                if heartbeat.HEARTBEAT.generation_over:
                    break
                left = seconds - (time.monotonic() - begin)
                concurrent.futures.wait([sending], max(0.0, min(0.05, left)))
        self.stall_seconds += time.monotonic() - begin

    def take(self, shard: HeldShard, seconds: float, since: int | None) -> None:
        """Copy a shard, and begin to send the copy.

        Args:
            shard: its tensors may change as soon as this returns.
            seconds: duration of a step.
            since: a step of which all ranks' copies are complete: older copies are dropped. None:
                not known.
        """
        assert self._loop is not None and self.store.claim is not None
        begin = time.monotonic()
        if since is not None:
            self.store.drop(lambda at: at < since)
        layout = _layout(shard)
        gpu = next((t.device for t in shard.tensors.values() if t.is_cuda), None)
        content = self.store.buffer(_size(layout), gpu)
        for name, view in _views(content, layout).items():
            view.copy_(shard.tensors[name].detach(), non_blocking=True)
        if gpu is not None:
            torch.cuda.synchronize()
        facts = {"progress": shard.progress, "applied": shard.applied, "layout": layout}
        header = json.dumps(facts).encode()
        self.stall_seconds += time.monotonic() - begin
        unhashed = ShardCopy(shard.number, shard.step, header, content, "")
        sent = _Sent(self.store.claim, since or 0, _PACE * seconds)
        work = self._distribute(unhashed, sent, begin)
        self._sending = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._sending.add_done_callback(_report)

    # --- in the thread --------------------------------------------------------

    async def _distribute(self, unhashed: ShardCopy, sent: _Sent, begin: float) -> None:
        digest = await _hashed(unhashed.header, unhashed.content)
        copy = ShardCopy(unhashed.number, unhashed.step, unhashed.header, unhashed.content, digest)
        self.store.keep(copy, sent.claim)
        await asyncio.gather(*(self._send(copy, sent, buddy) for buddy in self._buddies))
        self.seconds = time.monotonic() - begin

    async def _send(self, copy: ShardCopy, sent: _Sent, buddy: Address) -> None:
        """Send a copy until the buddy has verified it; `leave` cancels this."""
        reported = False
        while True:
            try:
                await self._try_to_send(copy, sent, buddy)
                return
            except (OSError, asyncio.TimeoutError) as error:
                if not reported:
                    logger.warning(
                        "the copy of step %d did not reach %s:%d (%s: %s); retrying",
                        copy.step,
                        *buddy,
                        type(error).__name__,
                        error,
                    )
                reported = True
            await asyncio.sleep(_RETRY_SECONDS)

    async def _try_to_send(self, copy: ShardCopy, sent: _Sent, buddy: Address) -> None:
        channel = await protocol.connect(*buddy, self._key, _CONNECT_SECONDS)
        try:
            channel.send(
                {
                    "claim": sent.claim,
                    "since": sent.since,
                    "number": copy.number,
                    "step": copy.step,
                    "header": len(copy.header),
                    "bytes": copy.content.nbytes,
                    "sha256": copy.sha256,
                }
            )
            channel.send_content(copy.header)
            data, begin = copy.content.numpy().data, time.monotonic()
            for start in range(0, len(data), _SENT):
                channel.send_content(data[start : start + _SENT])
                await asyncio.wait_for(channel.flush(), _IDLE_SECONDS)
                planned = begin + sent.seconds * start / len(data)
                await asyncio.sleep(max(0.0, planned - time.monotonic()))
            answer = await asyncio.wait_for(channel.receive(), _IDLE_SECONDS)
        finally:
            channel.abort()
        if answer.get("error"):
            raise OSError(answer["error"])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Receive one copy."""
        try:
            channel = await protocol.accept(reader, writer, self._key)
            facts = await asyncio.wait_for(channel.receive(), _IDLE_SECONDS)
            error = await self._receive(channel, facts)
            channel.send({"error": error})
            await asyncio.wait_for(channel.flush(), _IDLE_SECONDS)
            with suppress(OSError):  # the sender closes the connection
                await asyncio.wait_for(channel.receive(), _IDLE_SECONDS)
        except (OSError, asyncio.TimeoutError, KeyError, ValueError):
            pass  # the sender reports the failure, and tries again
        finally:
            writer.transport.abort()

    async def _receive(self, channel: protocol.Channel, facts: protocol.Message) -> str:
        """Receive and keep a copy; return what is wrong, or ""."""
        claim, number, step = str(facts["claim"]), int(facts["number"]), int(facts["step"])
        if claim != self.store.claim:
            return "the receiver is in another generation"
        self.store.drop(lambda at: at < int(facts["since"]))
        header, content = bytearray(facts["header"]), self.store.buffer(int(facts["bytes"]))
        await asyncio.wait_for(channel.receive_content(memoryview(header)), _IDLE_SECONDS)
        data = content.numpy().data
        for start in range(0, len(data), _RECEIVED):
            part = data[start : start + _RECEIVED]
            await asyncio.wait_for(channel.receive_content(part), _IDLE_SECONDS)
        digest = await _hashed(bytes(header), content)
        if digest != facts["sha256"]:
            return f"shard {number} of step {step} arrived damaged (SHA-256 differs)"
        copy = ShardCopy(number, step, bytes(header), content, digest)
        return "" if self.store.keep(copy, claim) else "the receiver's generation is over"


def _report(sending: concurrent.futures.Future[None]) -> None:
    if not sending.cancelled() and (error := sending.exception()) is not None:
        logger.error("copies of shards are no longer sent (%s: %s)", type(error).__name__, error)


async def _hashed(header: bytes, content: Tensor) -> str:
    return await asyncio.to_thread(_sha256, header, content, lambda: None)
