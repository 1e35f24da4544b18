import time

import numpy as np
import torch
from images import resnet
from torch import nn

import hvdtrain

torch.manual_seed(0)
model = resnet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images, labels = torch.randn(8, 3, 12, 12), torch.randint(4, (8,))
config = {"batch.global_size": 24, "train.duration": 110}
rates = []
with hvdtrain.training(model, optimizer, config=config) as training:
    for step in training:
        began = time.perf_counter()
        with step:
            for numbers in step:
                of = numbers % len(images)
                step.backward(nn.functional.cross_entropy(model(images[of]), labels[of]))
        rates.append(24 / (time.perf_counter() - began))
        if training.rank == 0 and step.index % 10 == 9:
            print(f"Img/sec on {training.size} processes: {np.mean(rates[-10:]):.1f}")
