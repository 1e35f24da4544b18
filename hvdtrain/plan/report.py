"""A plan in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hvdtrain.plan.outlook import Outlook, Placed
from hvdtrain.report import units

_MOST_LAYOUTS = 12


def show(outlook: Outlook, console: Console) -> None:
    """Print tables, the recommendation, and what is unknown."""
    console.print(_scaling(outlook))
    console.print(_layouts(outlook))
    saving = outlook.saving
    if saving is not None:
        console.print(
            f"Checkpoints every {saving.interval_seconds:.0f} s: --checkpoint.every "
            f"{saving.interval_steps}; goodput {saving.supervised:.1%} under `hvdtrain launch`, "
            f"{saving.elastic:.1%} elastic",
            highlight=False,
        )
    console.print(_recommended(outlook), highlight=False, soft_wrap=True)
    console.print("Not known:", highlight=False)
    for sentence in outlook.unknown:
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)


def _scaling(outlook: Outlook) -> Table:
    table = Table(title="On hosts with whole models", title_justify="left")
    for name in ("hosts", "ranks"):
        table.add_column(name, justify="right")
    table.add_column("exchange")
    for name in ("ms a step", "samples/s", "efficiency", "exposed ms", "sent"):
        table.add_column(name, justify="right")
    table.add_column("limit")
    for hosts, found in outlook.scaling:
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


def _layouts(outlook: Outlook) -> Table:
    shown = outlook.placed[:_MOST_LAYOUTS]
    if outlook.best is not None and outlook.best not in shown:
        shown = [*shown, outlook.best]
    title = f"Layouts on {outlook.cluster.ranks} ranks, the fastest first"
    table = Table(title=title, title_justify="left")
    table.add_column("flags", overflow="fold")
    for name in ("a rank's memory", "fits", "ms a step", "price of 1M samples"):
        table.add_column(name, justify="right")
    for one in shown:
        fits = "?" if one.fits is None else "yes" if one.fits else "no"
        price = "?" if one.price is None else f"{one.price:.4g}"
        needed, step = units.size(one.memory_bytes), f"{one.step_seconds * 1e3:.4g}"
        table.add_row(one.layout.flags or "(defaults)", needed, fits, step, price)
    left = len(outlook.placed) - len(shown)
    if left > 0:
        table.caption = f"and {left} slower ones (--format json)"
    return table


def _recommended(outlook: Outlook) -> str:
    best = outlook.best
    if best is None:
        least = min(outlook.placed, key=lambda one: one.memory_bytes)
        return (
            f"No layout fits; the smallest takes {units.size(least.memory_bytes)} a rank "
            f"({least.layout.flags or 'defaults'}): more ranks, a smaller batch.micro_size, or "
            "--memory.checkpoint_activations blocks"
        )
    known = {"memory": best.fits, "price": best.price}
    unknown = [name for name, value in known.items() if value is None]
    head = "Recommended, " + " and ".join(unknown) + " unknown" if unknown else "Cheapest that fits"
    return f"{head}:\n  {command(outlook, best)}"


def command(outlook: Outlook, placed: Placed) -> str:
    """Command with the flags of a layout, to be appended to a launcher command."""
    every = "" if outlook.saving is None else f"--checkpoint.every {outlook.saving.interval_steps}"
    words = ["python -m hvdtrain.train", placed.layout.flags, every]
    return " ".join(word for word in words if word)
