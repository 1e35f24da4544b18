"""One measured process of `hvdtrain plan --measure`: `python -m hvdtrain.plan.worker --key value`.

It prints one JSON line, the JobProfile; see measure.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain import comm
from hvdtrain.bench.app import AppLoop
from hvdtrain.bench.processes import MARK
from hvdtrain.config import Settings, parse
from hvdtrain.data.loader import to_device
from hvdtrain.errors import UserError
from hvdtrain.exchange.config import STRATEGIES
from hvdtrain.exchange.wire import WIRES
from hvdtrain.plan.described import Kept, forward
from hvdtrain.plan.job import JobProfile, StrategyCost, buckets_of, require_micro_size
from hvdtrain.process.data import build_data
from hvdtrain.runtime import environment
from hvdtrain.runtime.init import initialize
from hvdtrain.runtime.mesh import Topology
from hvdtrain.tasks import Datasets, Task, first_batch

_WARM_UP_STEPS = 3
_BLOCKS = 5  # of steps; results are their medians
_BUDGET_S = 6.0  # for the blocks of one strategy
_STEPS = 1_000_000  # length of the run, which never reaches its end
_PASSES = 5  # passes measured gradient by gradient


def main(flags: Sequence[str]) -> int:
    try:
        environment.prepare()
        job = measured(flags, initialize())
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(MARK + json.dumps(asdict(job)) + "}", flush=True)
    return 0


def measured(flags: Sequence[str], topology: Topology) -> JobProfile:
    """Measure a job in this process alone, with one micro-batch per step.

    Raises:
        UserError: micro-batches have no fixed size, or the model spans ranks.
    """
    settings = parse(flags)
    batch, parallel = settings.config.batch, settings.config.parallel
    require_micro_size(batch)
    if parallel.any:
        raise UserError("hvdtrain plan measures the whole model on one rank: omit parallel.*")
    data = build_data(settings)
    one = [
        *flags,
        f"--batch.global_size={batch.micro_samples}",
        f"--train.duration={_STEPS}",
    ]
    keys = {name: STRATEGIES[name] for name in ("dense", "powersgd", "topk")}
    phases, looked = {}, None
    for name, own in keys.items():
        more = [f"--exchange.{key}={value}" for key, value in own.items()]
        with tempfile.TemporaryDirectory() as directory:
            given = parse([*one, "--exchange.start_step=0", *more])
            app = AppLoop(given, Path(directory), data, topology)
            phases[name] = _phases(app)
            looked = looked or _look(app, settings, data)
            app.close()
    assert looked is not None
    dense = phases["dense"]
    costs = {"dense": StrategyCost(), **looked.wires}
    for name in ("powersgd", "topk"):
        own_seconds = phases[name]
        before, after = (
            sum(own_seconds[phase] - dense[phase] for phase in phases_of)
            for phases_of in (("forward", "backward"), ("comm_exposed", "other"))
        )
        costs[name] = StrategyCost(max(0.0, before), max(0.0, after))
    return JobProfile(
        forward_seconds=dense["data"] + dense["forward"],
        backward_seconds=dense["backward"],
        optimizer_seconds=dense["optimizer"],
        other_seconds=dense["other"] + dense["comm_exposed"],
        micro_batches=batch.micro_batches,
        micro_size=batch.micro_samples,
        buckets=buckets_of(looked.parameters, looked.ready),
        costs=costs,
        element_bytes=looked.parameters[0].element_size(),
        optimizer_bytes=looked.optimizer_bytes,
        activation_bytes=looked.kept.activation_bytes,
        blocks=looked.kept.blocks,
        block_bytes=looked.kept.block_bytes,
        outside_bytes=looked.kept.outside_bytes,
    )


def _phases(app: AppLoop) -> dict[str, float]:
    """Seconds per step of each phase: medians over blocks of steps."""
    began = time.perf_counter()
    app.run(_WARM_UP_STEPS)
    step = (time.perf_counter() - began) / _WARM_UP_STEPS
    steps = max(2, min(200, int(_BUDGET_S / _BLOCKS / step)))
    blocks = []
    for _ in range(_BLOCKS):
        before = app.timer.seconds()
        app.run(steps)
        after = app.timer.seconds()
        blocks.append({name: (after[name] - before[name]) / steps for name in after})
    return {name: median(block[name] for block in blocks) for name in blocks[0]}


@dataclass
class _SinglePasses:
    """Measurements of a model in single passes; see JobProfile.

    Args:
        parameters: trained parameters, in the model's order.
        ready: for each, the fraction of the backward pass after which its gradient is ready.
    """

    parameters: list[nn.Parameter]
    ready: Mapping[Tensor, float]
    wires: Mapping[str, StrategyCost]
    optimizer_bytes: float
    kept: Kept


def _look(app: AppLoop, settings: Settings, data: tuple[Task, Datasets]) -> _SinglePasses:
    task, datasets = data
    parameters = [p for p in app.model.parameters() if p.requires_grad]
    batch = first_batch(task, datasets.train, settings.config.batch.micro_samples)
    on_device = to_device(batch, parameters[0].device)
    seen: dict[Tensor, list[float]] = {p: [] for p in parameters}
    hooks = [p.register_post_accumulate_grad_hook(_stamp(seen)) for p in parameters]
    for number in range(_PASSES):
        for batches in comm.COLLECTIVES.micro_batches(iter([on_device]), in_common=0):
            with app.precision.autocast(parameters[0].device):
                loss, kept = forward(task, app.model, batches)
            begin = _now(parameters[0])
            loss.backward()
            whole = _now(parameters[0]) - begin
            for p in parameters:
                stamps = seen[p]
                late = stamps[number] - begin if len(stamps) > number else whole
                seen[p] = [*stamps[:number], late / whole]
    for hook in hooks:
        hook.remove()
    for p in parameters:
        p.grad = None
    return _SinglePasses(
        parameters,
        {p: min(1.0, median(fractions)) for p, fractions in seen.items()},
        {name: _wire_cost(name, parameters) for name in ("float16", "bfloat16")},
        _optimizer_bytes(app.optimizer),
        kept,
    )


def _optimizer_bytes(optimizer: Optimizer) -> float:
    states = (value for state in optimizer.state.values() for value in state.values())
    return float(sum(value.nbytes for value in states if isinstance(value, Tensor)))


def _now(parameter: Tensor) -> float:
    if parameter.device.type == "cuda":
        torch.cuda.synchronize(parameter.device)
    return time.perf_counter()


def _stamp(seen: dict[Tensor, list[float]]) -> Any:
    def hook(parameter: Tensor) -> None:
        seen[parameter].append(_now(parameter))

    return hook


def _wire_cost(name: str, parameters: Sequence[Tensor]) -> StrategyCost:
    wire: Any = WIRES[name]()
    gradients = [torch.full_like(p, 1e-4) for p in parameters]
    before, after = [], []
    for _ in range(_PASSES):
        start = _now(parameters[0])
        sent = [wire.compress(gradient) for gradient in gradients]
        middle = _now(parameters[0])
        for vector, context in sent:
            wire.decompress(vector, context)
        before.append(middle - start)
        after.append(_now(parameters[0]) - middle)
    return StrategyCost(median(before), median(after))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
