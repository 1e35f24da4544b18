import torch
from torch import nn
from torch.utils.data import TensorDataset

import hvdtrain

torch.manual_seed(0)
x = torch.randn(2048, 20)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 128)
config = {"batch.global_size": 32, "train.duration": "2epochs", "optim.clip_norm": 1.0}
with hvdtrain.training(model, optimizer, data, config=config) as training:
    training.state["scheduler"] = scheduler
    for step in training:
        with step:
            for inputs, wanted in step:
                step.backward(nn.functional.mse_loss(model(inputs), wanted))
        scheduler.step()
