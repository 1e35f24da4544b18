import argparse
import math
import os

import horovod.torch as hvd
import torch
from images import ImageFolder, resnet
from torch import nn
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--images", default="images")
parser.add_argument("--format", default="checkpoint-{epoch}.pt")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--warmup-epochs", type=float, default=1)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
args, _ = parser.parse_known_args()
torch.manual_seed(42)
hvd.init()
train, test = ImageFolder(f"{args.images}/train"), ImageFolder(f"{args.images}/val", 4, 12)
train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train, batch_size=4 * args.batches_per_allreduce, sampler=train_sampler)
model = resnet()
base_lr = 0.0125 * args.batches_per_allreduce * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=base_lr, momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16,
    backward_passes_per_step=args.batches_per_allreduce,
)
resume_from = 0
for epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.format.format(epoch=epoch)):
        resume_from = epoch
        break
resume_from = hvd.broadcast(torch.tensor(resume_from), root_rank=0).item()
if resume_from and hvd.rank() == 0:
    checkpoint = torch.load(args.format.format(epoch=resume_from))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def mirrored(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def set_lr(step, steps_per_epoch):
    epoch = step / steps_per_epoch
    warmup = min(1, (epoch * (hvd.size() - 1) / args.warmup_epochs + 1) / hvd.size())
    for group in optimizer.param_groups:
        group["lr"] = base_lr * warmup * 0.1 ** sum(epoch >= end for end in (2, 3))


def accuracy():
    own = range(hvd.rank(), len(test), hvd.size())
    correct = torch.zeros(2)
    for x, y in DataLoader(Subset(test, own), batch_size=8):
        correct += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    return correct


for epoch in range(resume_from, args.epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        set_lr(epoch * len(loader) + number, len(loader))
        optimizer.zero_grad()
        for part in range(0, len(x), 4):
            inputs, labels = x[part : part + 4], y[part : part + 4]
            loss = nn.functional.cross_entropy(model(mirrored(inputs)), labels)
            loss.div(math.ceil(len(x) / 4)).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct, seen = hvd.allreduce(accuracy(), op=hvd.Sum)
    if hvd.rank() == 0:
        print(f"epoch {epoch + 1}: accuracy {correct / seen:.3f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.format.format(epoch=epoch + 1))
