"""What is wrong: the one thing that all checks return."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        check: which check found it, such as "ports"; docs/doctor.md has them all.
        where: a host, a pair of hosts, or a line of a file.
        what: is wrong, as it was seen.
        why: it matters.
        mend: the command, or the key, that mends it.
        severity: ERROR: a run would fail, or has failed of it; WARNING: it may cost time.
    """

    check: str
    where: str
    what: str
    why: str
    mend: str
    severity: str = ERROR


def failed(findings: Iterable[Finding]) -> bool:
    """Whether any is more than a warning."""
    return any(finding.severity == ERROR for finding in findings)
