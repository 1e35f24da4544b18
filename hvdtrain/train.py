"""`python -m hvdtrain.train`: read the configuration, train, and exit with the run's code."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from typing import NoReturn

from hvdtrain.config import Settings, parse
from hvdtrain.errors import UserError, of_import
from hvdtrain.runtime import lazy_dynamo, pmi
from hvdtrain.runtime.environment import forget_launcher, launched_rank, process_start
from hvdtrain.runtime.heartbeat import HEARTBEAT, Activity
from hvdtrain.runtime.signals import StopFlag
from hvdtrain.runtime.user_errors import report
from hvdtrain.streams import flush, open_missing, say


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Train with the given flags (default: the process's flags); return the exit code.

    Args:
        began: unix time of the program's start. Default: now, or the start of the process if
            `argv` is None.
    """
    if began is None:
        began = process_start() if argv is None else time.time()
    open_missing()
    # Before anything else: importing torch takes seconds, during which a signal would end the
    # process.
    stop = StopFlag()
    stop.install()
    try:
        # Only rank 0 prints for --help and --print_config.
        with nullcontext() if launched_rank() == 0 else redirect_stdout(StringIO()):
            settings = parse(sys.argv[1:] if argv is None else argv)
        if settings.config.runtime.standalone:
            forget_launcher()
        code = _load_run()(settings, stop, began)
        stop.ignore()
        return code
    except UserError as error:
        return report(error, stop)


def _load_run() -> Callable[[Settings, StopFlag, float], int]:
    """Import torch and Horovod, only after the configuration is known to be valid."""
    lazy_dynamo.defer()
    # Imports create no garbage, and the search for it takes 0.3 of 2.8 s of CPU time.
    gc.disable()
    try:
        from hvdtrain.process.session import run
    except ImportError as error:
        raise (of_import(error) or error) from None
    finally:
        gc.freeze()  # never scan these objects again, here or in forked data workers
        gc.enable()
    return run


_EXIT_SECONDS = 20.0  # less than the 30 s for which the elastic driver waits for the last ranks


def end_process(code: int, seconds: float = _EXIT_SECONDS) -> NoReturn:
    """End this process with an exit code, within a limit; call it in the main thread.

    Python waits without a limit for threads and `multiprocessing` processes that are not daemons.

    If the process is still there after `seconds`, a line on stderr names the threads and child
    processes that it waits for. The children are then killed, and the process ends with `code`.
    """
    HEARTBEAT.beat(Activity.ENDING)
    threading.Thread(target=_end, args=(code, seconds), name="exit", daemon=True).start()
    if "horovod.torch" in sys.modules:
        from hvdtrain.runtime.failure import leave_horovod

        leave_horovod()  # all ranks do so now: no rank waits for a blocked one
    if code:
        pmi.abort_job(code)
    flush()
    sys.exit(code)


def _end(code: int, seconds: float) -> NoReturn:
    time.sleep(seconds)
    children = multiprocessing.active_children()
    where = f"rank {launched_rank()} on {socket.gethostname()}"
    say(
        f"hvdtrain: warning: {where}: the run is done, but its process still waits after "
        f"{seconds:g} s for {_blockers(children)}; it ends now with exit code {code}"
    )
    flush()
    for child in children:
        child.kill()
    os._exit(code)


def _blockers(children: list[multiprocessing.process.BaseProcess]) -> str:
    main, own = threading.main_thread(), threading.current_thread()
    threads = [t for t in threading.enumerate() if not t.daemon and t not in (main, own)]
    named = [f"thread {thread.name!r} ({thread.native_id})" for thread in threads]
    named += [f"process {child.name!r} (pid {child.pid})" for child in children]
    if not named and (frame := sys._current_frames().get(main.ident or 0)) is not None:
        named = [f"{frame.f_code.co_filename}, line {frame.f_lineno}"]
    return ", ".join(named) or "a library"


if __name__ == "__main__":
    end_process(main())
