"""Replays: another rank recomputes a rank's micro-batch, and the two gradients are compared.

A host may compute wrongly without any error: Hochschild et al., "Cores that don't count", HotOS
2021; Dixit et al., "Silent data corruptions at scale", arXiv:2102.11245. All replicas then apply
the same wrong gradient, so a comparison of replicas (callbacks/replicas.py) does not detect it.

In a step whose number is a multiple of `integrity.replay_every`,

1. each rank first computes the gradient of another rank's first micro-batch, on another host if
   possible (`checkers`), and only hashes it. Loading and random numbers depend only on the place of
   a micro-batch in the run, and buffers are restored;
2. hooks hash each rank's own gradient of its first micro-batch when backward computes it: before it
   is accumulated, converted or sent (`Replay.follow`);
3. before the update, ranks exchange the hashes (`Replay.compare`). If all are equal, the step
   continues.
4. Otherwise one rank of each host computes the micro-batch of the first difference twice, and
   `judge` decides by majority. The update is not applied if a rank is wrong.

A difference alone does not accuse a rank: kernels may not be reproducible, and devices of different
kinds round differently. Then gradients are compared by a relative distance, whose bound is measured
in 4: of 32 sums with random signs (the sketch of Alon, Matias and Szegedy, "The space complexity of
approximating the frequency moments", STOC 1996). An exact run ends instead, because its gradients
must be bitwise identical.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain import comm
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.loader import Batch, TrainLoader, to_device
from hvdtrain.data.order import spread
from hvdtrain.engine.accumulate import Accumulate
from hvdtrain.engine.integrity import DIGEST_BYTES, SKETCH, ShardSums, TensorHash
from hvdtrain.errors import EXIT_CRASH, EXIT_USER, crash
from hvdtrain.exchange.base import TrainedParameters
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import AgreedError, gather_bytes, gather_json, on_all_ranks
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.device import arithmetic, reproducible
from hvdtrain.runtime.heartbeat import Activity

# A relative distance of gradients that cannot be rounding, and the ratio of the bound to the
# largest distance that was measured.
_TOO_FAR, _FACTOR = 0.05, 16.0
_SMALLEST_BOUND = 1e-12
_NONE = bytes(DIGEST_BYTES)


class StepDiscarded(Exception):
    """All ranks have agreed that a gradient of this step is wrong; the state is as before it.

    Args:
        membership_changed: a host has left because of it: another generation repeats the step.
            Otherwise this generation repeats it.
    """

    def __init__(self, membership_changed: bool) -> None:
        super().__init__()
        self.membership_changed = membership_changed


# --- who computes whose micro-batch -------------------------------------------


def checkers(hosts: Sequence[str], able: Sequence[int], turn: int) -> dict[int, int]:
    """Return the rank that checks each rank in `able`; each of them checks one rank.

    Checkers are on other hosts, unless a host has more than half of the ranks. They rotate with
    `turn`.

    Args:
        hosts: host of each rank.
        able: ranks that have micro-batches.
    """
    by_host: dict[str, list[int]] = {}
    for rank in able:
        by_host.setdefault(hosts[rank], []).append(rank)
    ordered = [rank for ranks in by_host.values() for rank in ranks]
    if len(ordered) < 2:
        return {}
    largest = max(map(len, by_host.values()))
    # Host by host, a shift by these numbers leaves the largest host, and returns to it last.
    low, high = sorted((largest, len(ordered) - largest))
    shifts = range(max(low, 1), min(high, len(ordered) - 1) + 1)
    shift = shifts[turn % len(shifts)]
    return {rank: ordered[(at + shift) % len(ordered)] for at, rank in enumerate(ordered)}


@dataclass(frozen=True)
class ReplayPlan:
    """Which global batches are replayed, and by which ranks; a pure function of their number.

    Args:
        every: steps between replays; 0 = never.
        rank: this rank.
        hosts: host of each rank.
    """

    every: int
    rank: int
    hosts: Sequence[str]

    def checkers(self, batch: int, counts: Sequence[int]) -> dict[int, int]:
        """Return the checker of each rank in a step; empty if nothing is replayed.

        Args:
            batch: number of the step's global batch, see Flags.
            counts: micro-batches per rank.
        """
        if not self.every or (batch + 1) % self.every:
            return {}
        able = [rank for rank, count in enumerate(counts) if count]
        return checkers(self.hosts, able, batch // self.every)

    def replayed(self, batch: int, counts: Sequence[int]) -> int | None:
        """Return the micro-batch that this rank replays in a step; None: none."""
        for subject, checker in self.checkers(batch, counts).items():
            if checker == self.rank:
                return first_of(subject, counts)
        return None

    def jurors(self, subject: int, checker: int) -> list[int]:
        """Return the ranks that compute a micro-batch again after a difference of these two.

        They are the two and one rank of each other host, or with fewer than three hosts all ranks.
        """
        if len({*self.hosts}) < 3:
            return [*range(len(self.hosts))]
        first = {host: rank for rank, host in reversed([*enumerate(self.hosts)])}
        known = {self.hosts[subject], self.hosts[checker]}
        others = (rank for host, rank in first.items() if host not in known)
        return sorted({subject, checker, *others})


def first_of(rank: int, counts: Sequence[int]) -> int:
    """Return the number of a rank's first micro-batch in a step."""
    return spread(counts).index(rank)


