"""One iteration of a script's own loop: the block of a step, and the code around it.

The whole state is captured between two iterations: model, optimizer, and what the script registers.
Checkpoints and new ranks get this state, and then begin the next iteration, so no code runs twice.
If a rank is lost within an iteration, it depends on where:

in the block: the step does not count. The rest of the iteration has no effect: at its end the
    state returns to that of the failure; or, if the script changes the model before the block, to
    a copy from the start of the iteration, see iteration_start.py.
in an evaluation after the block: the step counts. In the next generation, before any state is
    transferred, the ranks that are within the iteration repeat the evaluation among themselves
    and finish the iteration, and the other ranks wait (`finish`, `wait_for_others`).
in an evaluation before the block: the ranks repeat the evaluation after the state transfer. If the
    script has already changed the model in this iteration, the run ends.

Only elastic runs continue after a loss: others do not look for changes, and make no copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence

from hvdtrain.engine.iteration_start import IterationStart, kept
from hvdtrain.engine.loop import Step
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.state import RunState, Snapshot
from hvdtrain.errors import crash
from hvdtrain.runtime.collectives import gather_json
from hvdtrain.runtime.mesh import Topology

Pairs = list[tuple[float, float]]  # (sum, weight) of parts
# Evaluates, with this rank's number among the ranks that share the work, their number, and whether
# these are all ranks.
Compute = Callable[[int, int, bool], Pairs]


_START_LOST = (
    "another rank was lost, and the state at the start of the loop's iteration is unknown: {}. "
    "Start again with the same run.id to resume from the newest checkpoint"
)


class Iteration:
    """The iteration of this process, see the top of this file.

    Args:
        state: the whole state; `script` is a part of it.
        elastic: the run continues if a rank is lost.

    Attributes:
        script: what the script registers.
        step: its step; None: the process is between two iterations.
    """

    def __init__(self, script: ScriptState, state: RunState, elastic: bool) -> None:
        self.script = script
        self.step: Step | None = None
        self._state = state
        self._start = IterationStart(state) if elastic else None
        self._failed: Snapshot | None = None  # to which the state returns
        self._values: list[float] = []  # of evaluations since the last step that counts
        self._early = 0  # evaluations before the block
        self._continuing = False  # in a generation that began after the block

    @property
    def after_block(self) -> bool:
        """Whether the script runs the code after a step's block."""
        return self.step is not None and self.step.began and not self.step.open

    def begin(self, step: Step) -> Step:
        """Begin with a step; return the object that the script has, if it waits for its block."""
        if self.step is not None:
            values = self.step.values
            vars(self.step).update(vars(step))
            self.step.values = values
            return self.step
        self.step, self._early = step, 0
        if self._start is not None:
            self._start.begin()
        return step

    def enter(self) -> None:
        """Note that the block begins."""
        if self._start is not None:
            self._start.enter()

    def restore(self) -> None:
        """Give the script's objects the state of the run, unless the script is within an iteration.

        Raises:
            UserError: it has other objects than are registered.
        """
        if self.step is None:
            self.script.restore()

    def count(self) -> None:
        """The step counts from now on."""
        self._values.clear()

    def keep(self) -> None:
        """Keep the state, after a failure in the block, until the end of the iteration.

        Raises:
            UserError: the state at the start of the iteration is lost, with the exit code of a
                crash.
        """
        if self._start is None or self.step is None:
            return
        if self._state.progress.step > self.step.index:  # local SGD, in its average
            self._failed = kept(self._state)
        elif self._start.copy is not None:
            self._failed = self._start.copy
        elif self._start.changed():
            raise crash(
                _START_LOST.format(
                    "the script has changed the model before the step's block, which it had not "
                    "done in its first steps"
                )
            )
        else:
            self._failed = kept(self._state)

    def abandon(self) -> None:
        """Let the rest of the iteration run without effect: the state is an earlier one.

        Raises:
            UserError: the block has not begun, with the exit code of a crash.
        """
        if self.step is None:
            return
        if not self.step.began:
            raise crash(
                _START_LOST.format(
                    "the script was in an evaluation before the step's block, and the ranks' "
                    "states had diverged (exchange.sync_every)"
                )
            )
        self.step.abandon()
        self._failed = kept(self._state)

    def end(self) -> None:
        """End the iteration: capture the state, or return to that of the failure in the block.

        Raises:
            UserError: an object of the script cannot be saved, or the model's structure is another.
        """
        step, self.step = self.step, None
        self.check_structure()
        failed, self._failed = self._failed, None
        if failed is not None:
            failed.restore()
            self.script.restore()
        elif step is not None and step.done:
            self.script.keep()
            if self._state.progress.record is not None:
                self._state.progress.record.update(step.values)

    def check_structure(self) -> None:
        """Raise UserError if the model has other layers or buffers than at the loop's start."""
        if self.script.structure is not None:
            self.script.structure.check()

    # --- evaluations ----------------------------------------------------------

    def evaluate(self, compute: Compute, topology: Topology) -> float:
        """Return the mean of all ranks' (sum, weight); all ranks call it.

        Raises:
            RankLostError: another rank is gone.
        """
        assert self.step is not None
        if not self._continuing:
            pairs = compute(topology.rank, topology.world_size, True)
            self._values.append(_mean(gather_json(pairs, "evaluate")))
            self._early += not self.step.began
            return self._values[-1]
        number = len(self._values)
        while len(self._values) == number:
            self._take_turn(number, compute, topology.rank)
        return self._values[number]

    def require_unchanged(self) -> None:
        """Require that the script has done nothing else yet, if its block has not begun.

        Raises:
            UserError: it has, with the exit code of a crash.
        """
        before = self.step is not None and not self.step.began
        if before and self._start is not None and (self._early or self._start.changed()):
            raise crash(
                _START_LOST.format(
                    "the script has changed the model, or evaluated, and then called "
                    "training.evaluate before the step's block: evaluate after the block"
                )
            )

    def finish(self) -> Generator[Step, None, None]:
        """Yield the step once, for the rest of its iteration, if this rank runs it."""
        if not self.after_block:
            return
        assert self.step is not None
        self._continuing = True
        try:
            yield self.step
        finally:
            self._continuing = False
        self.end()

    def wait_for_others(self) -> None:
        """Return when all ranks are between two iterations, or before their block.

        Raises:
            RankLostError: another rank is gone.
        """
        while self._take_turn(None, None, 0):
            pass

    def _take_turn(self, number: int | None, compute: Compute | None, rank: int) -> bool:
        """Repeat the evaluation of the ranks that are furthest behind; every rank calls it.

        Args:
            number: this rank waits for the value of this evaluation of the iteration.
            compute: see `evaluate`.

        Returns:
            False, on all ranks: no rank waits for a value.
        """
        ranks = gather_json([self._state.progress.step, number, self._values], "evaluations")
        newest = max(step for step, _, _ in ranks)
        waiting = [its for _, its, _ in ranks if its is not None]
        if not waiting:
            return False
        first = min(waiting)
        # It may have reached some ranks before the failure.
        found = [known[first] for step, _, known in ranks if step == newest and len(known) > first]
        if not found:
            sharing = [other for other, (_, its, _) in enumerate(ranks) if its == first]
            pairs: Pairs = []
            if number == first and compute is not None:
                pairs = compute(sharing.index(rank), len(sharing), len(sharing) == len(ranks))
            found = [_mean(gather_json(pairs, "evaluate"))]
        if number == first:
            self._values.append(found[0])
        return True


def _mean(ranks: Sequence[Pairs]) -> float:
    pairs = [pair for theirs in ranks for pair in theirs]
    weights = math.fsum(pair[1] for pair in pairs)
    return math.fsum(pair[0] for pair in pairs) / weights if weights else math.nan
