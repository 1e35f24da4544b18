"""Memory of a process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.runs import environment

PEAKS = """
import torch
from hvdtrain.runtime.memory import HighWater, keep_freed_memory

keep_freed_memory()
marks = HighWater(torch.device("cpu"))
begin = marks.read()[0]
for size in (256, 16):
    torch.ones(size << 18)
    print((marks.read()[0] - begin) >> 20)
    marks.set_back()
"""
STEPS = """
import resource
import torch
from hvdtrain.runtime.memory import keep_freed_memory

def faults_of_steps():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):  # as gradients: 2 and 64 MiB, freed in each step
        kept = [torch.ones(size << 18) for size in (2, 64, 2)]
        del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults_of_steps()
print(faults_of_steps())
"""


def _numbers(script: str, **env: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_steps_reuse_freed_memory_without_page_faults() -> None:
    pages = (2 + 64 + 2) << 8
    assert _numbers(STEPS)[0] < pages
    assert _numbers(STEPS, MALLOC_TRIM_THRESHOLD_="131072")[0] > 5 * pages


@pytest.mark.slow
def test_peak_does_not_count_memory_that_was_freed_before_it() -> None:
    large, small = _numbers(PEAKS)
    assert 250 < large < 300 and 10 < small < 50
