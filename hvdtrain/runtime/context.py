"""What every part of a step needs to know of the process that it runs in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.peak_memory import PeakMemory
from hvdtrain.runtime.phases import PhaseTimer


@dataclass(frozen=True)
class RankContext:
    """This process among the ranks of one generation, and where it reports what it does.

    Args:
        mesh: who exchanges with whom.
        device: where this rank's part of the model is.
        heartbeat: tells the watchdog that this rank makes progress.
        timer: counts the seconds of each phase.
        memory: knows what each phase takes of it.
        claim: of the generation, as in its start event in RUN/events.jsonl.
    """

    mesh: Mesh
    device: torch.device
    heartbeat: Heartbeat
    timer: PhaseTimer
    memory: PeakMemory
    claim: str = ""
