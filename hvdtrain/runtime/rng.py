"""Random numbers that depend on the seed and on the place in the run alone.

Before each micro-batch is loaded the generators are seeded from (seed, step, number of
the micro-batch). A data set and dropout therefore draw the same however many ranks there are,
whichever of them works on the micro-batch, and after a restart; no generator's
state has to be saved.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*key: int) -> None:
    """Seeds torch (all devices), numpy and random from a tuple of integers >= 0."""
    words = np.random.SeedSequence(key).generate_state(2, dtype=np.uint32)
    seed = int(words[0]) << 31 ^ int(words[1])
    torch.manual_seed(seed)
    np.random.seed(words[0])
    random.seed(seed)
