"""The exceptions whose message is meant for the person at the terminal.

Everything else that is raised is a defect: it is shown with its traceback and
ends the run with exit code 1.
"""

from __future__ import annotations

EXIT_CRASH = 1
EXIT_USER = 2
EXIT_NOT_FINITE = 3
EXIT_PREEMPTED = 75


class UserError(Exception):
    """The command line, the configuration or the input is wrong.

    The message says what is wrong, where, and what to do. It is printed without
    a traceback and the process ends with `exit_code`.
    """

    exit_code = EXIT_USER


class UnsupportedTaskError(UserError):
    """A model or data that cannot be used, found in a step: by every rank, told by rank 0."""


class CollectiveError(UnsupportedTaskError, ValueError):
    """A collective of hvdtrain.comm that was asked for in a way in which it cannot be done."""


def of_import(error: ImportError) -> UserError | None:
    """What to tell the user of it, where it is Horovod that cannot be imported."""
    if "horovod" not in str(error).lower():
        return None
    return UserError(
        f"Horovod cannot be imported ({error}); build it for this torch and MPI with "
        "`hvdtrain horovod build --install`"
    )


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message`: for dataclasses of configuration that check themselves."""
    if not condition:
        raise ValueError(message)
