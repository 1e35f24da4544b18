"""A plan in the terminal."""

from __future__ import annotations

from itertools import cycle

from rich.console import Console
from rich.table import Table

from hvdtrain.errors import UserError
from hvdtrain.exchange.base import BUCKET_BYTES
from hvdtrain.plan.result import Placed, PlanResult
from hvdtrain.plan.sources import MeasuredLink
from hvdtrain.report import charts, units
from hvdtrain.text import plural

_MOST_LAYOUTS = 12


def show(plan: PlanResult, console: Console) -> None:
    """Print tables, the recommendation, and what is unknown."""
    console.print(_scaling(plan))
    console.print(_layouts(plan))
    saving = plan.saving
    if saving is not None:
        console.print(
            f"Checkpoints every {saving.interval_seconds:.0f} s: --checkpoint.every "
            f"{saving.interval_steps}; goodput {saving.supervised:.1%} under `hvdtrain launch`, "
            f"{saving.elastic:.1%} elastic",
            highlight=False,
        )
    console.print(_recommended(plan), highlight=False, soft_wrap=True)
    console.print("Unknown:", highlight=False)
    for sentence in plan.unknown:
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)


def _scaling(plan: PlanResult) -> Table:
    table = Table(title="Scaling, with the whole model on each rank", title_justify="left")
    for name in ("hosts", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("exchange")
    for name in ("ms/step", "samples/s", "efficiency", "exposed ms", "sent"):
        table.add_column(name, justify="right")
    table.add_column("limit")
    for hosts, found in plan.scaling:
        table.add_row(
            str(hosts),
            str(found.ranks),
            found.strategy,
            f"{found.step_seconds * 1e3:.4g}",
            f"{found.samples_per_second:.4g}",
            f"{found.efficiency:.1%}",
            f"{found.exposed_seconds * 1e3:.3g}",
            units.size(found.sent_bytes),
            found.limit,
        )
    return table


def _layouts(plan: PlanResult) -> Table:
    shown = plan.placed[:_MOST_LAYOUTS]
    if plan.best is not None and plan.best not in shown:
        shown = [*shown, plan.best]
    title = f"Layouts on {plural(plan.cluster.ranks, 'rank')}, fastest first"
    table = Table(title=title, title_justify="left")
    table.add_column("flags", overflow="fold")
    for name in ("memory per rank", "fits", "ms/step", "price per 1M samples"):
        table.add_column(name, justify="right")
    for one in shown:
        fits = "?" if one.fits is None else "yes" if one.fits else "no"
        price = "?" if one.price is None else f"{one.price:.4g}"
        needed, step = units.size(one.memory_bytes), f"{one.step_seconds * 1e3:.4g}"
        table.add_row(one.layout.flags or "(defaults)", needed, fits, step, price)
    left = len(plan.placed) - len(shown)
    if left > 0:
        table.caption = f"and {left} slower layouts (--format json)"
    return table


def _recommended(plan: PlanResult) -> str:
    best = plan.best
    if best is None:
        least = min(plan.placed, key=lambda one: one.memory_bytes)
        return (
            f"No layout fits; the smallest requires {units.size(least.memory_bytes)} per rank "
            f"({least.layout.flags or 'defaults'}): more ranks, a smaller batch.micro_size, or "
            "--memory.checkpoint_activations blocks"
        )
    known = {"memory": best.fits, "price": best.price}
    unknown = [name for name, value in known.items() if value is None]
    head = "Recommended, " + " and ".join(unknown) + " unknown" if unknown else "Cheapest that fits"
    return f"{head}:\n  {command(plan, best)}"


def command(plan: PlanResult, placed: Placed) -> str:
    """Command with the flags of a layout, to be appended to a launcher command."""
    every = "" if plan.saving is None else f"--checkpoint.every {plan.saving.interval_steps}"
    words = ["python -m hvdtrain.train", placed.layout.flags, every]
    return " ".join(word for word in words if word)


# --- chart of the efficiency --------------------------------------------------


def efficiency(plan: PlanResult) -> charts.Chart:
    """Return a chart of the efficiency over the ranks: a line per exchange."""
    drawn = []
    for strategy, color in zip(plan.terms.strategies, cycle(charts.PALETTE), strict=False):
        found = [one for _, one in plan.scaling if one.strategy == strategy]
        points = {
            "x": [float(one.ranks) for one in found],
            "y": [100 * one.efficiency for one in found],
        }
        drawn.append(charts.series(strategy, points, color))
    note = "Relative to that number of single ranks"
    return charts.lines(
        "Efficiency", "%", drawn, x="ranks", log="x", zero=True, wide=True, note=note
    )


# --- settings of a cluster from its all-reduces ------------------------------


_HIERARCHICAL = ", hierarchical"
_OWN = "Horovod, "
_WORTH = 1.05  # minimum gain for which a setting is changed
_LAUNCHERS = {"Gloo": "horovodrun --gloo", "MPI": "mpirun", "NCCL": "horovodrun or mpirun, NCCL"}
_WIRES = ("float16", "bfloat16")


def tune(link: MeasuredLink, plan: PlanResult | None) -> str:
    """Return YAML for `--config`, with the gain of each setting.

    Args:
        link: the measured link.
        plan: plan of a job on this cluster, to choose the wire format; None: there is none.

    Raises:
        UserError: no side of the measurement is Horovod.
    """
    at = _size_of_buckets(link)
    seconds = {name: by[at] for name, by in link.sides.items() if name.startswith(_OWN)}
    if not seconds:
        raise UserError("--tune: `hvdtrain bench allreduce` did not measure Horovod")
    best = min(seconds, key=lambda name: seconds[name])
    library = best.removeprefix(_OWN).removesuffix(_HIERARCHICAL)
    flat, deep = _OWN + library, _OWN + library + _HIERARCHICAL
    lines = [
        f"# From `hvdtrain bench allreduce` with {link.ranks} ranks: an all-reduce of {at} bytes,",
        f"# about a bucket of gradients, requires {_list(seconds)}.",
        f"# Start it with {_LAUNCHERS.get(library, library)}.",
        "exchange:",
    ]
    if deep in seconds:
        gain = seconds[flat] / seconds[deep]
        on = gain > _WORTH
        lines.append(f"  hierarchical: {str(on).lower()}  # {gain:.2f} x as fast as without it")
    else:
        lines.append("  hierarchical: auto  # not measured: it requires several ranks on each host")
    lines.append(f"  wire: {_wire(plan)}")
    return "\n".join(lines) + "\n"


def _size_of_buckets(link: MeasuredLink) -> int:
    """The measured size closest to a bucket's size."""
    sizes = set.intersection(*(set(by_size) for by_size in link.sides.values()))
    return min(sizes, key=lambda size: abs(size - BUCKET_BYTES))


def _list(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value * 1e3:.3g} ms" for name, value in seconds.items())


def _wire(plan: PlanResult | None) -> str:
    if plan is None:
        return "float32  # no job is given (--measure, --from RUN)"
    whole = [found for hosts, found in plan.scaling if hosts == plan.cluster.hosts]
    seconds = {found.strategy: found.step_seconds for found in whole}
    wires = {name: seconds[name] for name in _WIRES if name in seconds}
    if "dense" not in seconds or not wires:
        return "float32  # no other wire format was predicted"
    name = min(wires, key=lambda wire: wires[wire])
    gain = seconds["dense"] / wires[name]
    if gain < _WORTH:
        return f"float32  # a step would be {gain:.2f} x as fast with {name} (predicted)"
    return f"{name}  # a step {gain:.2f} x as fast as with float32 (predicted)"
