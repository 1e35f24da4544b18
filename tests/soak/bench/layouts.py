"""Losses of a model that spans ranks, on many layouts, compared with one rank."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hvdtrain.bench.processes import MARK, attempt, choose_hosts, launch, on_threads
from hvdtrain.errors import UserError
from hvdtrain.launch.hostfile import Host, as_text, parse_hosts
from hvdtrain.parallel.config import AXES
from hvdtrain.runtime.mesh import key_of_degree
from tests.soak.bench.layouts_report import Curve, LayoutsReport, Row

_DATA, _LAYERS = "data", "layers"
# Each entry names degrees of axes, other keys of `parallel`, and the model's layers if there are
# more stages than in TINY; entries of one size share a start.
LAYOUTS: Sequence[str] = (
    "data 2",
    "data 2 x zero 1",
    "tensor 2",
    "shard 2",
    "context 2",
    "pipeline 2",
    "pipeline 2 x schedule gpipe",
    "pipeline 2 x schedule interleaved1f1b",
    "pipeline 2 x schedule zero-bubble",
    "data 4",
    "data 4 x zero 1",
    "tensor 4",
    "shard 4",
    "context 4",
    "pipeline 4",
    "pipeline 4 x schedule gpipe",
    "pipeline 4 x schedule interleaved1f1b x layers 8",
    "pipeline 4 x schedule zero-bubble x layers 8",
    "data 2 x tensor 2",
    "data 2 x shard 2",
    "data 2 x context 2",
    "data 2 x pipeline 2",
    "shard 2 x tensor 2",
    "context 2 x tensor 2",
    "pipeline 2 x tensor 2",
    "shard 2 x context 2",
    "pipeline 2 x context 2",
    "pipeline 2 x shard 2",
    "data 2 x pipeline 2 x tensor 2",
    "data 2 x shard 2 x tensor 2",
    "pipeline 2 x context 2 x tensor 2",
    "pipeline 2 x shard 2 x tensor 2",
    "shard 2 x context 2 x tensor 2",
    "data 2 x pipeline 2 x context 2 x tensor 2",
    "pipeline 2 x shard 2 x context 2 x tensor 2",
)
# All axes divide these sizes by 4, and a step takes milliseconds; split, some hundreds.
TINY = (
    *("--model.layers=4", "--model.width=32", "--model.heads=4", "--model.context=32"),
    *("--model.mlp=swiglu", "--model.norm=rms", "--batch.global_size=4", "--batch.micro_size=1"),
    *("--optim.lr=1e-3", "--eval.every=10", "--eval.batches=1"),
)
AIM = 1e-5  # of a loss
_BITWISE = 0.0  # the aim where an optimizer is held in parts
_QUIET = ("--checkpoint.every=0", "--telemetry.port=0")


@dataclass(frozen=True)
class Where:
    """Available ranks.

    Args:
        most: maximum number of ranks of a layout; larger layouts are omitted.
        hosts: "name:slots,name:slots"; None: this host.
        launcher: gloo (horovodrun) or mpi (mpirun).
    """

    most: int
    hosts: str | None
    launcher: str


def keys_of(layout: str) -> dict[str, str]:
    """Return the degrees of axes and other keys of a layout.

    Raises:
        UserError: the layout is not in this form.
    """
    pairs = [part.split() for part in layout.split(" x ")]
    if any(len(pair) != 2 for pair in pairs):
        raise UserError(f"--layout {layout}: write it as 'data 2 x tensor 2'")
    return {pair[0]: pair[1] for pair in pairs}


def ranks_of(layout: str) -> int:
    """Return the number of ranks of a layout."""
    keys = keys_of(layout)
    degrees = [keys.get(axis, "1") for axis in (_DATA, *AXES)]
    if not all(degree.isdecimal() for degree in degrees):
        raise UserError(f"--layout {layout}: the degree of an axis is a number")
    return prod(map(int, degrees))


def layouts(
    flags: Sequence[str], steps: int, where: Where, chosen: Sequence[str] = LAYOUTS
) -> LayoutsReport:
    """Train on each layout; a failure is reported like a missed limit.

    Args:
        flags: flags of all runs, whose files are in the temporary directory.
        chosen: layouts as in LAYOUTS.

    Raises:
        UserError: the hosts have too few slots, or the flags are wrong.
    """
    by_ranks: dict[int, list[str]] = {}
    for layout in chosen:
        by_ranks.setdefault(ranks_of(layout), []).append(layout)
    if where.hosts:
        choose_hosts(where.hosts, max(n for n in (1, *by_ranks) if n <= where.most))
    flags = [*flags, f"--train.duration={steps + 1}", *_QUIET]  # so that a run never ends
    depths = {_depth(layout): f"{_DATA} 1{_depth(layout)}" for layout in chosen}
    alone = dict(_curves([*depths.values()], 1, flags, steps, where))
    for failed in (curve for curve in alone.values() if isinstance(curve, str)):
        raise UserError(f"one rank alone failed: {failed}")
    rows = []
    for ranks, group in sorted(by_ranks.items()):
        if ranks <= where.most:
            found = dict(_curves(group, ranks, flags, steps, where))
            wanted = alone | found
            rows += [Row(name, ranks, found[name], *_wanted(name, wanted)) for name in group]
    return LayoutsReport(rows, {"steps": steps, "hosts": where.hosts or "this one"})


def _wanted(layout: str, curves: Mapping[str, Curve | str]) -> tuple[Curve | None, float]:
    """Return (reference of a layout's curve, allowed difference)."""
    zero = "zero" in keys_of(layout)
    wanted = curves.get(f"{_DATA} {ranks_of(layout) if zero else 1}{_depth(layout)}")
    return wanted if isinstance(wanted, Curve) else None, _BITWISE if zero else AIM


def _depth(layout: str) -> str:
    """Return the model's number of layers in a layout."""
    layers = keys_of(layout).get(_LAYERS)
    return f" x {_LAYERS} {layers}" if layers else ""


def _curves(
    group: Sequence[str], ranks: int, flags: Sequence[str], steps: int, where: Where
) -> Iterator[tuple[str, Curve | str]]:
    """Yield each layout's curve, or the reason for its failure, after which ranks are restarted."""
    left = list(group)
    while left:
        of_layouts = [json.dumps([*flags, *_flags_of(layout)]) for layout in left]
        program = [sys.executable, "-m", "tests.soak.bench.layout_ranks", str(steps)]
        worker = on_threads(1, [*program, *of_layouts])
        hosts = _spread(where.hosts, ranks) if where.hosts else None
        command = launch(where.launcher, ranks, worker, hosts) if ranks > 1 else worker
        code, lines = attempt(command)
        told = [line[line.index(MARK) :] for line in lines if MARK in line]
        for line in told:
            yield left.pop(0), Curve(**json.loads(line)["measured"])
        if left:
            yield left.pop(0), _reason(lines) or f"the ranks ended with {code}"


def _spread(hosts: str, ranks: int) -> str:
    """Spread slots over the hosts in turns."""
    slots = [
        (turn, number) for number, h in enumerate(parse_hosts(hosts)) for turn in range(h.slots)
    ]
    chosen = [number for _, number in sorted(slots)[:ranks]]
    counts = [Host(h.name, chosen.count(number)) for number, h in enumerate(parse_hosts(hosts))]
    return as_text(host for host in counts if host.slots)


def _flags_of(layout: str) -> list[str]:
    keys = {key: value for key, value in keys_of(layout).items() if key != _DATA}
    names = {_LAYERS: f"model.{_LAYERS}", "zero": "parallel.shard.stage"}
    return [f"--{names.get(key) or key_of_degree(key)}={value}" for key, value in keys.items()]


def _reason(lines: Sequence[str]) -> str:
    """Return the first error that a rank has reported; "" if there is none."""
    errors = [found[0] for line in lines if (found := re.search(r"\b[A-Z]\w*Error: .*", line))]
    return errors[0] if errors else ""
