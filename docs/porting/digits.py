import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import hvdtrain

torch.manual_seed(42)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images).float() / 16, torch.tensor(labels))
train, test = random_split(data, [1600, len(data) - 1600])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
config = {"batch.global_size": 16, "batch.micro_size": 4, "train.duration": "3epochs"}


def evaluate():
    x, y = test[[*training.share(len(test))]]
    return (model(x).argmax(1) == y).sum(), len(y)


with hvdtrain.training(model, optimizer, train, config=config) as training:
    for step in training:
        with step:
            for x, y in step:
                loss = nn.functional.cross_entropy(model(x), y)
                step.backward(loss)
        if step.index % 100 == 99:
            training.log(step, accuracy=training.evaluate(evaluate))
