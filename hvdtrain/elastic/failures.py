"""What is to be done when steps fail again and again, counted over all processes of a job.

A process that dies says what for, if it can; those that are left say when they ask for their
next ranks in which phase their generation failed. Three things can be the cause:

    an error that a process raises itself       the step's data or code: others will raise it, too
    a generation with newcomers that fails before    the newcomers, or the way to them
    its first step, and nobody died
    anything else, step after step              the network, or the machines
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hvdtrain.elastic.identity import Identity

_ERRORS_OF_A_STEP = 3
_FAILURES_OF_A_STEP = 5
RENDEZVOUS, HAND_OVER, TRAINING = "meeting", "hand-over", "training"


@dataclass(frozen=True)
class ProcessStatus:
    """Where a process stands when it asks for its next ranks.

    Args:
        identity: what it would train.
        trained: it holds the state of the run; a new process does not.
        step: optimizer steps done.
        patience: seconds for which the others may have to wait for its watchdog's verdict.
        failed: the phase in which its last generation failed, or None.
        message: why that failed.
        replica_size: ranks that hold one model together.
        part: the part of the model that it holds, of 0 to replica_size - 1; None: none.
        reaches: the step as of which it can have it, should another process have done that one.
    """

    identity: Identity
    trained: bool = False
    step: int = 0
    patience: float = 0.0
    failed: str | None = None
    message: str = ""
    replica_size: int = 1
    part: int | None = None
    reaches: int = 0

    @classmethod
    def of(cls, fields: dict[str, Any]) -> ProcessStatus:
        """From what dataclasses.asdict made of one."""
        return cls(**fields | {"identity": Identity(**fields["identity"])})


class Failures:
    """Counts what goes wrong at each step."""

    def __init__(self) -> None:
        self._errors: Counter[int] = Counter()
        self._step, self._times = -1, 0

    def error(self, step: int, message: str) -> str | None:
        """A process raised an error of its own in this step; why the job has to end, or None."""
        self._errors[step] += 1
        times = self._errors[step]
        if times < _ERRORS_OF_A_STEP:
            return None
        return f"step {step} failed in {times} processes by an error of their own: {message}"

    def generation(self, step: int, message: str) -> str | None:
        """A generation failed when its most advanced rank had done so many steps; as `error`."""
        self._times = self._times + 1 if step == self._step else 1
        self._step = step
        if self._times < _FAILURES_OF_A_STEP:
            return None
        return f"step {step + 1} failed {self._times} times: {message}"
