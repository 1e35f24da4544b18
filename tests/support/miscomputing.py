"""A task of which some processes compute wrong gradients, and ranks that pretend to be on hosts.

HVDTRAIN_TEST_HOSTS=a,b,c names the host of each rank that this machine's launcher starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.runtime.environment import launched_rank
from tests.support.tasks import Regression

# An elastic run removes it from the environment before the task is made.
NUMBER = launched_rank() or 0

if hosts := os.environ.get("HVDTRAIN_TEST_HOSTS"):
    own_host = hosts.split(",")[NUMBER]
    socket.gethostname = lambda: own_host


class Miscomputing(Regression):
    """Flip a bit of a gradient on one process or host, in one step.

    HVDTRAIN_TEST_WRONG=process:step:passes, where the process is a number or a host, and steps are
    counted from 1. `passes` are the backward passes
    of that step in which the bit flips, from 0: with one micro-batch per rank the first is the
    replay of another rank's micro-batch, the second is the rank's own, and the others decide. all:
    in all passes of this step and of the next ones.

    The model has BatchNorm and dropout.
    """

    def __init__(self) -> None:
        process, step, passes = os.environ.get("HVDTRAIN_TEST_WRONG", "-1:0:all").split(":")
        here = process in (str(NUMBER), socket.gethostname())
        self._from = int(step) if here else 1 << 30
        self._passes = None if passes == "all" else {*map(int, passes.split(","))}
        self._step = self._pass = 0

    def model(self) -> nn.Module:
        layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)
        model = nn.Sequential(*layers)
        layers[-1].weight.register_hook(self._flip)
        return model

    def callbacks(self) -> list[Any]:
        return [self]

    def on_step(self, record: Mapping[str, Any]) -> dict[str, float]:
        self._step, self._pass = record["step"], 0
        return {}

    def _flip(self, gradient: Tensor) -> Tensor | None:
        here, self._pass = self._pass, self._pass + 1
        number = self._step + 1
        chosen = number >= self._from if self._passes is None else number == self._from
        if not chosen or not (self._passes is None or here in self._passes):
            return None
        wrong = gradient.clone()
        bits = wrong.view(-1).view(torch.int16 if wrong.element_size() == 2 else torch.int32)
        bits[3] ^= 1 << (14 if wrong.element_size() == 2 else 24)
        return wrong
