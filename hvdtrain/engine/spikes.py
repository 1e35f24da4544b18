"""Loss spikes: steps whose loss is far above the losses of the steps before them.

A loss is a spike if it exceeds the median of the last `window` applied steps' losses by more than
`factor` standard deviations. The standard deviation is estimated as 1.4826 times the median
absolute deviation (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", 1993).
OLMo-core's SkipStepOptimizer (mean and standard deviation of 128 losses, factor 6) and ZClip
(arXiv:2504.02507) measure in deviations, too. This definition applies to losses of any sign and
size. A ratio to the usual loss would not: a language model at 2.5 nats per token never reaches four
times its loss, and some losses are negative. Unlike a mean, the median does not follow single
outliers.

A skipped step is like one with a non-finite gradient. A rollback is what PaLM did by hand
(Chowdhery et al., arXiv:2204.02311, section 5.1): the run returns to its newest checkpoint, and
never uses the samples of the steps up to the spike. Without a checkpoint the step is skipped.

The decision depends on the loss of the global batch and on the window, which is part of Progress:
it is the same on all ranks, and the same again after a failure or a resume. After a tenth of a
window of consecutive spikes the level of the loss has changed: the next step is applied whatever
its loss, and if that is above the limit, too, the window begins again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.engine.config import SpikeConfig

# Standard deviation of a normal distribution / its median absolute deviation.
_SCALE = 1.4826
# Rollbacks to one checkpoint; the next spike then ends the run.
MOST_ROLLBACKS = 3


class Spike(NamedTuple):
    """A spike: the number of its step, its loss, and the limit that the loss exceeded."""

    step: int
    loss: float
    limit: float

    def facts(self) -> dict[str, Any]:
        """Return the spike for JSON, in which a non-finite loss is None."""
        return {**self._asdict(), "loss": self.loss if math.isfinite(self.loss) else None}


class Rollback(NamedTuple):
    """A return to an earlier step because of a spike.

    Args:
        to: number of steps after which the run continued.
        spike: step of the spike.
        batches: global batches after those of earlier rollbacks that were passed over.
    """

    to: int
    spike: int
    batches: int


def loss_limit(config: SpikeConfig, losses: Sequence[float]) -> float | None:
    """Return the highest loss that is not a spike; None: no loss is a spike.

    None is returned if detection is off, if there are fewer than `window` losses, or if more than
    half of them are equal, so that the usual deviation is unknown.

    Args:
        losses: of the last applied steps, finite.
    """
    if not config.enabled or len(losses) < config.window:
        return None
    usual = median(losses)
    deviation = _SCALE * median(abs(loss - usual) for loss in losses)
    return usual + config.factor * deviation if deviation > 0 else None


def exceeds(loss: float, limit: float | None) -> bool:
    """Whether a loss is a spike; NaN is one if there is a limit."""
    return limit is not None and not loss <= limit


def rolled_back(rollbacks: Sequence[Sequence[int]], to: int, spike: int) -> list[list[int]]:
    """Return the rollbacks of a run after another one.

    Args:
        rollbacks: of the state in which the spike was found, see Rollback.
        to: step of the checkpoint.
        spike: step of the spike.
    """
    kept = [list(one) for one in rollbacks if one[0] <= to]
    position = spike + passed_over(rollbacks)  # global batches up to the spike's
    return [*kept, [*Rollback(to, spike, position - to - passed_over(kept))]]


def passed_over(rollbacks: Sequence[Sequence[int]]) -> int:
    """Return the number of global batches that a run has passed over."""
    return sum(Rollback(*one).batches for one in rollbacks)
