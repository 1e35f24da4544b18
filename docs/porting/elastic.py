import torch
from torch import nn

import hvdtrain

torch.manual_seed(0)
data = torch.randn(2048, 20)
model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
config = {"batch.global_size": 128, "train.duration": 200}

with hvdtrain.training(model, optimizer, data, config=config) as training:
    for step in training:
        with step:
            for batch in step:
                step.backward(nn.functional.mse_loss(model(batch), batch))
