"""A minimal script for torchrun, to which `start` is compared: `start_ddp.py METRICS`.

It trains the model of the preset gpt-nano with DistributedDataParallel, on random tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig

BATCH = 32


def main(metrics: str) -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    config = GPTConfig(layers=4, heads=4, width=128, context=128, vocab_size=256)
    model = DistributedDataParallel(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randint(256, (4096, 129)))
    size = BATCH // dist.get_world_size()
    for step, (tokens,) in enumerate(DataLoader(data, size, sampler=DistributedSampler(data))):
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            with Path(metrics).open("a") as file:
                print(json.dumps({"step": step}), file=file)


if __name__ == "__main__":
    main(sys.argv[1])
