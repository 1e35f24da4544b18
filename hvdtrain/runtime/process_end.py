"""End of a process whose work is done, within a limit, even if user code is still running.

Python waits without a limit for threads and `multiprocessing` processes that are not daemons.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from typing import NoReturn

from hvdtrain.runtime.environment import launched_rank
from hvdtrain.runtime.heartbeat import OWN, Activity

_EXIT_SECONDS = 20.0  # less than the 30 s for which the elastic driver waits for the last ranks


def end_process(code: int, seconds: float = _EXIT_SECONDS) -> NoReturn:
    """End this process with an exit code; call it in the main thread.

    If the process is still there after `seconds`, a line on stderr names the threads and child
    processes that it waits for. The children are then killed, and the process ends with `code`.
    """
    OWN.beat(Activity.ENDING)
    threading.Thread(target=_end, args=(code, seconds), name="exit", daemon=True).start()
    if "horovod.torch" in sys.modules:
        from hvdtrain.runtime.failure import leave_horovod

        leave_horovod()  # all ranks do so now: no rank waits for a blocked one
    sys.exit(code)


def _end(code: int, seconds: float) -> NoReturn:
    time.sleep(seconds)
    children = multiprocessing.active_children()
    where = f"rank {launched_rank()} on {socket.gethostname()}"
    sys.stderr.write(
        f"hvdtrain: warning: {where}: the run is done, but its process still waits after "
        f"{seconds:g} s for {_blockers(children)}; it ends now with exit code {code}\n"
    )
    sys.stdout.flush()
    sys.stderr.flush()
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
