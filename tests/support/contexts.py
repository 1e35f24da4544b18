"""Contexts of ranks for tests of the engine's parts."""

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
    """Return a context in which each rank holds the whole model on its CPU; time starts now."""
    timer = PhaseTimer(time.perf_counter())
    return RankContext(Mesh.replicated(topology), CPU, Heartbeat(), timer, PeakMemory(CPU, timer))
