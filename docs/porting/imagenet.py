import argparse

import torch
from images import ImageFolder, resnet
from torch import nn
from torch.utils.data import DataLoader, Subset

import hvdtrain

parser = argparse.ArgumentParser()
parser.add_argument("--images", default="images")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--warmup-epochs", type=float, default=1)
args, _ = parser.parse_known_args()
torch.manual_seed(42)
train, test = ImageFolder(f"{args.images}/train"), ImageFolder(f"{args.images}/val", 4, 12)
model = resnet()
base_lr = 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=base_lr, momentum=0.9, weight_decay=5e-5)
config = {"batch.global_size": 16, "batch.micro_size": 4, "train.duration": f"{args.epochs}epochs"}


def mirrored(x):
    return x.flip(-1) if torch.rand(()) < 0.5 else x


def set_lr(step, steps_per_epoch):
    epoch = step / steps_per_epoch
    warmup = min(1, 0.1 + 0.9 * epoch / args.warmup_epochs)
    for group in optimizer.param_groups:
        group["lr"] = base_lr * warmup * 0.1 ** sum(epoch >= end for end in (2, 3))


def accuracy():
    own = training.share(len(test))
    correct = torch.zeros(2)
    for x, y in DataLoader(Subset(test, own), batch_size=8):
        correct += torch.tensor([(model(x).argmax(1) == y).sum(), len(y)])
    return tuple(correct)


with hvdtrain.training(model, optimizer, train, config=config) as training:
    for step in training:
        set_lr(step.index, len(train) / 16)
        with step:
            for inputs, labels in step:
                loss = nn.functional.cross_entropy(model(mirrored(inputs)), labels)
                step.backward(loss)
        if step.index % 12 == 11:
            training.log(step, accuracy=training.evaluate(accuracy))
