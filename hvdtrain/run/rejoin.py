"""From one generation of an elastic run to the next: a process gives up its ranks for others."""

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
from hvdtrain.runtime.topology import Topology

if TYPE_CHECKING:
    from hvdtrain.run.replicas import Replicas

_MAX_FAILED_RENDEZVOUS = 20
_LONGEST_MESSAGE = 1000
# Beyond the 10 times elastic.hang_seconds of a watchdog: others wait for this one's verdict.
_PATIENCE = (10, 60.0)


@dataclass(frozen=True)
class Failure:
    """How the last generation of an elastic run failed; None: it did not.

    Args:
        phase: of failures.py.
    """

    phase: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Rejoin:
    """See the top of this file.

    Args:
        replicas: of a model that spans ranks.
    """

    membership: Membership
    launched: Launched
    prepared: Prepared
    held: Held
    replicas: Replicas | None

    def __call__(self, failure: Failure, components: RunComponents | None) -> Topology:
        """Leaves the last generation, and is one of the next one's ranks then.

        Args:
            failure: of the last generation.
            components: what trained in it.

        Raises:
            RemovedError, RefusedError, LostError: as Membership.join.
            UserError: one rendezvous after the other fails.
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
            # Only now: until then the listener may still report the end of the last generation.
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
        """The other ranks train without this process, which is a spare."""
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
