"""Random numbers that depend on the seed and on the place in the run alone.

Before each micro-batch is loaded the generators are seeded from (seed, step, number of
the micro-batch). A data set and dropout therefore draw the same however many ranks there are,
whichever of them works on the micro-batch, and after a restart; no generator's
state has to be saved. Evaluation does the same with keys of its own: it neither follows
training's random numbers nor disturbs them.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*key: int) -> None:
    """Seeds torch (CUDA too where it is up), numpy and random from integers >= 0."""
    words = np.random.SeedSequence(key).generate_state(2, dtype=np.uint32)
    seed = int(words[0]) << 31 ^ int(words[1])
    # Not torch.manual_seed: where a device is not up yet, it keeps the caller's stack as text
    # for a seeding later on, which takes ten times as long as all the rest.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(words[0])
    random.seed(seed)
