"""Random numbers that depend only on the seed and the position in the run.

Before each micro-batch is loaded the generators are seeded from (seed, step, number of
the micro-batch). A dataset and dropout therefore draw the same numbers for any number of ranks,
on any rank that works on the micro-batch, and after a restart. No generator's state has to be
saved. Evaluation uses keys of its own: it is independent of training's random numbers.
"""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_all(*key: int) -> None:
    """Seed torch (including CUDA if initialised), numpy and random from integers >= 0."""
    words = np.random.SeedSequence(key).generate_state(2, dtype=np.uint32)
    seed = int(words[0]) << 31 ^ int(words[1])
    # Not torch.manual_seed: for a device that is not initialised, it formats the caller's stack
    # for later seeding, which takes ten times as long as everything else here.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(words[0])
    random.seed(seed)
