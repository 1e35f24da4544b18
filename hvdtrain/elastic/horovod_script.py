"""A rank that runs an unchanged script of Horovod's elastic API, such as `@hvd.elastic.run`.

The driver starts `python -m hvdtrain.elastic.horovod_script SCRIPT ...` instead of the script. It
replaces the two places at which Horovod talks to its own elastic driver, then runs the script:

- `hvd.init` first requests this process's ranks (membership.py), again if a rank dies meanwhile
- Horovod's notification manager would listen for pickled messages. Here the state objects that
  register with it receive what rank 0 learns from the driver: that processes join or leave

A state's `sync`, `save` and `restore` show how far the script is, which the driver needs to end a
job that fails again and again. A commit counts as a step.
"""

from __future__ import annotations

import builtins
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hvdtrain.agent.host import gpus
from hvdtrain.elastic import watchdog
from hvdtrain.elastic.membership import LostError, Membership, RefusedError, RemovedError
from hvdtrain.elastic.status import RENDEZVOUS, STATE_TRANSFER, TRAINING, Identity, ProcessStatus
from hvdtrain.errors import EXIT_CRASH, EXIT_USER, UserError
from hvdtrain.runtime import environment
from hvdtrain.runtime.heartbeat import HEARTBEAT, Activity
from hvdtrain.runtime.signals import StopFlag

_NEWS_SECONDS = 0.5
_MAX_FAILED_RENDEZVOUS = 20
_LONGEST_MESSAGE = 500
# After a generation is over, the watchdog ends a process that neither rejoins nor uses CPU or disk
# for 10 times as long, because the others wait for it. A busy process has no limit.
_HANG_SECONDS = 90.0
_DEVICES = "CUDA_VISIBLE_DEVICES"
# With 1, torch.cuda.is_available() does not initialize CUDA, which fixes the order of the GPUs.
_NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


class ScriptProgress:
    """How far the script is, as its state objects show. One for the process.

    Attributes:
        trained: this process has the state of the script.
        commits: number of commits in this process.
        failed: phase in which the last generation failed, see status.py; None: it did not.
        message: reason of that failure.
        phase: of the current generation.
    """

    def __init__(self) -> None:
        self.trained, self.commits = False, 0
        self.failed: str | None = None
        self.message = ""
        self.phase = RENDEZVOUS

    def begin(self) -> None:
        """A generation has begun: the state is synchronized next."""
        self.failed, self.phase = None, STATE_TRANSFER

    def fail(self, error: BaseException | None) -> None:
        self.failed, self.message = self.phase, str(error)[:_LONGEST_MESSAGE]

    def observe(self, state: Any) -> None:
        """Follow a `horovod.common.elastic.State`; a second call does nothing."""
        if "sync" in vars(state):
            return
        sync, save, restore = state.sync, state.save, state.restore

        def synchronized() -> None:
            sync()
            save()  # Horovod would restore a model as it was before it was synchronized
            self.trained, self.phase = True, TRAINING

        def saved() -> None:
            save()
            self.commits += 1

        def restored() -> None:
            self.fail(sys.exc_info()[1])  # Horovod restores a state only after HorovodInternalError
            restore()

        state.sync, state.save, state.restore = synchronized, saved, restored

    def status(self, identity: Identity) -> ProcessStatus:
        return ProcessStatus(
            identity=identity,
            trained=self.trained,
            step=self.commits,
            failed=self.failed,
            verdict_seconds=math.inf,  # a busy process is never hung
            message=self.message,
            reachable_step=self.commits,
        )


class States:
    """Takes the place of Horovod's notification manager, with the methods that Horovod calls."""

    def __init__(self, progress: ScriptProgress) -> None:
        self._progress = progress
        self._states: list[Any] = []

    def init(self, *arguments: object, **options: object) -> None:
        """Start nothing: no messages arrive from the network."""

    def register_listener(self, state: Any) -> None:
        self._progress.observe(state)
        self._states.append(state)

    def remove_listener(self, state: Any) -> None:
        self._states.remove(state)

    def hosts_changed(self, generation: int) -> None:
        """Make the next commit raise HostsUpdatedInterrupt in all ranks; rank 0 decides.

        Horovod ignores a message that is not later than the last one. Its time is therefore the
        number of the generation: clocks of hosts differ, and repeated messages have no effect.
        """
        from horovod.runner.elastic.worker import HostUpdateResult

        for state in tuple(self._states):
            state.on_hosts_updated(generation + 1, HostUpdateResult.mixed)


