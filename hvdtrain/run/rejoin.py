"""Transition of a process from one generation of an elastic run to the next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from hvdtrain.elastic.failures import RENDEZVOUS, ProcessStatus
from hvdtrain.elastic.membership import Membership
from hvdtrain.log import logger
from hvdtrain.run.build import RunComponents
from hvdtrain.run.generation import Launched
from hvdtrain.run.held import Held
from hvdtrain.run.prepare import Prepared
from hvdtrain.run.start_checks import crash
from hvdtrain.runtime import heartbeat
from hvdtrain.runtime.collectives import RankLostError
from hvdtrain.runtime.heartbeat import Activity
from hvdtrain.runtime.init import initialise, shut_down
from hvdtrain.runtime.mesh import Topology

if TYPE_CHECKING:
    from hvdtrain.run.replicas import Replicas

_MAX_FAILED_RENDEZVOUS = 20
_LONGEST_MESSAGE = 1000
# Factor of elastic.hang_seconds, as in watchdog.py, and further seconds: the other ranks wait this
# long for the verdict of this process's watchdog.
_PATIENCE = (10, 60.0)


@dataclass(frozen=True)
class Failure:
    """Failure of the last generation of an elastic run.

    Args:
        phase: the phase in which it failed, see failures.py; None: it did not fail.
    """

    phase: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Rejoin:
    """Callable that moves this process to the next generation.

    Args:
        replicas: if the model spans ranks.
    """

    membership: Membership
    launched: Launched
    prepared: Prepared
    held: Held
    replicas: Replicas | None

    def __call__(self, failure: Failure, components: RunComponents | None) -> Topology:
        """Leave the last generation, join the next one, and return its topology.

        Args:
            failure: of the last generation.
            components: of the last generation.

        Raises:
            RemovedError, RefusedError, LostError: as Membership.join.
            UserError: the rendezvous fails _MAX_FAILED_RENDEZVOUS times in a row.
        """
        for _ in range(_MAX_FAILED_RENDEZVOUS):
            with heartbeat.OWN.waiting():
                shut_down()
            if self.replicas is not None:
                self.replicas.leave_world()
            elif components is not None:
                components.exchange.abort()
            heartbeat.OWN.beat(Activity.RENDEZVOUS)
            self.membership.join(partial(self._status, failure), self._set_aside)
            # Not earlier: the listener may still report the end of the last generation until here.
            heartbeat.OWN.generation_over = False
            self.held.phase = RENDEZVOUS
            try:
                with heartbeat.OWN.waiting():
                    return initialise(self.launched.settings.config.runtime.threads)
            except RankLostError as error:
                logger.warning("a rank died during the rendezvous, or cannot be reached: %s", error)
                failure = Failure(RENDEZVOUS, str(error))
        raise crash(
            f"the rendezvous failed {_MAX_FAILED_RENDEZVOUS} times in a row: can the hosts reach "
            "each other on all ports?"
        )

    def _set_aside(self) -> None:
        """Become a spare: the other ranks train without this process."""
        self.held.set_aside()
        if self.replicas is not None:
            self.replicas.forget_pending_step()

    def _status(self, failure: Failure) -> ProcessStatus:
        times, more = _PATIENCE
        config = self.prepared.config
        own = self.replicas.status() if self.replicas is not None else None
        return ProcessStatus(
            identity=self.prepared.identity(self.launched.digest),
            trained=self.held.trained,
            step=own.step if own and own.part is not None else self.prepared.progress.step,
            patience=times * config.elastic.hang_seconds + more,
            failed=failure.phase,
            message=failure.message[:_LONGEST_MESSAGE],
            replica_size=prod(config.parallel.degrees.values()),
            part=own.part if own else None,
            reaches=own.reaches if own else 0,
        )
