"""Checks before ranks train together."""

from __future__ import annotations

from hvdtrain.config import Config
from hvdtrain.elastic.identity import other_configuration
from hvdtrain.elastic.membership import LostError, Membership
from hvdtrain.errors import EXIT_CRASH, UserError
from hvdtrain.horovod_wheel import recipe
from hvdtrain.log import logger
from hvdtrain.runtime.collectives import broadcast_json
from hvdtrain.runtime.init import controller
from hvdtrain.runtime.mesh import Topology


def check_elastic(membership: Membership) -> None:
    """Check that an elastic run has hvdtrain's patched Horovod and its own driver.

    Raises:
        UserError: it does not, or the launcher does not respond.
    """
    if not recipe.is_ours():
        raise UserError(
            "this Horovod was not built by hvdtrain, and an elastic run needs its patches: "
            "`hvdtrain horovod build --install`"
        )
    try:
        served = membership.served()
    except LostError as error:
        raise crash(f"the launcher does not answer ({error})") from None
    if not served:
        raise UserError(
            "horovodrun cannot see that this is hvdtrain: let it start `python -m hvdtrain.train` "
            "itself, or set HVDTRAIN_ELASTIC=1 where a script starts it"
        )


def crash(message: str) -> UserError:
    """Return an error that is reported like a user error, but for which a retry may help."""
    error = UserError(message)
    error.exit_code = EXIT_CRASH
    return error


def check_same_configuration(digest: str, topology: Topology) -> None:
    """Check that this rank has rank 0's configuration; hosts may have different YAML files.

    Args:
        digest: of this rank's configuration.

    Raises:
        UserError: the digest differs from rank 0's.
    """
    if digest != broadcast_json(digest, "configuration"):
        raise UserError(other_configuration(topology.hosts[0]))


def check_hierarchical(config: Config, topology: Topology) -> None:
    """Warn on rank 0 if `exchange.hierarchical` is set but has no effect."""
    of_hosts = {len(ranks) for ranks in topology.ranks_by_host().values()}
    possible = len(of_hosts) == 1 and of_hosts != {1} and len(topology.ranks_by_host()) > 1
    if config.exchange.hierarchical is True and not possible and topology.rank == 0:
        logger.warning(
            "exchange.hierarchical takes several hosts with several ranks each, equally many: "
            "here one ring goes through all ranks"
        )


def check_exchange(config: Config, world_size: int, elastic: bool) -> None:
    """Check what the exchange requires of Horovod, its controller and the ranks.

    Args:
        elastic: processes prepare alone, each a world of one rank.

    Raises:
        UserError: a requirement is not met.
    """
    sends_bfloat16 = {
        "exchange.wire bfloat16": config.exchange.wire == "bfloat16",
        "precision.name bf16-params": config.precision.name == "bf16-params",
    }
    for key, sends in sends_bfloat16.items():
        if sends and not recipe.is_ours():
            raise UserError(
                f"this Horovod was not built by hvdtrain, and {key} needs its patches: "
                "`hvdtrain horovod build --install`"
            )
    if config.exchange.reduce != "adasum":
        return
    if elastic or (world_size > 1 and controller() != "mpi"):
        raise UserError(
            "exchange.reduce adasum is there over MPI only: start with mpirun, or with horovodrun "
            "--mpi; an elastic run cannot have it"
        )
    if world_size & (world_size - 1):
        raise UserError(
            "exchange.reduce adasum combines pairs of ranks, then pairs of pairs: it takes 2, 4, "
            f"8, ... ranks, and there are {world_size}"
        )
    if config.batch.micro_batches % world_size:
        raise UserError(
            "exchange.reduce adasum weighs ranks alike: the micro-batches of a step "
            f"(batch.global_size / batch.micro_size = {config.batch.micro_batches}) must be a "
            f"multiple of the {world_size} ranks"
        )


def check_zero(config: Config, world_size: int, elastic: bool) -> None:
    """Check that there are enough ranks for all copies; an elastic run may get more ranks later.

    Raises:
        UserError: parallel.zero_copies is too large.
    """
    copies = config.parallel.zero_copies
    if config.parallel.zero and not elastic and copies > world_size > 1:
        raise UserError(
            f"parallel.zero_copies {copies} is more than the {world_size} ranks: give at most "
            f"{world_size}, with which each of them holds all of the optimizer's state"
        )


def check_batch(config: Config, elastic: bool) -> None:
    """Check that in an elastic run no batch size depends on the ranks.

    Raises:
        UserError: the run is elastic, and batch.per_rank_size or memory.fit is set.
    """
    if config.memory.fit and elastic:
        raise UserError(
            "memory.fit makes micro-batches follow the memory of the ranks, which come and go in "
            "an elastic run: set batch.micro_size, which a run with fixed ranks can find"
        )
    if config.batch.per_rank_size and elastic:
        raise UserError(
            "batch.per_rank_size makes the global batch follow the number of ranks, which changes "
            "in an elastic run: set batch.global_size, or start without --host-discovery-script"
        )


def check_profiled_ranks(config: Config, world_size: int) -> None:
    """Check that the profiled ranks exist; only in an elastic run may a rank join later.

    Raises:
        UserError: profile.ranks names a rank that does not exist.
    """
    missing = sorted(rank for rank in config.profile.named_ranks or () if rank >= world_size)
    if missing:
        raise UserError(
            f"profile.ranks names rank {missing[0]}, but the run's ranks are 0 to {world_size - 1}"
        )