class ScriptRank:
    """This process as a rank of hvdtrain's elastic driver.

    Args:
        membership: of this process.
        number: the driver's number of this process.
        slot: its place on the host.
        command: the script and its arguments.
    """

    def __init__(
        self, membership: Membership, number: int, slot: int, command: Sequence[str]
    ) -> None:
        self._membership, self._number, self._slot = membership, number, slot
        self._progress = ScriptProgress()
        self._states = States(self._progress)
        digest = hashlib.sha256("\0".join(command).encode()).hexdigest()
        self._identity = Identity("", digest, 0, None)
        self._basics: Any = None  # Horovod's, once the script has called hvd.init

    def install(self) -> None:
        """Connect Horovod to the driver.

        Raises:
            LostError: the driver does not respond.
        """
        from horovod.common import basics, elastic

        self._membership.served()  # the script may work for long before it calls hvd.init
        start = basics.HorovodBasics.init

        def init(self_: Any, *arguments: Any, **options: Any) -> None:
            self._init(self_, partial(start, self_, *arguments, **options))

        os.environ.setdefault(_NVML_CHECK, "1")  # scripts ask before hvd.init; see order_gpus
        basics.HorovodBasics.init = init
        elastic.notification_manager = self._states
        # A script that does nothing for hours between two collectives is not a hung one.
        HEARTBEAT.beat(Activity.WAITING)
        launcher = self._membership.launcher
        watchdog.KeptWatchdog(
            partial(watchdog.start, HEARTBEAT, _HANG_SECONDS, launcher, self._number)
        )
        self._membership.listen(self._abort)
        threading.Thread(target=self._watch_hosts, daemon=True).start()

    def _init(self, basics: Any, start: Callable[[], None]) -> None:
        """Request this process's ranks and start Horovod with them.

        Raises:
            ValueError: Horovod did not start, repeatedly, or rejected an argument after its start.
        """
        first, self._basics = self._basics is None, basics
        for attempts_left in reversed(range(_MAX_FAILED_RENDEZVOUS)):
            if basics.is_initialized():
                start()  # as without hvdtrain, it does nothing
                return
            local_rank = self._join()
            try:
                start()
            except ValueError as error:  # a rank died meanwhile, or an argument is wrong
                if not attempts_left or basics.is_initialized():
                    raise
                self._progress.fail(error)
                basics.shutdown()
                continue
            if first:
                order_gpus(self._slot, local_rank)
            self._progress.begin()
            return

    def _join(self) -> int:
        """Wait for this process's ranks; return its local rank."""
        self._progress.phase = RENDEZVOUS
        try:
            found = self._membership.join(self._status, lambda: None)
            HEARTBEAT.beat(Activity.WAITING)
            return int(found["local_rank"])
        except RemovedError:
            sys.exit(0)
        except RefusedError as error:
            _leave(str(error))
        except LostError as error:
            _leave(f"the launcher no longer responds ({error})")

    def _status(self) -> ProcessStatus:
        """Return the status for a request for ranks, which may take any time."""
        HEARTBEAT.beat(Activity.WAITING)
        return self._progress.status(self._identity)

    def _abort(self) -> None:
        """Fail the collectives of a generation that is over; runs in another thread."""
        if HEARTBEAT.read()[1] != Activity.LOADING:  # this is repeated; a hung script has no beats
            HEARTBEAT.beat(Activity.LOADING)
        if self._basics is not None:
            self._basics.abort()

    def _watch_hosts(self) -> None:
        while True:
            time.sleep(_NEWS_SECONDS)
            if self._membership.hosts_changed:
                self._states.hosts_changed(self._membership.generation)


def order_gpus(slot: int, local_rank: int, env: MutableMapping[str, str] = os.environ) -> None:
    """Let the GPU with the number of this process's first local rank be the GPU of its slot.

    A script chooses its GPU once, by its local rank. Local ranks have no gaps, so the local rank
    of a new process may be the number of the GPU that an older process uses.
    """
    listed = env.get(_DEVICES)
    devices = [str(n) for n in range(gpus(env))] if listed is None else listed.split(",")
    if slot != local_rank and max(slot, local_rank) < len(devices):
        devices[slot], devices[local_rank] = devices[local_rank], devices[slot]
        env[_DEVICES] = ",".join(devices)


def _leave(message: str) -> NoReturn:
    print(f"hvdtrain: error: {message}", file=sys.stderr, flush=True)
    sys.exit(EXIT_CRASH)


def main(command: list[str]) -> int:
    """Run a script as Python does; `command`: its path and its arguments."""
    number, slot = environment.launched_rank(), environment.launched_local_rank()
    try:
        membership = Membership.of_this_process(StopFlag())
        if membership is not None:
            ScriptRank(membership, number, slot, command).install()
    except UserError as error:
        print(f"hvdtrain: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER
    except LostError as error:
        _leave(f"the launcher does not respond ({error})")
    sys.argv = command
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        # In place of the current directory of `python -m`, see hvdtrain/__init__.py.
        with suppress(OSError):  # it may be removed
            if (current := os.getcwd()) in sys.path:
                del sys.path[-1 - sys.path[::-1].index(current)]
        # hvdtrain has put Python's own modules first.
        named = os.environ.get("PYTHONPATH", "").split(":")
        sys.path.sort(key=lambda path: path not in named)
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
    _run(os.path.abspath(command[0]))
    return 0


def _run(script: str) -> None:
    """Run a script as `__main__`; its threads and exit handlers find that module later, too."""
    loader = SourceFileLoader("__main__", script)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=script, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(loader.source_to_code(loader.get_data(script), script), main.__dict__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
