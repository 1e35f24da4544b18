"""Activation checkpointing, offloading and compilation of a model's blocks, in place.

Parameter names in checkpoints do not change.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hvdtrain.engine.config import MemoryConfig
from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.heartbeat import Activity, Heartbeat
from hvdtrain.runtime.phases import PhaseTimer
from hvdtrain.tasks import blocks_of

_ATEN = torch.ops.aten
# Results that `selective` keeps: recomputing them takes longer than recomputing others. Attention
# operators are private. If torch renames one, this import fails; if torch's attention calls another
# one, backward recomputes it, bitwise identically. tests/single/test_torch_private.py detects it.
_KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}


def arrange_activations(
    config: MemoryConfig, task: Any, model: nn.Module, device: torch.device
) -> None:
    """Modify the blocks' forward passes to keep activations as the `memory` keys specify.

    Gradients are bitwise identical: recomputation draws the same random numbers, in the same
    precision. Source: Chen et al., "Training deep nets with sublinear memory cost",
    arXiv:1604.06174.

    Raises:
        UserError: the model has no blocks, or there is no device to offload from.
    """
    if config.checkpoint_activations == "none" and not config.offload_activations:
        return
    if config.offload_activations and device.type != "cuda":
        raise UserError(
            f"memory.offload_activations: this rank computes on {device.type}, whose activations "
            "are already in host memory"
        )
    blocks = blocks_of(task, model)
    if not blocks:
        raise UserError(
            "memory.checkpoint_activations and memory.offload_activations are for blocks, and the "
            "model has no blocks (no nn.ModuleList, and the task no blocks(model) that names them)"
        )
    for number, block in enumerate(blocks):
        again = config.every > 0 and number % config.every == 0
        block.forward = _arranged(config, block.forward, again)


def _arranged(config: MemoryConfig, forward: Callable[..., Any], again: bool) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if config.checkpoint_activations == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def arranged(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with save_on_cpu(pin_memory=True) if config.offload_activations else nullcontext():
            if again:
                return checkpoint(forward, *args, **options, **kwargs)
            return forward(*args, **kwargs)

    return arranged


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(
    enabled: bool, task: Any, model: nn.Module, timer: PhaseTimer
) -> CompileClock | None:
    """Compile each block in its first pass, or the whole model if it has no blocks.

    Regional compilation: identical blocks are compiled once, in a fraction of the time that the
    whole model would take.
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html

    Returns:
        None if compile is false: torch's compiler is then not even imported.

    Raises:
        UserError: nothing can be compiled on this host.
    """
    if not enabled:
        return None
    check_compiler(next(model.parameters()).device)
    clock = CompileClock(timer, heartbeat.HEARTBEAT)
    for block in blocks_of(task, model) or [model]:
        block.compile()
    return clock


class CompileClock:
    """Measure each compilation in this process, which happens inside a pass.

    Its time counts as "other", so that a rank that compiles does not count as slow, and the
    watchdog receives a heartbeat at its start and its end.

    Attributes:
        seconds: seconds of all compilations so far.
    """

    def __init__(self, timer: PhaseTimer, beats: Heartbeat) -> None:
        # Private, without a public equivalent. If torch removes it, compile fails; if it no
        # longer calls back, a compiling rank counts as slow. tests/single/test_torch_private.py
        # detects it.
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


def check_compiler(device: torch.device) -> None:
    """Compile one line.

    Raises:
        UserError: it fails.
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
            f"compile: torch.compile does not work on this host ({problem}); it needs {needed}: "
            "install them, or set compile false"
        )
