"""A replica group of torchft, for `torchft-recovery`: `torchft_group.py METRICS PACE`.

TORCHFT_LIGHTHOUSE: address of the lighthouse. Trains a small model for ever, as
tests.support.tasks.Paced: PACE seconds per micro-batch.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main(metrics: str, pace: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        replica_id=Path(metrics).stem,
    )
    replicated, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    while True:
        managed.zero_grad()
        step = manager.current_step()
        samples = torch.randn(2, 8)
        time.sleep(float(pace))
        nn.functional.mse_loss(replicated(samples), samples.sum(1, keepdim=True)).backward()
        managed.step()
        if manager.current_step() > step:  # committed
            line = {"time": time.time(), "world_size": manager.num_participants()}
            with Path(metrics).open("a") as file:
                print(json.dumps(line), file=file)


if __name__ == "__main__":
    main(*sys.argv[1:])
