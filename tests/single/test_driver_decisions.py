"""Invariants of the elastic driver's decisions under random sequences of events.

A model of the processes (Rank) surrounds `decide`, and in some sequences the real driver. Nothing
sleeps and no thread runs. HVDTRAIN_DRIVER_EXAMPLES sets the number of sequences.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_sequences

from hvdtrain.elastic.status import STATE_TRANSFER, TRAINING, Identity, ProcessStatus
from tests.support.driver_fakes import DecidedJob, Formed, SteppedDriver

HOSTS = ("a", "b", "c")
IDENTITY = Identity("cpu", "digest", 100, None)
TIMEOUT = 600  # seconds
LAST_RESORT = 900.0
LEAVE = 30.0
EXAMPLES = int(os.environ.get("HVDTRAIN_DRIVER_EXAMPLES", "500"))


@dataclass
class Rank:
    """Model of one process.

    Attributes:
        phase: starting, asking (for its ranks), training, ending (was asked to) or gone.
        since: when it entered this phase.
        hangs: it sends nothing.
        shard: index of the shard that it holds, if a replica spans several processes.
        reachable: latest step as of which it can provide its state.
        may_end: why the driver may ask it to end; empty: it must not.
        must_end: the driver must ask it to end.
        told: it was asked to end in response to its request.
        excluded: it must not take part in a generation again.
        survivor: it has taken part in a generation, and was not made a spare since.
        must_drop: a generation was formed without it, and it has not received that answer.
        transfers: generations with it that failed during the state transfer.
        left: when its host or slot was taken away; None: it stays.
    """

    number: int
    host: str
    slot: int
    since: float
    phase: str = "starting"
    hangs: bool = False
    trained: bool = False
    step: int = 0
    shard: int | None = None
    reachable: int = 0
    failed: str | None = None
    may_end: list[str] = field(default_factory=list)
    must_end: bool = False
    told: bool = False
    excluded: bool = False
    survivor: bool = False
    must_drop: bool = False
    transfers: int = 0
    left: float | None = None

    def leaves(self, now: float) -> None:
        self.left = now if self.left is None else self.left

    def exclude(self, why: str, must_end: bool = True) -> None:
        self.excluded = True
        self.may_end.append(why)
        self.must_end |= must_end


class Decisions(RuleBasedStateMachine):
    """Events around one job, and the invariants of what is decided for it."""

    begin: type[DecidedJob | SteppedDriver] = DecidedJob
    job: DecidedJob | SteppedDriver

    @initialize(
        slots=st.lists(st.integers(1, 3), min_size=2, max_size=3),
        size=st.sampled_from([1, 1, 2]),
        min_np=st.integers(1, 3),
        spare=st.integers(0, 3),
    )
    def start(self, slots: list[int], size: int, min_np: int, spare: int) -> None:
        hosts = dict(zip(HOSTS, slots, strict=False))
        self.size = size  # processes of a replica
        self.min_np = min(min_np, sum(slots))
        self.max_np = max(self.min_np, size) + spare
        self._begin(hosts)
        self.job_settles(1)

    def _begin(self, hosts: dict[str, int]) -> None:
        self.ranks: dict[int, Rank] = {}
        self.absent: Counter[str] = Counter()  # discoveries in a row without a host
        self.noticed: set[str] = set()  # hosts with a notice, until a discovery misses them
        self.slots = dict(hosts)  # usable
        self.generation = -1  # the newest that was checked
        self.said = 0  # messages that were checked
        self.broken = False  # the generation cannot complete a step
        self.newest = 0  # steps that the current generation began with
        np = min(sum(hosts.values()), self.max_np)
        self.job = self.begin(hosts, np, self.min_np, self.max_np, TIMEOUT)
        self._adopt()

    # --- the model ----------------------------------------------------------

    def _live(self, *phases: str) -> list[Rank]:
        return [r for r in self.ranks.values() if r.phase in phases]

    def _members(self) -> list[Rank]:
        return self._live("training")

    def _pick(self, ranks: list[Rank], index: int) -> Rank | None:
        return ranks[index % len(ranks)] if ranks else None

    def _become(self, rank: Rank, phase: str) -> None:
        rank.phase, rank.since = phase, self.job.now

    def _adopt(self) -> None:
        """Check processes that were just started, refused or asked to end, and generations."""
        for process in self.job.state.processes[len(self.ranks) :]:
            assert process.slot < self.slots.get(process.host, 0), f"{process} on an excluded host"
            peers = [
                r
                for r in self.ranks.values()
                if (r.host, r.slot) == (process.host, process.slot) and r.phase != "gone"
            ]
            assert not peers, f"{process} shares its slot with {peers}"
            rank = Rank(process.number, process.host, process.slot, self.job.now)
            self.ranks[process.number] = rank
            used = [r for r in self.ranks.values() if r.phase != "gone" and not self._lost(r)]
            assert len(used) <= self.max_np, "more processes than --max-np"
        for rank in self.ranks.values():
            if rank.phase != "gone" and rank.number in self.job.ended:
                assert rank.may_end, f"{rank} was healthy and was ended"
        said, self.said = self.said, len(self.job.messages)
        self._check_refusals(self.job.messages[said:])
        for generation in self.job.formed[self.generation + 1 :]:
            self._check_generation(generation)

    def _lost(self, rank: Rank) -> bool:
        return self.job.state.processes[rank.number].state == "lost"

    def _status(self, rank: Rank) -> ProcessStatus:
        return ProcessStatus(
            IDENTITY,
            trained=rank.trained,
            step=rank.step,
            failed=rank.failed,
            replica_size=self.size,
            shard=rank.shard,
            reachable_step=rank.reachable,
        )

    def _poll(self, rank: Rank) -> None:
        """A process requests its ranks once."""
        got = self.job.join(rank.number, self._status(rank))
        if got is None:
            return
        if got.get("spare"):
            rank.must_drop = False
        if got["rank"] >= 0:
            assert not rank.excluded, f"{rank} takes part again"
            assert not rank.must_drop, f"{rank} does not know that it was a spare"
            self._become(rank, "training")
        elif not got.get("spare"):
            assert not rank.told, f"{rank} was asked to end twice"
            assert rank.may_end or rank.left or self.job.over or self.job.state.ending, (
                f"{rank} was removed"
            )
            rank.told = True
            rank.may_end.append("told")
            self._become(rank, "ending")

    def _ask(self, rank: Rank, failed: str | None) -> None:
        rank.failed = failed
        rank.survivor = True
        self._become(rank, "asking")
        self._poll(rank)

    def _interrupt(self, done: int) -> None:
        """The generation fails in a step; bit i of `done`: its rank i completed the step."""
        if self.broken:
            return
        self.broken = True
        members = self._members()
        if members and all(r.trained for r in members) and done % 2 ** len(members):
            for index, rank in enumerate(members):
                rank.step += done >> index & 1
                rank.reachable = self.newest + 1

    # --- events --------------------------------------------------------------

    def _running(self) -> bool:
        return hasattr(self, "job") and not self.job.over

    @precondition(_running)
    @rule(count=st.integers(1, 9))
    def processes_are_ready(self, count: int) -> None:
        for rank in self._live("starting")[:count]:
            if not rank.hangs and not self._lost(rank):
                self._become(rank, "asking")
                self._poll(rank)

    @precondition(_running)
    @rule(index=st.integers(0, 8))
    def process_does_not_fit(self, index: int) -> None:
        rank = self._pick(self._live("starting"), index)
        if rank is None or self.generation < 0 or self._lost(rank):
            return
        status = ProcessStatus(replace(IDENTITY, device="cuda"), replica_size=self.size)
        self.job.join(rank.number, status)
        rank.exclude("refused")
        self._become(rank, "asking")
        self._poll(rank)

    @precondition(_running)
    @rule(steps=st.integers(1, 3))
    def ranks_train(self, steps: int) -> None:
        members = self._members()
        if self.broken or any(r.hangs for r in members):
            return
        newest = max((r.step for r in members), default=0)
        for index, rank in enumerate(members):
            rank.trained, rank.failed = True, None
            rank.step = rank.reachable = self.newest = newest + steps
            if self.size > 1:
                rank.shard = index % self.size
        news = self.job.news(members[0].number) if members else {}
        if news.get("stop"):
            for rank in members:
                self.exit(rank, 75)
        elif news.get("hosts"):
            for rank in members:
                self._ask(rank, failed=None)

    @precondition(_running)
    @rule(steps=st.integers(1, 3))
    def job_settles(self, steps: int) -> None:
        """All processes become ready, a generation forms and trains."""
        self.processes_are_ready(9)
        self.time_passes(3.0)
        if self._running() and not self.broken:
            self.ranks_train(steps)
            self.time_passes(0.25)

    @precondition(_running)
    @rule(index=st.integers(0, 8), done=st.integers(0, 511))
    def survivors_continue(self, index: int, done: int) -> None:
        """A rank dies and the others ask for their ranks."""
        rank = self._pick(self._members(), index)
        if rank is not None:
            self._interrupt(done)
            self.exit(rank, 137)
            self.survivors_ask(done, 9)
            self.time_passes(0.25)

    @precondition(_running)
    @rule(host=st.sampled_from(HOSTS), notice=st.booleans(), slots=st.integers(0, 3))
    def hosts_change_while_the_job_trains(self, host: str, notice: bool, slots: int) -> None:
        self.job_settles(1)
        if notice:
            self.host_receives_a_notice(host)
        self.discovery_finds(host, slots, 2)
        for _ in range(2):
            self.job_settles(1)

    @precondition(_running)
    @rule(index=st.integers(0, 8), dones=st.lists(st.integers(0, 511), min_size=2, max_size=4))
    def ranks_die_one_after_another(self, index: int, dones: list[int]) -> None:
        for done in dones:
            self.job_settles(1)
            self.survivors_continue(index, done)
            self.time_passes(1.5)
        self.job_settles(1)

    @precondition(_running)
    @rule(done=st.integers(0, 511), count=st.sampled_from([1, 2, 9]))
    def survivors_ask(self, done: int, count: int) -> None:
        """Some ranks notice that their generation failed, because of the network if not a death."""
        self._interrupt(done)
        for rank in self._members()[:count]:
            if not rank.hangs:
                self._ask(rank, failed=TRAINING)

    @precondition(_running)
    @rule(times=st.integers(1, 3))
    def newcomers_do_not_receive_the_state(self, times: int) -> None:
        for _ in range(times):
            members = self._members()
            if self.broken or all(r.trained for r in members) or any(r.hangs for r in members):
                return
            self.broken = True
            for rank in members:
                rank.transfers += 1
                self._ask(rank, failed=STATE_TRANSFER)
            self.time_passes(0.25)

    @precondition(_running)
    @rule(index=st.integers(0, 8))
    def answer_is_lost(self, index: int) -> None:
        """A process does not receive the answer to its request; it asks again later."""
        rank = self._pick([r for r in self._live("asking") if not r.hangs], index)
        if rank is not None:
            got = self.job.join(rank.number, self._status(rank)) or {"rank": -1}
            self.broken |= got["rank"] >= 0

    @precondition(_running)
    @rule(index=st.integers(0, 8), done=st.integers(0, 511), own=st.booleans())
    def process_dies(self, index: int, done: int, own: bool) -> None:
        rank = self._pick(self._live("starting", "asking", "training"), index)
        if rank is None:
            return
        if rank.phase == "training":
            self._interrupt(done)
        if own:
            self.job.failed(rank.number, "ValueError: bad sample", rank.step + 1)
        self.exit(rank, 1 if own else 137)

    @precondition(_running)
    @rule(index=st.integers(0, 8), done=st.integers(0, 511))
    def process_falls_silent(self, index: int, done: int) -> None:
        rank = self._pick(self._live("starting", "asking", "training"), index)
        if rank is None:
            return
        if rank.phase == "training":
            self._interrupt(done)
        rank.hangs = True
        if self.job.fall_silent(rank.number):
            rank.exclude("silent")
        self._adopt()

    @precondition(_running)
    @rule(index=st.integers(0, 8), done=st.integers(0, 511))
    def process_cannot_be_killed(self, index: int, done: int) -> None:
        rank = self._pick(self._live("starting", "asking", "training"), index)
        if rank is None:
            return
        if rank.phase == "training":
            self._interrupt(done)
        rank.hangs = True
        if not self._lost(rank):
            rank.must_end = False
        self.job.stuck(rank.number, "SIGKILL does not end it")
        rank.exclude("stuck", must_end=False)  # the watchdog tries
        self._adopt()

    @precondition(_running)
    @rule(index=st.integers(0, 8))
    def lost_process_comes_back(self, index: int) -> None:
        rank = self._pick([r for r in self._live("asking", "training") if self._lost(r)], index)
        if rank is not None:
            rank.hangs = False
            self._become(rank, "asking")
            self._poll(rank)

    @precondition(_running)
    @rule(index=st.integers(0, 8), done=st.integers(0, 511))
    def process_is_replaced(self, index: int, done: int) -> None:
        rank = self._pick([r for r in self._members() if not r.hangs], index)
        if rank is None or self._lost(rank):
            return
        self._interrupt(done)
        self.job.replace(rank.number, "it had part 0 of the model")
        rank.exclude("replaced")
        self._become(rank, "ending")
        self._adopt()

    @precondition(_running)
    @rule(index=st.integers(0, 8))
    def asked_process_ends(self, index: int) -> None:
        asked = [
            r
            for r in self._live("starting", "asking", "training", "ending")
            if r.phase == "ending" or r.number in self.job.ended
        ]
        rank = self._pick(asked, index)
        if rank is not None:
            self.exit(rank, 143)

    def exit(self, rank: Rank, code: int) -> None:
        self._become(rank, "gone")
        self.job.exit(rank.number, code)
        self._adopt()

    @precondition(_running)
    @rule(host=st.sampled_from(HOSTS), slots=st.integers(0, 3), times=st.integers(1, 3))
    def discovery_finds(self, host: str, slots: int, times: int) -> None:
        """Discovery finds one host with other slots, or does not find it."""
        self.job.found.pop(host, None)
        if slots:
            self.job.found[host] = slots
        for _ in range(times):
            self.noticed &= self.job.found.keys()
            for one in HOSTS:
                found = self.job.found.get(one, 0)
                self.absent[one] = 0 if found else self.absent[one] + 1
                if found and one not in self.noticed:
                    self.slots[one] = found
                elif self.absent[one] >= 2 or one in self.noticed:
                    self.slots.pop(one, None)
            self.job.discover()
        for rank in self.ranks.values():
            if rank.slot >= self.slots.get(rank.host, 0):
                rank.leaves(self.job.now)
            elif not rank.excluded:
                rank.left = None

    @precondition(_running)
    @rule(host=st.sampled_from(HOSTS))
    def host_receives_a_notice(self, host: str) -> None:
        for rank in self._members():
            if rank.host != host or rank.hangs or self._lost(rank):
                continue
            noticed = rank.excluded  # a notice for it has been received before
            self.job.leave(rank.number, "notice")
            if noticed or self.job.news(rank.number)["stop"]:
                continue
            self.noticed.add(host)
            self.slots.pop(host, None)
            for other in self._live("starting", "asking", "training"):
                if other.host == host:
                    other.leaves(self.job.now)
                    other.excluded = True

    @precondition(lambda self: not self._running())
    @rule()
    def launcher_starts_again(self) -> None:
        """The job is over: a new launcher starts with new processes on the hosts found now."""
        self.teardown()
        self._begin(self.job.found or dict.fromkeys(HOSTS, 2))

    @precondition(lambda self: self._running() and self.generation >= 3)
    @rule(code=st.sampled_from([0, 3]))
    def ranks_agree_to_end(self, code: int) -> None:
        if not self.broken:
            for rank in self._members():
                self.exit(rank, code)

    @precondition(_running)
    @rule(seconds=st.sampled_from([0.0, 0.25, 1.5, 3.0, 31.0, 601.0, 901.0]))
    def time_passes(self, seconds: float) -> None:
        """The driver considers its processes; those that ask get their ranks."""
        if self.job.over:
            return
        for rank in self._live("asking"):
            # A process always has a request in flight: it asks again at once if an answer is lost.
            if not rank.hangs and self.job.state.processes[rank.number].state != "waiting":
                self._poll(rank)
        now = self.job.now + seconds
        asking = [r for r in self._live("asking") if r.survivor and not self._lost(r)]
        waited = max((now - r.since for r in asking), default=0.0)
        for rank in self._live("starting", "training"):
            if self._lost(rank):
                continue
            if rank.phase == "training" and waited > LAST_RESORT:
                rank.exclude("the others waited")
            elif rank.phase == "training" and rank.left and min(waited, now - rank.left) > LEAVE:
                rank.exclude("it had to leave")
            elif rank.phase == "starting" and now - rank.since > TIMEOUT:
                rank.may_end.append("never asked")
        self.job.consider(seconds)
        self._adopt()
        for rank in self._live("asking"):
            if not rank.hangs:
                self._poll(rank)

    # --- invariants -------------------------------------------------------------

    def _check_refusals(self, messages: list[str]) -> None:
        for rank in self._live("asking"):
            why = f"{self.job.state.processes[rank.number]} is refused ("
            for message in messages:
                if message.startswith(why) and "refused" not in rank.may_end:
                    assert rank.transfers >= 2 and not rank.trained, f"{rank}: {message}"
                    rank.exclude("refused")

    def _check_generation(self, formed: Formed) -> None:
        assert formed.number == self.generation + 1, "a generation was skipped or repeated"
        self.generation, self.broken = formed.number, False
        chosen = [self.ranks[n] for n in formed.ranks]
        assert sorted(formed.ranks.values()) == list(range(len(chosen))), "ranks are not 0..n-1"
        assert formed.hosts == {rank: self.ranks[n].host for n, rank in formed.ranks.items()}
        assert len(chosen) >= self.min_np, "fewer ranks than --min-np"
        assert len(chosen) <= self.max_np, "more ranks than --max-np"
        assert len(chosen) % self.size == 0, "an incomplete replica"
        for rank in chosen:
            assert rank.phase == "asking", f"{rank} is not ready"
            assert not rank.excluded, f"{rank} was excluded"
            assert rank.slot < self.slots.get(rank.host, 0), f"{rank} is on an excluded host"
        able = [
            r for r in self._live("asking") if not r.excluded and r.slot < self.slots.get(r.host, 0)
        ]
        assert len(chosen) == min(len(able), self.max_np) // self.size * self.size
        training = [r for r in self._members() if not self._lost(r)]
        assert not training, f"{training} still run in the last generation"
        self._check_state(able, chosen)
        self.newest = max(r.step for r in chosen)
        for rank in chosen:
            rank.survivor = True
        for rank in able:
            if rank.survivor and rank not in chosen:
                rank.reachable, rank.failed, rank.survivor = rank.step, None, False
                rank.must_drop = True

    def _check_state(self, able: list[Rank], chosen: list[Rank]) -> None:
        """The generation keeps all state, and the newest."""
        holders = [r for r in able if (r.trained if self.size == 1 else r.shard is not None)]
        newest = max((r.step for r in holders), default=0)
        current = [r for r in holders if r.reachable >= newest]
        if not holders:
            return
        assert newest == max(r.step for r in chosen if r in holders), "the newest step is dropped"
        assert {r.shard for r in current} == {r.shard for r in current if r in chosen}
        for rank in current:
            # Hosts with an incomplete replica are omitted as a whole, with or without state.
            without = [r for r in chosen if r not in current and r.host == rank.host]
            assert rank in chosen or not without, f"{rank} has state, {without} do not"

    def teardown(self) -> None:
        """Every process that must end has been asked to, by now or within its grace period."""
        if not hasattr(self, "job"):
            return
        try:
            if not self.job.over:
                self.job.consider(0.0)
            for _ in range(2):
                if not self.job.over and not self.job.state.ending:
                    self.job.consider(31.0)
            lost = Counter(m.partition(" is given up")[0] for m in self.job.messages)
            for rank in self._live("starting", "asking", "training", "ending"):
                process = self.job.state.processes[rank.number]
                ended = rank.number in self.job.ended or rank.told
                if rank.must_end and not self.job.over and not self.job.state.ending:
                    assert ended, f"{rank} was not asked to end"
                assert lost[str(process)] <= 1, f"{rank} was given up twice"
        finally:
            self.job.close()


def _run_sequences(begin: type[DecidedJob | SteppedDriver], examples: int) -> None:
    run_sequences(
        type("Sequences", (Decisions,), {"begin": begin}),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_decisions_keep_their_invariants_under_random_events() -> None:
    _run_sequences(DecidedJob, EXAMPLES)


def test_driver_performs_decisions_under_random_events() -> None:
    _run_sequences(SteppedDriver, EXAMPLES // 20)
