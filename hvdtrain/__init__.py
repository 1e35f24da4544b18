"""Training for PyTorch on clusters that run Horovod and MPI.

In a notebook or a script, `hvdtrain.run(...)` starts a run and waits for its end, and
`hvdtrain.Run(directory)` reads a run. Modules are imported on first use.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from hvdtrain.version import __version__ as __version__


def _put_python_first() -> None:
    """Let Python's own modules come before those of the current directory.

    `python -m hvdtrain.train` puts that directory first: a queue.py there would be imported in
    place of Python's. For programs that import nothing of the user's it comes last, as with the
    option -P of newer Pythons: a psutil.py there would be imported in place of the package.
    """
    # While Python locates the module that it runs, argv[0] is "-m".
    if sys.argv[:1] != ["-m"] or not any("hvdtrain." in word for word in sys.orig_argv):
        return
    own = os.path.dirname(os.__file__)
    in_zip = f"{os.path.dirname(own)}/python{sys.version_info[0]}{sys.version_info[1]}.zip"
    of_python = [in_zip, own, os.path.join(own, "lib-dynload")]
    sys.path.sort(key=lambda path: path not in of_python)  # the others keep their order
    if {*_OWN_PROGRAMS}.intersection(sys.orig_argv) and (current := _current()) in sys.path:
        sys.path.remove(current)
        sys.path.append(current)


def _current() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


_OWN_PROGRAMS = ("hvdtrain.agent", "hvdtrain.elastic.watchdog", "hvdtrain.supervise.successor")


_put_python_first()

if TYPE_CHECKING:
    from hvdtrain.api.run import Run as Run
    from hvdtrain.api.start import RunResult as RunResult
    from hvdtrain.api.start import run as run
    from hvdtrain.api.training import Training as Training
    from hvdtrain.api.training import training as training

__all__ = ["Run", "RunResult", "Training", "run", "training"]

_PLACES = {
    "Run": "hvdtrain.api.run",
    "RunResult": "hvdtrain.api.start",
    "run": "hvdtrain.api.start",
    "Training": "hvdtrain.api.training",
    "training": "hvdtrain.api.training",
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
