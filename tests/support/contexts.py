"""A process among ranks, as the engine's parts want to know it."""

from __future__ import annotations

import time

import torch

from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.heartbeat import Heartbeat
from hvdtrain.runtime.memory import PeakMemory
from hvdtrain.runtime.mesh import Mesh, Topology
from hvdtrain.runtime.phases import PhaseTimer

CPU = torch.device("cpu")


def replicated(topology: Topology) -> RankContext:
    """Each rank holds the whole model, on its CPU; time counts from now on."""
    timer = PhaseTimer(time.perf_counter())
    return RankContext(Mesh.replicated(topology), CPU, Heartbeat(), timer, PeakMemory(CPU, timer))
