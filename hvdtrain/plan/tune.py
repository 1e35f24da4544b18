"""`hvdtrain plan --tune`: derive settings of a cluster from its all-reduces."""

from __future__ import annotations

from hvdtrain.errors import UserError
from hvdtrain.exchange.buckets import BUCKET_BYTES
from hvdtrain.plan.outlook import Outlook
from hvdtrain.plan.sources import MeasuredLink

_HIERARCHICAL = ", hierarchical"
_OWN = "Horovod, "
_WORTH = 1.05  # minimum gain for which a setting is changed
_LAUNCHERS = {"Gloo": "horovodrun --gloo", "MPI": "mpirun", "NCCL": "horovodrun or mpirun, NCCL"}
_WIRES = ("float16", "bfloat16")


def tune(link: MeasuredLink, outlook: Outlook | None) -> str:
    """Return YAML for `--config`, with the gain of each setting.

    Args:
        link: the measured link.
        outlook: plan of a job on this cluster, to choose the wire format; None: there is none.

    Raises:
        UserError: no side of the measurement is Horovod.
    """
    at = _size_of_buckets(link)
    seconds = {name: by[at] for name, by in link.sides.items() if name.startswith(_OWN)}
    if not seconds:
        raise UserError("--tune: `hvdtrain bench allreduce` has measured no side of Horovod")
    best = min(seconds, key=lambda name: seconds[name])
    library = best.removeprefix(_OWN).removesuffix(_HIERARCHICAL)
    flat, deep = _OWN + library, _OWN + library + _HIERARCHICAL
    lines = [
        f"# From `hvdtrain bench allreduce` with {link.ranks} ranks: an all-reduce of {at} bytes,",
        f"# about a bucket of gradients, takes {_list(seconds)}.",
        f"# Start it with {_LAUNCHERS.get(library, library)}.",
        "exchange:",
    ]
    if deep in seconds:
        gain = seconds[flat] / seconds[deep]
        on = gain > _WORTH
        lines.append(f"  hierarchical: {str(on).lower()}  # {gain:.2f} x as fast with it")
    else:
        lines.append("  hierarchical: auto  # not measured: it takes several ranks on each host")
    lines.append(f"  wire: {_wire(outlook)}")
    return "\n".join(lines) + "\n"


def _size_of_buckets(link: MeasuredLink) -> int:
    """The measured size closest to a bucket's size."""
    sizes = set.intersection(*(set(by_size) for by_size in link.sides.values()))
    return min(sizes, key=lambda size: abs(size - BUCKET_BYTES))


def _list(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {value * 1e3:.3g} ms" for name, value in seconds.items())


def _wire(outlook: Outlook | None) -> str:
    if outlook is None:
        return "float32  # no job was given (--measure, --from RUN)"
    whole = [found for hosts, found in outlook.scaling if hosts == outlook.cluster.hosts]
    seconds = {found.strategy: found.step_seconds for found in whole}
    wires = {name: seconds[name] for name in _WIRES if name in seconds}
    if "dense" not in seconds or not wires:
        return "float32  # no other wire was planned"
    name = min(wires, key=lambda wire: wires[wire])
    gain = seconds["dense"] / wires[name]
    if gain < _WORTH:
        return f"float32  # a step would be {gain:.2f} x as fast with {name} (predicted)"
    return f"{name}  # a step {gain:.2f} x as fast as with float32 (predicted)"
