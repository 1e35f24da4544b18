import timeit

import horovod.torch as hvd
import numpy as np
import torch
from images import resnet
from torch import nn

hvd.init()
torch.manual_seed(0)
model = resnet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
compression = hvd.Compression.fp16
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
images, labels = torch.randn(8, 3, 12, 12), torch.randint(4, (8,))


def benchmark_step():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=10)
rates = []
for iteration in range(10):
    seconds = timeit.timeit(benchmark_step, number=10)
    rates.append(len(images) * 10 / seconds)
    if hvd.rank() == 0:
        print(f"Iter {iteration}: {rates[-1]:.1f} img/sec per process")
if hvd.rank() == 0:
    print(f"Img/sec on {hvd.size()} processes: {hvd.size() * np.mean(rates):.1f}")
