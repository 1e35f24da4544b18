"""Findings, the results of all checks, and their output as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.text import plural
from hvdtrain.untrusted import printable

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Diagnosis:
    """A problem.

    Args:
        check: name of the check that found it, such as "ports"; docs/doctor.md lists all of them.
        where: a host, a pair of hosts, or a line of a file.
        what: the problem, as observed.
        why: why it matters.
        fix: the command or the key that fixes it.
        severity: ERROR: a run would fail, or failed because of it; WARNING: it may cost time.
    """

    check: str
    where: str
    what: str
    why: str
    fix: str
    severity: str = ERROR

    def as_dict(self) -> dict[str, str]:
        """Return the finding for JSON, in which `fix` is called "mend"."""
        fields = asdict(self)
        return {"mend" if name == "fix" else name: fields[name] for name in fields}


def failed(findings: Iterable[Diagnosis]) -> bool:
    """Whether any finding is more than a warning."""
    return any(finding.severity == ERROR for finding in findings)


@dataclass
class Examination:
    """Results of an examination.

    Args:
        measured: name -> values, for people and scripts: links, speeds, all-reduces, clocks.
        left_out: sentences on checks that were skipped, and why.
        seconds: duration of the examination.
    """

    findings: list[Diagnosis] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0


# --- output ------------------------------------------------------------------


# Up to _MOST_LINKS directions have a line each; otherwise only the _SLOWEST_LINKS slowest.
_MOST_LINKS, _SLOWEST_LINKS = 32, 8
_COLORS = {ERROR: "bold red"}


def as_json(findings: Sequence[Diagnosis], **more: Any) -> str:
    return json.dumps({"findings": [one.as_dict() for one in findings], **more}, indent=1)


def examination_json(found: Examination) -> str:
    rest = {"measured": found.measured, "left_out": found.left_out, "seconds": found.seconds}
    return as_json(found.findings, **rest)


def show(findings: Sequence[Diagnosis], notes: Sequence[str], console: Console) -> None:
    """Print a table, then the fix for each finding, in lines that can be copied."""
    if findings:
        console.print(_table(findings))
        console.print("\nTo fix:")
        for number, finding in enumerate(findings, start=1):
            console.print(Text(f"{number:3d}  {printable(finding.fix)}"), soft_wrap=True)
    for note in notes:
        console.print(Text(printable(note)), soft_wrap=True)
    errors = sum(finding.severity == ERROR for finding in findings)
    counts = f"{plural(errors, 'error')}, {plural(len(findings) - errors, 'warning')}"
    console.print("no findings" if not findings else counts, highlight=False)


def _table(findings: Sequence[Diagnosis]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=False, pad_edge=False, expand=True)
    for name in ("", "", "check", "where", "problem, and why it matters"):
        ratio = 1 if name.startswith("problem") else None
        table.add_column(name, no_wrap=name in ("", "check"), overflow="fold", ratio=ratio)
    for number, finding in enumerate(findings, start=1):
        severity = Text(finding.severity, _COLORS.get(finding.severity, "yellow"))
        what = Text(f"{printable(finding.what)}\n").append(printable(finding.why), "dim")
        where = Text(printable(finding.where))
        table.add_row(str(number), severity, finding.check, where, what)
    return table


def notes(found: Examination) -> Iterator[str]:
    """The measurements and the skipped checks, one per line."""
    yield from _links([link for link in found.measured.get("links", ()) if link["bandwidth"]])
    for host, theirs in found.measured.get("speeds", {}).items():
        gpus = ", ".join(f"{n} {v / 1e12:.0f} TFLOP/s" for n, v in theirs.items() if _is_gpu(n))
        cpu = f"{theirs['processor'] / 1e9:.0f} GFLOP/s, memory {theirs['memory'] / 1e9:.1f} GB/s"
        yield f"{host}: {cpu}" + (f", {gpus}" if gpus else "")
    for one in found.measured.get("all_reduce", ()):
        allowed = f"; the network requires {one['allowed'] * 1e3:.0f}" if one["allowed"] else ""
        yield (
            f"all-reduce of {one['bytes'] >> 20} MiB over {one['controller']}, {one['ranks']} "
            f"ranks ({one['hosts'] or 'here'}): {one['seconds'] * 1e3:.0f} ms{allowed}"
        )
    yield from found.left_out
    yield f"examined in {found.seconds:.0f} s"


def _links(links: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line per link, or only the slowest links if there are many."""
    shown = links
    if len(links) > _MOST_LINKS:
        shown = sorted(links, key=lambda link: float(link["bandwidth"]))[:_SLOWEST_LINKS]
    for link in shown:
        yield (
            f"{link['from']} -> {link['to']}: {link['bandwidth'] * 8e-6:,.0f} Mbit/s, "
            f"{link['latency'] * 1e6:.0f} us round trip"
        )
    if len(shown) < len(links):
        yield f"{len(links) - len(shown)} faster directions are not shown (--format json lists all)"


def _is_gpu(name: str) -> bool:
    return name.startswith("gpu") and not name.endswith("memory")
