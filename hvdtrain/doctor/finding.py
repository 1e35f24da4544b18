"""The result type of all checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """A problem.

    Args:
        check: name of the check that found it, such as "ports"; docs/doctor.md lists all of them.
        where: a host, a pair of hosts, or a line of a file.
        what: the problem, as observed.
        why: why it matters.
        mend: the command or the key that fixes it.
        severity: ERROR: a run would fail, or failed because of it; WARNING: it may cost time.
    """

    check: str
    where: str
    what: str
    why: str
    mend: str
    severity: str = ERROR


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any finding is more than a warning."""
    return any(finding.severity == ERROR for finding in findings)
