import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
torch.manual_seed(0)
data = torch.randn(2048, 20)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.batch < 200:
        batch = data[hvd.rank() :: hvd.size()][state.batch % 16 :: 16]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
        state.batch += 1
        if state.batch % 10 == 0:
            state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
