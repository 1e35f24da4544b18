"""Mixtures: several datasets in given proportions, which may change during a run.

Which source gives the sample at a position of the run is a pure function of the position (see
Interleaving in order.py), and so is the sample within the source. Each source has epochs of its
own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.config import LoaderConfig, phases_of
from hvdtrain.data.loader import has_own_order, read_samples
from hvdtrain.data.order import Interleaving, Specification, fill, specification_of
from hvdtrain.errors import UserError


class Mixture(Dataset[tuple[Any, int]]):
    """Training data of several sources: sample i is (sample of a source, number of the source).

    `sources` follow each other in the indices; the run's order mixes them.

    Args:
        sources: map-style datasets, by name.
        weights: share of each source in the samples, relative to the other weights. Shares are
            rounded to multiples of 1/1000.
        changes: step -> weights of all sources from this step on.

    Attributes:
        names: names of the sources.
        metrics: names of the metrics of `losses`.

    Raises:
        UserError: a weight or a source cannot be used.
    """

    def __init__(
        self,
        sources: Mapping[str, Dataset[Any]],
        weights: Mapping[str, float],
        changes: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        if sources.keys() != weights.keys():
            raise UserError(
                f"Mixture: there are the sources {', '.join(sources)}, but weights of "
                f"{', '.join(weights)}"
            )
        weights = {name: weights[name] for name in sources}
        try:
            self._phases = phases_of(weights, changes or {}, ("Mixture weights", "Mixture changes"))
        except ValueError as error:
            raise UserError(str(error)) from None
        self._sources = _Sources(sources)
        self.names = tuple(sources)
        self.metrics = tuple(f"loss_{name}" for name in sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        return self._sources.read(indices)

    def order_specification(self, config: LoaderConfig) -> Specification:
        """The order of a run, see order.py; each source is read as `config` says."""
        sources = self._sources.datasets.items()
        return {
            "sources": {name: specification_of(source, config) for name, source in sources},
            "counts": [[step, counts] for step, counts in self._phases],
        }

    @property
    def has_unknown_sources(self) -> bool:
        """Whether a source has no fingerprint, so that this one's does not show its content."""
        return None in map(fingerprint_of, self._sources.datasets.values())

    def fingerprint(self) -> str:
        """16 hex digits of the sources' names, lengths and fingerprints, if they have any."""
        digest = hashlib.sha256()
        for name, source in self._sources.datasets.items():
            size = len(source)  # type: ignore[arg-type]
            digest.update(f"{name} {size} {fingerprint_of(source)}\n".encode())
        return digest.hexdigest()[:16]

    def validation(self, sources: Mapping[str, Dataset[Any]]) -> Dataset[tuple[Any, int]]:
        """Validation data of the same sources, each sample once, as `Mixture` returns samples.

        It begins in the proportions of the first weights (for a source that begins later, those
        weights). A source whose samples are used up is left out from there on.

        Raises:
            UserError: these are not the sources of the mixture, or one cannot be used.
        """
        if sources.keys() != self._sources.datasets.keys():
            raise UserError(
                f"Mixture: the training data has the sources {', '.join(self.names)}, but the "
                f"validation data has {', '.join(sources)}"
            )
        all_counts = zip(*(counts for _, counts in self._phases), strict=True)
        first = [next(count for count in counts if count) for counts in all_counts]
        return _Interleaved({name: sources[name] for name in self.names}, first)

    def losses(
        self, sums: Tensor, sources: Tensor, counts: Tensor | float = 1.0
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """The loss of each source as (sum, weight), for the metrics `metrics` of a task.

        Args:
            sums: (batch,), the loss of each sample, or its sum over the sample's tokens.
            sources: (batch,), the source of each sample, as in the batch.
            counts: (batch,) or a number, the weight of each sample, such as its number of tokens.
        """
        sums = sums.detach().double()
        weights = torch.ones_like(sums) * counts
        is_of = sources == torch.arange(len(self.names), device=sources.device)[:, None]
        zero = torch.zeros((), dtype=sums.dtype, device=sums.device)
        totals = torch.where(is_of, sums, zero).sum(dim=1)
        parts = torch.where(is_of, weights, zero).sum(dim=1)
        return dict(zip(self.metrics, zip(totals, parts, strict=True), strict=True))


def fingerprint_of(dataset: Any) -> str | None:
    """The dataset's attribute or method `fingerprint`; None if it has none."""
    found = getattr(dataset, "fingerprint", None)
    fingerprint: str | None = found() if callable(found) else found
    return fingerprint


class _Interleaved(Dataset[tuple[Any, int]]):
    """All samples of several sources once, in given proportions while they last."""

    def __init__(self, sources: Mapping[str, Dataset[Any]], shares: Sequence[int]) -> None:
        self._sources = _Sources(sources)
        self._interleaving = Interleaving(fill(self._sources.sizes, shares))

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        [source] = self._interleaving.sources(index, index + 1).tolist()
        number = self._interleaving.before(index)[source]
        return self._sources.read([int(self._sources.starts[source]) + number])[0]


class _Sources:
    """Map-style datasets whose samples follow each other."""

    def __init__(self, datasets: Mapping[str, Dataset[Any]]) -> None:
        self.datasets = dict(datasets)
        for name, dataset in datasets.items():
            if has_own_order(dataset):
                raise UserError(
                    f"Mixture: the source {name} ({type(dataset).__name__}) is an IterableDataset, "
                    "whose samples cannot be read by number"
                )
            if len(dataset) == 0:  # type: ignore[arg-type]
                raise UserError(f"Mixture: the source {name} has no samples")
        self.sizes = [len(dataset) for dataset in datasets.values()]  # type: ignore[arg-type]
        self.starts = np.cumsum([0, *self.sizes])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """The samples, each with the number of its source; those of a source are read together."""
        at = np.asarray(indices)
        if len(at) and not (at.min() >= 0 and at.max() < len(self)):
            raise IndexError(indices)
        sources = np.searchsorted(self.starts, at, side="right") - 1
        found: list[tuple[Any, int]] = [(None, 0)] * len(at)
        for source, dataset in enumerate(self.datasets.values()):
            [places] = np.nonzero(sources == source)
            if len(places):
                own = (at[places] - self.starts[source]).tolist()
                for place, sample in zip(places.tolist(), read_samples(dataset, own), strict=True):
                    found[place] = sample, source
        return found