# --- fingerprints of gradients ------------------------------------------------


class GradientFingerprint(NamedTuple):
    """GradientFingerprint of a gradient.

    Args:
        digest: hexadecimal; differs if any bit differs, see TensorHash.
        sketch: SKETCH sums of the elements with random signs.
    """

    digest: str
    sketch: Sequence[float]


class GradientHash:
    """Hashes the gradients of a micro-batch one after another, in any order."""

    def __init__(self, of_tensors: TensorHash) -> None:
        self._hash = of_tensors
        self._found: dict[str, _Hashed] = {}

    def add(self, name: str, gradient: Tensor | None) -> None:
        """Add a parameter's gradient, on any device; it may change afterwards."""
        # The exchanges refuse sparse gradients.
        if gradient is not None and gradient.layout == torch.strided:
            sums, sketch = self._hash.sums(gradient), self._hash.sketch(gradient)
            shape, dtype = [*gradient.shape], str(gradient.dtype)
            self._found[name] = _Hashed(shape, dtype, gradient.device.type, sums, sketch)

    def fingerprint(self) -> GradientFingerprint:
        found = dict(sorted(self._found.items()))
        sums = {
            name: ShardSums(one.shape, one.dtype, one.device, one.sums.tolist())
            for name, one in found.items()
        }
        sketches = [one.sketch.cpu() for one in found.values()] or [torch.zeros(SKETCH)]
        sketch = torch.stack(sketches).sum(dim=0).tolist()
        return GradientFingerprint(self._hash({}, sums).hex(), sketch)


class _Hashed(NamedTuple):
    """Hash of a gradient; the tensors are on its device, which may still compute them."""

    shape: list[int]
    dtype: str
    device: str
    sums: Tensor
    sketch: Tensor


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return about the 2-norm of the difference of two gradients, relative to the `other`'s."""
    finite = [math.isfinite(a) and math.isfinite(b) for a, b in zip(one, other, strict=True)]
    if not all(finite):
        return 0.0 if [*map(math.isfinite, one)] == [*map(math.isfinite, other)] else math.inf
    return math.dist(one, other) / (math.hypot(*other) or 1.0)


# --- the verdict --------------------------------------------------------------


@dataclass(frozen=True)
class Vote:
    """Result of a rank that computed a disputed micro-batch again, twice.

    Args:
        arithmetic: of its device, see `runtime.device.arithmetic`.
    """

    rank: int
    arithmetic: str
    found: tuple[GradientFingerprint, GradientFingerprint]


