"""Checks before ranks train together, and their agreement on the outcome.

Ranks compare themselves twice. `agree_to_start` is the first collective after the start, before any
rank reads data: different configurations may lead to different collectives. What depends on device
and data (elastic/status.py) is compared in the rendezvous of each generation. Both gather a small
structure from every rank, so all ranks reach the same verdict without another collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdtrain.checkpoint.mirror import ObjectStore, check_mirror
from hvdtrain.config import Config, Settings
from hvdtrain.config_checks import Ranks, check_ranks
from hvdtrain.elastic.membership import LostError, Membership
from hvdtrain.elastic.status import other_configuration, same_gpu
from hvdtrain.errors import EXIT_USER, UserError, crash
from hvdtrain.horovod_wheel import recipe
from hvdtrain.log import logger
from hvdtrain.parallel.config import AXES
from hvdtrain.process.placement import check_placement, placed
from hvdtrain.process.resolve import with_global_batch
from hvdtrain.run_files.run_directory import RunDirectory
from hvdtrain.runtime import environment
from hvdtrain.runtime.collectives import AgreedError, gather_json
from hvdtrain.runtime.init import controller
from hvdtrain.runtime.mesh import Grid, Topology
from hvdtrain.untrusted import parse_yaml


def agree_to_start(
    settings: Settings,
    digest: str,
    topology: Topology,
    membership: Membership | None,
    number: int,
) -> None:
    """Check on all ranks that this run can start with this configuration on these ranks.

    Processes of an elastic run call it alone; the launcher then compares their digests.

    Args:
        digest: digest of this rank's configuration; hosts may have different YAML files.
        number: rank of this process at its launch; in an elastic run, the driver's number of it.

    Raises:
        AgreedError: on all ranks; it cannot start.
    """
    failure = None
    try:
        _check_start(settings, topology, membership, number)
    except UserError as error:
        failure = str(error), error.exit_code
    facts = gather_json({"digest": digest, "failure": failure, "placed": placed()}, "start")
    expected, host = facts[0]["digest"], topology.hosts[0]
    raise_first([other_configuration(host) if fact["digest"] != expected else "" for fact in facts])
    for rank, fact in enumerate(facts):
        if fact["failure"] is not None:
            message, exit_code = fact["failure"]
            raise AgreedError(message, exit_code, rank)
    check_placement(topology, [fact["placed"] for fact in facts])


def raise_first(problems: Sequence[str]) -> None:
    """Raise the first problem, which is known on all ranks.

    Args:
        problems: problem of each rank, identical on all ranks; "": none.

    Raises:
        AgreedError: from the first rank with a problem; it names the other ranks with the same.
    """
    first = next((rank for rank, problem in enumerate(problems) if problem), None)
    if first is None:
        return
    problem = problems[first]
    others = [str(r) for r, theirs in enumerate(problems) if r > first and theirs == problem]
    if others:
        ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(others)}"
        problem += f" (also on {ranks})"
    raise AgreedError(problem, EXIT_USER, first)


def _check_start(
    settings: Settings, topology: Topology, membership: Membership | None, number: int
) -> None:
    if membership is not None:
        _check_launcher(membership)
    config, elastic = settings.config, membership is not None
    if environment.torchrun_restarts() and config.run.id is None:
        raise UserError(
            "run.id is missing: torchrun --max-restarts starts the ranks again after a failure, "
            "and they resume the run of that name; add --run.id NAME"
        )
    ranks = Ranks(
        topology.world_size,
        elastic,
        mpi=controller() == "mpi",
        patched=recipe.is_ours(),
        torch=recipe.installed_version("torch") or "",
    )
    check_ranks(with_global_batch(config, topology.world_size), ranks)
    _check_mirror(config, number, elastic)
    parallel = config.parallel
    if parallel.spans_ranks and not elastic:  # the elastic driver forms whole replicas
        Grid.of(topology.hosts, parallel.degrees, AXES)


def _check_mirror(config: Config, number: int, elastic: bool) -> None:
    """Check checkpoint.mirror; the first process of a run also contacts the store.

    A run that has started with this mirror must not depend on the store, nor must a process that
    joins it.
    """
    mirror, run_id = config.checkpoint.mirror, config.run.id
    if mirror is None:
        return
    if run_id is None:
        raise UserError(
            "run.id is missing: checkpoint.mirror holds one run, which a later start continues by "
            "its name; add --run.id NAME"
        )
    if number == 0 and not _has_used(mirror, RunDirectory(Path(config.run.root) / run_id)):
        check_mirror(mirror, run_id)
    elif elastic:
        ObjectStore(mirror)  # this process may become rank 0: is the client library installed?


def _has_used(mirror: str, directory: RunDirectory) -> bool:
    """Whether a run has started with this mirror."""
    for text in {str(start.get("config")) for start in directory.starts()}:
        with suppress(ValueError, LookupError, TypeError):
            if parse_yaml(text)["checkpoint"]["mirror"] == mirror:
                return True
    return False


def _check_launcher(membership: Membership) -> None:
    """Check that an elastic run has hvdtrain's patched Horovod and its own driver.

    Raises:
        UserError: it does not, or the launcher does not respond.
    """
    if not recipe.is_ours():
        raise UserError(
            "this Horovod was not built by hvdtrain, and an elastic run requires its patches: "
            "`hvdtrain horovod build --install`"
        )
    try:
        served = membership.served()
    except LostError as error:
        raise crash(f"the launcher does not respond ({error})") from None
    if not served:
        raise UserError(
            "horovodrun does not recognize hvdtrain: let it start `python -m hvdtrain.train` "
            "itself, or set HVDTRAIN_ELASTIC=1 if a script starts it"
        )


def check_gpus(topology: Topology) -> None:
    """Check that no two ranks use one GPU; processes of an elastic run have chosen it alone.

    Raises:
        AgreedError: on all ranks; two of them do.
    """
    gpus = topology.gpus
    firsts = [gpus.index(gpu) if gpu else rank for rank, gpu in enumerate(gpus)]
    raise_first(
        [
            same_gpu(f"rank {first} on {topology.hosts[first]}", gpus[rank])
            if first != rank
            else ""
            for rank, first in enumerate(firsts)
        ]
    )


def check_hierarchical(config: Config, topology: Topology) -> None:
    """Warn on rank 0 if `exchange.hierarchical` is set but has no effect."""
    of_hosts = {len(ranks) for ranks in topology.ranks_by_host().values()}
    possible = len(of_hosts) == 1 and of_hosts != {1} and len(topology.ranks_by_host()) > 1
    if config.exchange.hierarchical is True and not possible and topology.rank == 0:
        logger.warning(
            "exchange.hierarchical requires several hosts with the same number of ranks, at least "
            "2: one ring is used instead"
        )
