"""A script of Horovod alone: it saves after each step, and continues from what it saved.

Arguments: the file, and seconds of pause after each of 40 steps.
"""

import os
import sys
import time

import horovod.torch as hvd
import torch

file, pause = sys.argv[1], float(sys.argv[2])
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 0
if hvd.rank() == 0 and os.path.exists(file):
    saved = torch.load(file)
    first = saved["step"]
    model.load_state_dict(saved["model"])
first = int(hvd.broadcast(torch.tensor(first), root_rank=0))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(first, 40):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[hvd.rank() :: hvd.size()]
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if hvd.rank() == 0:
        torch.save({"step": step + 1, "model": model.state_dict()}, file + ".part")
        os.replace(file + ".part", file)
        print("STEP", step, float(loss), flush=True)
    time.sleep(pause)
