"""Likely causes of differences, derived from which runs differ and in what."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from hvdtrain.check.traces import OPTIONS, Difference, RunTrace, changing_names, sample_names

# A relative difference of a loss or a norm that rounding explains.
_ROUNDING = 1e-5
_NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_MOST_NAMES = 4
# Parts of hvdtrain's warnings, see api/training.py, engine/changing_buffers.py, comm/process.py.
_SCHEDULER = "has a scheduler that is not in training.state"
_DRAWS = "the function draws random numbers"
_COLLECTIVE = re.compile(r"exchange\.name exact does not cover (comm\.\w+)")
_READ_BEFORE = (
    "a dataset that returns different contents for a number, depending on what its process has "
    "read before: a generator, a counter or a position of its own. Make a sample from its number "
    "alone, or use the random functions of torch, numpy or random, which are seeded for each "
    "micro-batch"
)


@dataclass(frozen=True)
class CheckEvidence:
    """What the runs of a check show. Each difference is from the run on one rank.

    Args:
        reference: the run on one rank.
        ranks, resumed, elastic: differences of the runs on several ranks, from a checkpoint, and
            with a killed rank; None: they do not differ.
        repeat: difference of a repetition of the run on one rank.
        repeated: its records, if there was one.
        hashes: difference of a run on one rank with another hash seed.
        workers: difference of a run on one rank with data workers.
        alone: difference of a run resumed on one rank.
        warnings: hvdtrain's warnings in all runs, and the lines of their output.
    """

    reference: RunTrace
    ranks: Difference | None = None
    resumed: Difference | None = None
    elastic: Difference | None = None
    repeat: Difference | None = None
    repeated: RunTrace | None = None
    hashes: Difference | None = None
    workers: Difference | None = None
    alone: Difference | None = None
    warnings: Sequence[str] = field(default_factory=list)

    def warned(self, part: str) -> bool:
        return any(part in line for line in self.warnings)


def likely_causes(evidence: CheckEvidence) -> list[str]:
    """Return the causes that the evidence allows, the most likely one first."""
    return [*dict.fromkeys(_causes(evidence))]


def _causes(evidence: CheckEvidence) -> Iterator[str]:
    if evidence.repeat is not None:
        yield from _not_repeatable(evidence, evidence.repeat)
        return
    if evidence.hashes is not None:
        yield (
            "hash order: the same run with another PYTHONHASHSEED differs. Something iterates over "
            "a set of text, or uses hash(): sort it, as in sorted(set(words))"
        )
        return
    if evidence.ranks is not None:
        yield from _of_ranks(evidence, evidence.ranks)
    # The resumed run has several ranks, too: only a run resumed on one rank separates the causes.
    resumed = evidence.resumed if evidence.ranks is None else evidence.alone
    if resumed is not None:
        yield from _of_resuming(evidence, resumed)
    if evidence.elastic is not None and evidence.ranks is None and evidence.resumed is None:
        yield from _of_a_failure(evidence.elastic)


def _not_repeatable(evidence: CheckEvidence, repeat: Difference) -> Iterator[str]:
    again = "the same run on one rank differs when it is repeated"
    if repeat.starts:
        yield (
            f"unseeded initial weights: {again}, already before its first step. Call "
            "torch.manual_seed before the model is built"
        )
    if evidence.repeated is not None and sample_names(evidence.reference, evidence.repeated, 1):
        yield _of_random_data(evidence.reference, evidence.repeated, again)
        return
    if repeat.starts:
        return
    if "sample" in repeat.kinds:
        assert evidence.repeated is not None
        yield _of_random_data(evidence.reference, evidence.repeated, again)
        return
    numbers = [name.relative for name in repeat.of_kind("value")]
    kernels = [match[1] for line in evidence.warnings if (match := _NO_KERNEL.search(line))]
    if kernels or (repeat.names[0].kind in ("value", "parameter") and max(numbers, default=0.0)
                   < _ROUNDING):  # fmt: skip
        named = f" ({', '.join([*dict.fromkeys(kernels)])})" if kernels else ""
        yield (
            f"a non-deterministic kernel{named}: {again}, with the same samples, by a rounding "
            "error. Use operations with a deterministic implementation"
        )
    if not kernels:
        assert evidence.repeated is not None
        first = changing_names(evidence.reference, evidence.repeated, at_start=True)
        repeat = replace(repeat, unsaved=tuple(name for name in repeat.unsaved if name in first))
        yield (
            f"unseeded random numbers, or the time: {again}, with the same samples"
            f"{_listed(repeat)}. Use the random functions of torch, numpy or random, which are "
            "seeded by the step, or make a generator from step.index"
        )


def _of_random_data(reference: RunTrace, repeated: RunTrace, again: str) -> str:
    moved = any(
        reference.contents[digest].isdisjoint(numbers)
        for digest, numbers in repeated.contents.items()
        if digest in reference.contents
    )
    if moved:
        return (
            f"unseeded split or shuffling of the data: {again}, with the same samples under other "
            "numbers. Seed it: torch.manual_seed, generator= of random_split, random_state= of "
            "scikit-learn, sorted() for names of files"
        )
    return (
        f"unseeded random numbers in the dataset: {again}, with other contents of the samples. Use "
        "the random functions of torch, numpy or random, which are seeded for each micro-batch"
    )


def _of_ranks(evidence: CheckEvidence, found: Difference) -> Iterator[str]:
    kind = found.names[0].kind
    if kind == "sample":
        yield from _of_samples(evidence)
    elif kind == "options":
        yield (
            "the learning rate depends on the rank or the number of ranks: training.rank, "
            "training.size, or a value that each rank computes from its own micro-batches. Use "
            "step.result"
        )
    elif kind == "buffer":
        yield _of_buffers(found)
    elif kind == "object":
        names = ", ".join(name.plain for name in found.of_kind("object")[:_MOST_NAMES])
        yield (
            f"{names}: computed from a rank's own values, which differ between ranks. Use values "
            "of step.result or training.evaluate, which are the same on all ranks"
        )
    elif kind == "logged":
        names = ", ".join(name.plain for name in found.of_kind("logged"))
        drawn = " (hvdtrain warns of them)" if evidence.warned(_DRAWS) else ""
        yield (
            f"{names}: an evaluation that depends on the ranks: random numbers{drawn}, or a mean "
            "of means over shares of different sizes. Use training.evaluate(function, items=N), "
            "or return (sum, weight)"
        )
    else:
        matches = [match[1] for line in evidence.warnings if (match := _COLLECTIVE.search(line))]
        if matches:
            yield (
                f"{', '.join(dict.fromkeys(matches))}: the result follows the ranks. Gather a row "
                "for each micro-batch, with its number, and sort the rows: docs/collectives.md, "
                '"Exact runs"'
            )
        yield (
            "the loss or the gradient depends on the rank, on the number of ranks, or on earlier "
            f"micro-batches of the rank{_listed(found)}: training.rank, training.size, or a "
            "value that is carried from one micro-batch to the next"
        )


def _of_samples(evidence: CheckEvidence) -> Iterator[str]:
    without_workers = [evidence.resumed, evidence.elastic]
    if any(one is not None and "sample" in one.kinds for one in without_workers):
        yield _READ_BEFORE
    elif evidence.workers is not None:
        yield (
            "a dataset that returns different contents in data workers: a file handle that the "
            "workers share (they share its position: open it in the first __getitem__), or "
            "contents that depend on the worker (get_worker_info)"
        )
    else:
        yield "a dataset whose contents depend on the rank or the number of ranks"


def _of_buffers(found: Difference) -> str:
    names = [name.plain for name in found.of_kind("buffer")]
    shown = ", ".join(names[:_MOST_NAMES])
    if any(name.endswith(_STATISTICS) for name in names):
        return (
            f"BatchNorm ({shown}): the statistics change outside the micro-batches, such as by a "
            "validation in training mode. Validate in training.evaluate, "
            "which sets model.eval(), or call model.eval() and then model.train()"
        )
    return (
        f"{shown}: changed outside the forward passes of the micro-batches, by values of each "
        "rank, or in code that runs again after a resume. Change it in forward passes, or keep it "
        "in training.state"
    )


def _of_resuming(evidence: CheckEvidence, found: Difference) -> Iterator[str]:
    kind = found.names[0].kind
    lost = "A new process begins with its first value, after a resume and in a rank that joins"
    if found.starts:
        names = ", ".join(name.plain for name in found.names[:_MOST_NAMES])
        yield (
            f"{names}: load_state_dict() does not restore what state_dict() returned, or the "
            "script changes it before the loop"
        )
    elif kind == "options":
        sure = evidence.warned(_SCHEDULER)
        named = "an unregistered scheduler" if sure else "an unregistered scheduler or value"
        yield (
            f"{named} sets the learning rate{_listed(found)}: before the loop, set "
            f'training.state["scheduler"] = scheduler. {lost}'
        )
    elif kind == "sample":
        yield _READ_BEFORE
    elif kind == "buffer":
        if evidence.ranks is None or "buffer" not in evidence.ranks.kinds:
            yield _of_buffers(found)
    else:
        buffers = [name for name in found.unsaved if name.startswith("buffer ")]
        if buffers:
            yield (
                f"{', '.join(buffers[:_MOST_NAMES])}: it changes and is not saved. Register it "
                f"with persistent=True. {lost}"
            )
        else:
            where = (
                "a variable, or an attribute of the model or the optimizer"
                if "value" in found.kinds
                else "an attribute of the optimizer that is not in its state_dict(), or a variable"
            )
            yield (
                f"state outside training.state and state_dict(): {where}{_listed(found)}. "
                f"Register it in training.state, or make it a buffer. {lost}"
            )


def _of_a_failure(found: Difference) -> Iterator[str]:
    if OPTIONS in found.names[0].text:
        yield "an unregistered scheduler: a rank that joins begins its schedule again"
        return
    yield (
        f"state outside training.state that the script changes in the step's block"
        f"{_listed(found)}: after the loss of a rank the block runs again, and the change counts "
        "twice. Change it after the block, or register it in training.state"
    )


def _listed(found: Difference) -> str:
    names = list(found.unsaved[:_MOST_NAMES])
    more = len(found.unsaved) - len(names)
    return f" (differs: {', '.join(names)}{f' and {more} more' if more else ''})" if names else ""
