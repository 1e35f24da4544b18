"""Memory of a training step as the sequence grows with the ranks that share it.

    python -m tests.soak.context_memory [tokens per rank]

Prints, for each pattern and 1, 2 and 4 ranks, the largest growth of any rank's memory in a step.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import AttentionConfig, GPTConfig
from hvdtrain.parallel.context import apply_context
from tests.support.torch_ranks import on_torch_ranks

SMALL = GPTConfig(layers=2, heads=2, kv_heads=1, width=32, vocab_size=64)


def pattern(name: Any, context: int) -> AttentionConfig:
    """Return keys of a pattern whose longest segment is the context, with a rate of 16."""
    if name == "dilated":
        lengths = [512, context]
        return AttentionConfig(name, segment_lengths=lengths, dilation_rates=[1, 16])
    return AttentionConfig(name, local_blocks=8 if name == "block_sparse" else 4)


def grown(name: str, tokens: int) -> float:
    """Return the maximum growth of this rank in MiB in a forward and a backward pass."""
    context = tokens * dist.get_world_size()
    model = GPT(replace(SMALL, context=context, attention=pattern(name, context)))
    assert dist.group.WORLD is not None
    apply_context(model, dist.group.WORLD)
    for size in (tokens // 8 * dist.get_world_size(), context):
        text = torch.randint(64, (1, size + 1))
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the current memory
        before = _kibibytes("VmRSS")
        # The first, short pass loads code, which also uses memory.
        model.loss(text[:, :-1], text[:, 1:]).backward()
    return (_kibibytes("VmHWM") - before) / 1024


def _kibibytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])


if __name__ == "__main__":
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    for name in ("full", "dilated", "block_sparse"):
        for ranks in (1, 2, 4):
            most = max(on_torch_ranks(ranks, grown, name, tokens, timeout=280))
            print(f"{name}: {tokens * ranks} tokens on {ranks}: {most:.0f} MiB", flush=True)
