"""Context of a process in a generation, used by every part of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.phases import PhaseTimer


@dataclass(frozen=True)
class RankContext:
    """This process's position among the ranks of one generation, and its reporting objects.

    Args:
        mesh: groups of ranks that exchange with each other.
        device: holds this rank's shard of the model.
        heartbeat: reports progress to the watchdog.
        timer: counts the seconds of each phase.
        memory: records the peak memory of each phase.
        claim: claim of the generation, as in its start event in RUN/events.jsonl.
    """

    mesh: Mesh
    device: torch.device
    heartbeat: Heartbeat
    timer: PhaseTimer
    memory: PeakMemory
    claim: str = ""