@dataclass(frozen=True)
class Verdict:
    """What a difference means.

    Args:
        kind: wrong: the gradients of `ranks` were wrong. undecided: the gradient of one of `ranks`
            is wrong. inexact: kernels or devices round differently, within `bound`.
            irreproducible: gradients differ by more than rounding on healthy ranks.
        again: a wrong rank computed it wrongly again.
        agreed: the other ranks that agree on the correct gradient.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    again: bool = False
    agreed: tuple[int, ...] = ()
    bound: float = 0.0


def judge(
    votes: Sequence[Vote],
    original: Mapping[int, GradientFingerprint],
    bound: float = 0.0,
    reproducible: bool = True,
) -> Verdict:
    """Decide which rank computed a wrong gradient, by a majority of more than half of the votes.

    Args:
        votes: of healthy ranks and of the two that differ.
        original: fingerprints of the two ranks that differ.
        bound: bound of the distance of two correct gradients; 0: they are bitwise identical.
        reproducible: each rank's kernels return bitwise identical results each time.
    """
    if len(votes) < 2:
        return Verdict("undecided", (*sorted(original),))
    if bound or len({vote.arithmetic for vote in votes}) > 1:
        return _by_distance(votes, original, bound)
    digests = {vote.rank: {found.digest for found in vote.found} for vote in votes}
    steady = Counter(digest for (digest, *more) in digests.values() if not more)
    truth, most = (steady.most_common(1) or [("", 0)])[0]
    if 2 * most > len(votes):
        again = {rank for rank, found in digests.items() if found != {truth}}
        wrong = again | {rank for rank, found in original.items() if found.digest != truth}
        if not reproducible:  # only a difference that repeats bit for bit is certain
            again = wrong = {rank for rank in again if len(digests[rank]) == 1}
        return _wrong(votes, wrong, again) if wrong else _by_distance(votes, original, bound)
    if len(votes) < 3 and len(votes) - steady.total() < 2:
        return Verdict("undecided", (*sorted(original),))
    return _by_distance(votes, original, bound)


def _by_distance(
    votes: Sequence[Vote], original: Mapping[int, GradientFingerprint], bound: float
) -> Verdict:
    center = [median(column) for column in zip(*(v.found[0].sketch for v in votes), strict=True)]
    far = {v.rank: max(distance(found.sketch, center) for found in v.found) for v in votes}
    first = {rank: distance(one.sketch, center) for rank, one in original.items()}
    usual = median(far.values())
    if not usual <= _TOO_FAR:
        steady = all(len({found.digest for found in vote.found}) == 1 for vote in votes)
        if len(votes) < 3 and steady:
            return Verdict("undecided", (*sorted(original),))
        return Verdict("irreproducible", bound=usual)
    # Rounding errors grow when gradients shrink, on all ranks. While the bound is being measured, a
    # rank of another kind may be the only one that rounds differently.
    limit = max(bound, _FACTOR * usual) if bound else _TOO_FAR
    again = {rank for rank, one in far.items() if not one <= limit}
    wrong = again | {rank for rank, one in first.items() if not one <= limit}
    if wrong:
        return _wrong(votes, wrong, again)
    largest = max(*far.values(), *first.values())
    return Verdict("inexact", bound=max(bound, _FACTOR * largest, _SMALLEST_BOUND))


def _wrong(votes: Sequence[Vote], wrong: set[int], again: set[int]) -> Verdict:
    agreed = (vote.rank for vote in votes if vote.rank not in wrong)
    return Verdict("wrong", (*sorted(wrong),), bool(again), (*agreed,))


# --- replays in a run ---------------------------------------------------------


@dataclass(frozen=True)
class ReplayActions:
    """What a replay calls.

    Args:
        emit: writes an event "replay" on rank 0.
        exclude: makes this rank's host leave an elastic run, with a message; None: not elastic.
        count: counts micro-batches whose gradients agreed, and differed, on rank 0.
        requested: `integrity.replay_every` is set. Otherwise a difference that no majority decides
            does not end the run: the task's loss may depend on the rank.
    """

    emit: Callable[..., None] = lambda *_, **__: None
    exclude: Callable[[str], None] | None = None
    count: Callable[[int, int], None] = lambda agreed, differed: None
    requested: bool = True


class Replay:
    """Replays micro-batches of other ranks, see the top of this file. One for each generation.

    Args:
        loader: gives the replayed micro-batch before this rank's own ones, as `plan` says.
        position: returns the samples of the run before the current step.
    """

    def __init__(
        self,
        plan: ReplayPlan,
        passes: Accumulate,
        trained: TrainedParameters,
        loader: TrainLoader,
        position: Callable[[], int],
        actions: ReplayActions,
        context: RankContext,
    ) -> None:
        self._plan, self._passes, self._loader = plan, passes, loader
        self._position, self._actions, self._context = position, actions, context
        self._all = {trained.names[p]: p for p in trained.in_order}
        self._trained: dict[str, Tensor] = {}  # of these, trained before this step
        self._hash = TensorHash()
        self._batch = 0  # of this step, see Flags
        self._counts: Sequence[int] = ()
        self._own: GradientFingerprint | None = None
        self._theirs: GradientFingerprint | None = None
        self._buffers = _NONE
        self._error = ""
        self._off = False
        self._arithmetic: list[str] = []  # of the devices of the last vote
        self._bound = 0.0  # 0: gradients are bitwise identical
        self._repeated = -1  # the last step that was repeated

    def follow(
        self, batches: Iterator[Batch], assignment: Assignment, batch: int
    ) -> Iterator[Batch]:
        """Return this rank's micro-batches; taking them replays and hashes, if it is due.

        Args:
            batches: the loader's, of this step.
            batch: number of the step's global batch, see Flags.
        """
        self._batch, self._counts = batch, [*assignment.counts]
        if not self._plan.checkers(batch, self._counts):
            return batches
        return self._followed(batches)

    def _followed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._own = self._theirs = None
        self._error = ""
        self._trained = {name: p for name, p in self._all.items() if p.requires_grad}
        buffers = dict(self._passes.model.named_buffers())
        self._buffers = self._hash(buffers) if buffers else _NONE
        if self._plan.replayed(self._batch, self._counts) is not None:
            batch = next(batches)
            if not self._off:
                self._theirs = self._attempt(lambda: batch)
            del batch
        if self._counts[self._plan.rank]:
            # Hooks of tensors run before hooks of their nodes, by which exchanges take gradients.
            own = GradientHash(self._hash)
            hooks = [
                p.register_hook(partial(own.add, name))
                for name, p in self._trained.items()
                if p.requires_grad and not self._off  # the replay may have frozen it
            ]
            try:
                yield next(batches)
            finally:
                for hook in hooks:
                    hook.remove()
            self._own = own.fingerprint()
        yield from batches

    def _attempt(self, load: Callable[[], Batch]) -> GradientFingerprint | None:
        """Return the fingerprint of a micro-batch's gradient; None: see `_error`."""
        try:
            return self._fingerprint(load())
        except Exception as error:  # the task's: the rank of the micro-batch reports its own
            self._error = f"{type(error).__name__}: {error}"
            return None

    def _fingerprint(self, batch: Batch) -> GradientFingerprint:
        passes, heartbeat = self._passes, self._context.heartbeat
        refused = comm.COLLECTIVES.refused("called in a replay, which one rank computes alone")
        heartbeat.beat(Activity.WORKING)
        try:
            with self._context.timer.inside("other"), refused:
                on_device = to_device(batch, self._context.device)
                values = passes.forward(passes.model, on_device, passes.forward.names)
                trained = {name: p for name, p in self._trained.items() if p.requires_grad}
                loss = passes.forward.scaled(values.loss)
                # Unlike `backward`, it neither accumulates nor triggers the exchange's hooks.
                found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        finally:
            passes.buffers.restore()
            heartbeat.beat(Activity.WORKING)
        hashed = GradientHash(self._hash)
        for name, gradient in zip(trained, found, strict=True):
            hashed.add(name, gradient)
        return hashed.fingerprint()

    def compare(self, step: int) -> None:
        """Compare the gradients of a step if it is due, before its update; all ranks call it.

        Raises:
            StepDiscarded: a gradient is wrong, and the step will be repeated.
            AgreedError: a gradient is wrong, and the run cannot continue on these hosts.
            RankLostError: another rank is gone.
        """
        checker_of = {} if self._off else self._plan.checkers(self._batch, self._counts)
        if checker_of:
            with self._context.timer.inside("other"):
                self._compare(step, checker_of)

    def _compare(self, step: int, checker_of: Mapping[int, int]) -> None:
        digests = [bytes.fromhex(f.digest) if f else _NONE for f in (self._own, self._theirs)]
        gathered = gather_bytes(b"".join([*digests, self._buffers]), "replay")
        starts = range(0, 3 * DIGEST_BYTES, DIGEST_BYTES)
        rows = [_Row(*(row[at : at + DIGEST_BYTES] for at in starts)) for row in gathered]
        if any(rows[checker].theirs == _NONE for checker in checker_of.values()):
            errors = gather_json(self._error, "replay.errors")
            first = next(filter(None, errors))
            self._switch_off(step, f"a micro-batch cannot be replayed ({first})")
            return
        differing = [s for s, c in checker_of.items() if rows[s].own != rows[c].theirs]
        if differing and self._bound:
            differing = self._beyond_bound(differing, checker_of)
        if differing and not self._all_finite():
            return  # all ranks skip this step, whichever gradient is wrong
        self._actions.count(len(checker_of) - len(differing), len(differing))
        if not differing:
            return
        subject = min(differing)
        checker = checker_of[subject]
        if rows[subject].buffers != rows[checker].buffers:
            self._switch_off(step, "the model's buffers differ between ranks")
            return
        self._act(step, subject, checker, self._vote(step, subject, checker))

    def _all_finite(self) -> bool:
        """Whether each rank's own gradient is finite."""
        own = self._own is None or all(map(math.isfinite, self._own.sketch))
        return all(gather_json(own, "replay.finite"))

    def _beyond_bound(self, subjects: Sequence[int], checker_of: Mapping[int, int]) -> list[int]:
        own = [found.sketch if found else () for found in (self._own, self._theirs)]
        sketches = gather_json(own, "replay.sketches")
        return [
            subject
            for subject in subjects
            if not distance(sketches[subject][0], sketches[checker_of[subject]][1])
            <= 2 * self._bound
        ]

    def _vote(self, step: int, subject: int, checker: int) -> Verdict:
        """Let the jurors compute the subject's micro-batch again, and judge."""
        rank, number = self._plan.rank, first_of(subject, self._counts)
        own: dict[str, Any] = {}
        if rank in self._plan.jurors(subject, checker):
            found = self._compute_again(step, number)
            own = {"arithmetic": arithmetic(self._context.device), "found": found}
        if rank in (subject, checker):
            own["original"] = self._own if rank == subject else self._theirs
        answers = gather_json(own, "replay.votes")
        votes = [
            Vote(
                rank,
                answer["arithmetic"],
                (GradientFingerprint(*first), GradientFingerprint(*second)),
            )
            for rank, answer in enumerate(answers)
            if answer.get("found")
            for first, second in [answer["found"]]
        ]
        original = {
            rank: GradientFingerprint(*answers[rank]["original"]) for rank in (subject, checker)
        }
        self._arithmetic = sorted({vote.arithmetic for vote in votes})
        certain = reproducible(self._context.device)
        return judge(votes, original, self._bound, certain)

    def _compute_again(self, step: int, number: int) -> list[GradientFingerprint]:
        """Return the fingerprints of two computations of any micro-batch; [] after an error."""
        saved = self._passes.buffers
        now = [getattr(module, name).detach().clone() for module, name in saved.places]
        saved.restore()
        found = []
        try:
            for _ in range(2):
                load = partial(self._loader.load, self._batch, number, self._position())
                found.append(self._attempt(load))
        finally:
            with torch.no_grad():
                for (module, name), value in zip(saved.places, now, strict=True):
                    getattr(module, name).copy_(value)
        if self._error:
            logger.warning("step %d: a replay failed here: %s", step + 1, self._error)
        return [one for one in found if one is not None] if all(found) else []

    # --- consequences ---------------------------------------------------------

    def _act(self, step: int, subject: int, checker: int, verdict: Verdict) -> None:
        """Report a verdict, and do what follows from it; identical on all ranks."""
        number = first_of(subject, self._counts)
        if verdict.kind in ("inexact", "irreproducible") and self._passes.exact:
            self._say(step, "inexact", "", (), bound=verdict.bound)
            raise AgreedError(
                f"step {step + 1}: ranks compute gradients of micro-batch {number} that are not "
                f"bitwise identical, as exchange.name exact requires: {self._cause(verdict)}. The "
                "step was not applied",
                EXIT_USER,
                0,
            )
        if verdict.kind == "irreproducible":
            self._switch_off(
                step,
                "the gradient of a micro-batch differs between ranks by "
                f"{verdict.bound:.1%}, more than rounding: it depends on more than the parameters, "
                "the buffers, the samples and the random numbers",
            )
            return
        if verdict.kind == "inexact":
            self._bound = verdict.bound
            message = (
                "the ranks' gradients are not bitwise reproducible: replays are compared with "
                f"a relative tolerance of {verdict.bound:.1e}, which was measured now"
            )
            self._say(step, "inexact", message, (), bound=verdict.bound)
            return
        self._accuse(step, subject, checker, number, verdict)

    def _cause(self, verdict: Verdict) -> str:
        """Why gradients differ in an exact run, and what to do."""
        if verdict.kind == "irreproducible":
            return (
                "the task's loss depends on more than the parameters, the buffers, the samples and "
                "the random numbers. Change it, or use exchange.name dense"
            )
        if len(self._arithmetic) > 1:
            return (
                f"devices round differently ({'; '.join(self._arithmetic)}). Use hosts with one "
                "kind of device, or exchange.name dense"
            )
        return (
            "an operation of the model or its loss is not deterministic. Use another one, or "
            "exchange.name dense"
        )

    def _accuse(self, step: int, subject: int, checker: int, number: int, verdict: Verdict) -> None:
        """Repeat the step without the wrong ranks' hosts, repeat it here, or end the run.

        A difference that no majority decides ends the run only if replays were requested.
        """
        ranks, hosts = verdict.ranks, self._hosts(verdict.ranks)
        if verdict.kind == "undecided":
            what = (
                f"{self._names(ranks)} compute different gradients of micro-batch {number}, also "
                "when they repeat it, and no majority decides which one is wrong"
            )
        else:
            what = (
                f"{self._names(ranks)} computed a wrong gradient of micro-batch {number}: it "
                f"differs from the gradient of {self._names(verdict.agreed)}, "
                f"{'also' if verdict.again else 'but not'} when the ranks repeat it"
            )
        say = partial(self._say, step, subject=subject, checker=checker, micro_batch=number)
        named = verdict.kind == "wrong" and len(verdict.agreed) > 1
        named = named and not {*hosts} >= {*self._hosts(verdict.agreed)}
        # With two hosts, a transient error is not worth half of them.
        if named and (verdict.again or len({*self._plan.hosts}) > 2):
            if self._actions.exclude is not None:
                listed = ", ".join(hosts)
                message = f"{what}. The step is repeated, and the run continues without {listed}"
                say("wrong", message, ranks)
                self._leave(ranks, f"it computed a wrong gradient in step {step + 1}")
                raise StepDiscarded(membership_changed=True)
        elif verdict.kind == "wrong" and not verdict.again and self._repeated != step:
            say("transient", f"{what}. The step is repeated", ranks)
            self._repeated = step
            raise StepDiscarded(membership_changed=False)
        if verdict.kind == "undecided" and not self._actions.requested:
            self._switch_off(
                step,
                f"{what}. The run continues, because integrity.replay_every is not set: either a "
                "host computes wrongly, or the task's loss depends on the rank",
            )
            return
        say(verdict.kind, "", ranks)
        where = hosts[0] if len(hosts) == 1 else f"one of {', '.join(hosts)}"
        raise AgreedError(
            f"step {step + 1}: {what}. The step was not applied: start again without {where} and "
            "with the same run.id to resume from the newest checkpoint",
            EXIT_CRASH,
            0,
        )

    def _leave(self, ranks: Sequence[int], message: str) -> None:
        def leave() -> None:
            if self._plan.rank not in ranks or self._actions.exclude is None:
                return
            try:
                self._actions.exclude(message)
            except OSError as error:
                raise crash(f"the launcher does not respond ({error}): {message}") from None

        on_all_ranks("replay.exclude", leave)

    def _switch_off(self, step: int, why: str) -> None:
        self._off = True
        message = f"{why}; no more replays until the next start (integrity.replay_every)"
        self._say(step, "off", message, ())

    def _say(
        self, step: int, verdict: str, message: str, ranks: Sequence[int], **facts: Any
    ) -> None:
        """Write a verdict to the events, and to the log unless `message` is ""."""
        if message:
            logger.warning("step %d: %s", step + 1, message)
        where = {"ranks": [*ranks], "hosts": self._hosts(ranks)}
        self._actions.emit("replay", step=step + 1, verdict=verdict, **where, **facts)

    def _hosts(self, ranks: Sequence[int]) -> list[str]:
        return [*dict.fromkeys(self._plan.hosts[rank] for rank in ranks)]

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(f"rank {rank} on {self._plan.hosts[rank]}" for rank in ranks)


class _Row(NamedTuple):
    """Digests of a rank: its own and the replayed gradient, and its buffers before the step."""

    own: bytes
    theirs: bytes
    buffers: bytes
