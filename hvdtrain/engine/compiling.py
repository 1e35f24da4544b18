"""torch.compile of a model's blocks, in place: names in checkpoints stay what they are.

Regional compilation: blocks of one kind are compiled once, in a fraction of the time that the
whole model would take.
https://docs.pytorch.org/tutorials/recipes/regional_compilation.html
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import torch
from torch import nn

from hvdtrain.engine.config import CompileConfig
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.tasks.blocks import blocks_of


class CompileClock:
    """Hears of each compilation of this process, which happens inside of a pass.

    Its time counts as "other", so that a rank that compiles is not taken for a slow one, and the
    watchdog hears of its begin and its end.

    Attributes:
        seconds: of all so far.
    """

    def __init__(self, timer: PhaseTimer, beats: Heartbeat) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds = 0.0
        self._timer, self._heartbeat = timer, beats
        self._began, self._phase = 0.0, "other"
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def _begin(self, _: object) -> None:
        self._began, self._phase = time.perf_counter(), self._timer.phase
        self._timer.enter("other")
        self._heartbeat.beat(Activity.WORKING)

    def _end(self, _: object) -> None:
        self.seconds += time.perf_counter() - self._began
        logger.info("compiled a block of the model: %.1f s so far", self.seconds)
        self._timer.enter(self._phase)
        self._heartbeat.beat(Activity.WORKING)


def compile_blocks(
    config: CompileConfig, task: Any, model: nn.Module, timer: PhaseTimer
) -> CompileClock | None:
    """Each block is compiled in its first pass; where there are none, the whole model is.

    Returns:
        None where compile.enabled is false: torch's compiler is not even imported then.

    Raises:
        UserError: nothing can be compiled on this host.
    """
    if not config.enabled:
        return None
    check_compiler(next(model.parameters()).device)
    clock = CompileClock(timer, heartbeat.OWN)
    for block in blocks_of(task, model) or [model]:
        block.compile()
    return clock


def check_compiler(device: torch.device) -> None:
    """Compiles one line.

    Raises:
        UserError: that fails.
    """
    needed = "g++ and Python's headers" if device.type == "cpu" else "a C compiler and Triton"
    compiler = os.environ.get("CXX", "g++")
    problem = ""
    if device.type == "cpu" and shutil.which(compiler) is None:
        problem = f"no {compiler} on PATH"
    else:
        try:
            torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
        except Exception as error:
            logger.debug("torch.compile", exc_info=error)
            problem = next(iter(str(error).splitlines()), type(error).__name__)
    if problem:
        raise UserError(
            f"compile.enabled: torch.compile does not work on this host ({problem}); it needs "
            f"{needed}: install them, or do without it"
        )
