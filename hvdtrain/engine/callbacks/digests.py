"""What a rank of `hvdtrain check` records: digests of its state after each step, and of samples."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.data.loader import Place
from hvdtrain.engine.loop import Callback, Loop, StepRecord
from hvdtrain.engine.script_state import ScriptState
from hvdtrain.engine.state import ModelState, OptimizerState, RunState
from hvdtrain.log import logger
from hvdtrain.run_files.digests import DigestFiles
from hvdtrain.runtime.content import content_of, digest_of
from hvdtrain.runtime.context import RankContext
from hvdtrain.runtime.plain_values import decode, json_of
from hvdtrain.runtime.wrappers import plain_name

_JOIN_SECONDS = 90.0
_TICK_SECONDS = 0.02
_MOST_ITEMS = 1 << 12  # of a variable of the script
# Values of a record that describe how a step was computed, not its results.
_CIRCUMSTANCES = {"step", "world_size", "time", "generation", "claim", "healed", "mfu"}
_TIMES = ("_seconds", "_per_second")


class RecordDigests(Callback):
    """Record the state of this rank when a generation begins and after each step.

    In a run with a planned failure rank 0 then kills itself, and the other ranks wait for its
    successor.

    Args:
        hosts_changed: whether this rank was notified that processes join or leave.
    """

    def __init__(
        self,
        files: DigestFiles,
        state: RunState,
        context: RankContext,
        hosts_changed: Callable[[], bool],
    ) -> None:
        self._files, self._state, self._hosts_changed = files, state, hosts_changed
        self._topology, self._heartbeat = context.mesh.topology, context.heartbeat
        self._script = next((part for part in state.parts if isinstance(part, ScriptState)), None)
        self._write(state.progress.step, starts=True)

    def on_step(self, loop: Loop, record: StepRecord) -> None:
        step = loop.progress.step
        values = {
            name: value
            for name, value in record.items()
            if name not in _CIRCUMSTANCES
            and not name.endswith(_TIMES)
            and isinstance(value, int | float)
        }
        self._write(step, values=values, exact=sorted({"loss", "grad_norm", *loop.result}))
        size = self._topology.world_size
        if size > 1 and self._topology.rank == 0 and self._files.claim_kill(step):
            os.kill(os.getpid(), signal.SIGKILL)
        if size < self._files.ranks_to_wait_for:
            self._wait_for_ranks()

    def _write(self, step: int, starts: bool = False, **more: Any) -> None:
        self._files.append(
            "state",
            {
                "step": step,
                "starts": starts,
                "rank": self._topology.rank,
                "size": self._topology.world_size,
                "digests": dict(self._digests()),
                "objects": dict(self._objects()),
                "unsaved": dict(self._unsaved()),
                **more,
            },
        )

    def _digests(self) -> Iterator[tuple[str, str]]:
        """Digests of what all ranks hold, by the words of a script for it."""
        for part in self._state.of_scope("replicated"):
            if isinstance(part, ModelState):
                yield from _named("parameter", part.compared())
                yield from _named("buffer", part.buffers())
            elif isinstance(part, OptimizerState):
                yield from _named("optimizer state", part.compared())
            elif not isinstance(part, ScriptState):
                yield from _named(part.name, part.compared())

    def _objects(self) -> Iterator[tuple[str, list[Any]]]:
        """Contents of what the script has registered, and of the optimizer's options."""
        for name, tensors in self._script.by_name().items() if self._script else ():
            yield name, [*content_of(decode(json_of(tensors), tensors))]

    def _unsaved(self) -> Iterator[tuple[str, str]]:
        """Digests of what is not part of the run's state: evidence for the cause of a difference.

        Of a script these are its variables, and attributes of its model and optimizer.
        """
        if self._script is None:
            return
        model, optimizer = self._state.model, self._state.optimizer
        saved = {plain_name(name) for name in model.state_dict()}
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                path = plain_name(f"{prefix}.{name}".lstrip("."))
                if path not in saved:
                    yield f"buffer {path} (persistent=False)", digest_of(buffer)
            where = f"of the module {plain_name(prefix) or type(module).__name__}"
            yield from _attributes(vars(module), where)
        yield from _attributes(vars(optimizer), f"of {type(optimizer).__name__}")
        own = {id(value) for value in (optimizer, *model.modules(), *model.parameters())}
        for name, value in _variables().items():
            held = value if isinstance(value, list | tuple) else (value,)
            if not any(id(one) in own for one in held) and _may_be_state(value):
                yield from _digest(f"variable {name}", value)

    def _wait_for_ranks(self) -> None:
        """Wait until another process wants to join: the next step then ends the generation."""
        deadline = time.monotonic() + _JOIN_SECONDS
        with self._heartbeat.waiting():
            while not self._hosts_changed():
                if time.monotonic() > deadline:
                    logger.warning("no rank has joined within %.0f s", _JOIN_SECONDS)
                    self._files.stop_waiting()
                    return
                time.sleep(_TICK_SECONDS)


class RecordSamples:
    """Records the samples of each micro-batch, in the process that loads it."""

    def __init__(self, files: DigestFiles) -> None:
        self._files = files

    def __call__(self, place: Place, samples: Sequence[Any]) -> None:
        pairs = zip(place.samples, samples, strict=True)
        digests = [[number, content_of(sample).digest] for number, sample in pairs]
        line = {"step": place.step, "number": place.number, "samples": digests}
        self._files.append("samples", line)


def _named(kind: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    for name, tensor in tensors.items():
        yield f"{kind} {name}", digest_of(tensor)


def _attributes(attributes: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for name, value in attributes.items():
        private = name.startswith("_") or name in ("training", "defaults", "state", "param_groups")
        if not private and _may_be_state(value):
            yield from _digest(f"attribute {name} {where}", value)


def _digest(name: str, value: Any) -> Iterator[tuple[str, str]]:
    try:
        yield name, content_of(value, _MOST_ITEMS).digest
    except Exception:
        return  # TooLargeError, or anything that the script's own objects raise


def _may_be_state(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    return not (isinstance(value, ModuleType | type) or module == "hvdtrain" or _is_function(value))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module | Optimizer)


def _variables() -> dict[str, Any]:
    """Variables of the function or file that has the script's loop."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("hvdtrain."):
        frame = frame.f_back
    if frame is None:
        return {}
    found = {**frame.f_globals, **frame.f_locals}
    return {name: value for name, value in found.items() if not name.startswith("_")}
