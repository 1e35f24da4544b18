import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

hvd.init()
torch.manual_seed(42)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
train, test = random_split(data, [1600, len(data) - 1600])
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=16, sampler=sampler)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def evaluate():
    x, y = test[[*range(hvd.rank(), len(test), hvd.size())]]
    return (model(x).argmax(1) == y).sum(), len(y)


for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    correct, _ = evaluate()
    accuracy = hvd.allreduce(correct, op=hvd.Sum).item() / len(test)
    if hvd.rank() == 0:
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")
