"""Exceptions whose message is meant for the user at the terminal.

Any other exception is a bug: it is shown with its traceback and ends the run with
exit code 1.
"""

from __future__ import annotations

EXIT_CRASH = 1
EXIT_USER = 2
EXIT_NOT_FINITE = 3
EXIT_PREEMPTED = 75
AGREED_CODES = (0, EXIT_USER, EXIT_NOT_FINITE, EXIT_PREEMPTED)  # the same for all ranks


class UserError(Exception):
    """The command line, the configuration or the input is wrong.

    The message states the error, its location, and what to do. It is printed without
    a traceback, and the process ends with `exit_code`.
    """

    exit_code = EXIT_USER


def crash(message: str) -> UserError:
    """Return an error that is reported like a user error, but for which a retry may help."""
    error = UserError(message)
    error.exit_code = EXIT_CRASH
    return error


class LauncherError(UserError):
    """The launcher does not fit, as every process that it started finds; the first reports it."""


class UnsupportedTaskError(UserError):
    """A model or data that cannot be used, found in a step by every rank; rank 0 reports it."""


class CollectiveError(UnsupportedTaskError, ValueError):
    """A collective of hvdtrain.comm was called with arguments that it cannot support."""


def of_import(error: ImportError) -> UserError | None:
    """Return the error for the user if Horovod cannot be imported, else None."""
    if "horovod" not in str(error).lower():
        return None
    return LauncherError(
        f"Horovod cannot be imported ({error}); build it for this torch and MPI with "
        "`hvdtrain horovod build --install`"
    )


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition`; for checks in configuration classes."""
    if not condition:
        raise ValueError(message)
