from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import hvdtrain


@dataclass
class TrainingArguments:
    max_steps: int = 90
    per_device_train_batch_size: int = 4
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    eval_steps: int = 20


class TrainerCallback:
    def on_log(self, args, step, logs):
        if training.rank == 0:
            print(f"step {step + 1} of {args.max_steps}: {logs}")


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset, callbacks=()):
        self.args, self.callbacks = args, callbacks
        self.data, self.eval_dataset = train_dataset, eval_dataset
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.schedule)

    def schedule(self, step):
        warmup, last = self.args.warmup_steps, self.args.max_steps
        return min((step + 1) / warmup, max(0.0, (last - step) / (last - warmup)))

    def compute_loss(self, batch):
        return nn.functional.mse_loss(self.model(batch["x"]), batch["labels"])

    def evaluate(self):
        own = training.share(len(self.eval_dataset))
        total = torch.zeros(2)
        for batch in DataLoader(Subset(self.eval_dataset, own), 8):
            total += torch.tensor([self.compute_loss(batch) * len(batch["x"]), len(batch["x"])])
        return tuple(total)

    def maybe_evaluate(self, step):
        if (step + 1) % self.args.eval_steps == 0:
            loss = training.evaluate(self.evaluate)
            for callback in self.callbacks:
                callback.on_log(self.args, step, {"eval_loss": float(loss)})

    def train(self):
        for step in training:
            with step:
                for batch in step:
                    step.backward(self.compute_loss(batch))
            self.scheduler.step()
            self.maybe_evaluate(step.index)


torch.manual_seed(0)
x = torch.randn(512, 16)
data = [{"x": row, "labels": row.sin().sum(0, keepdim=True)} for row in x]
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
trainer = Trainer(model, TrainingArguments(), data[:448], data[448:], [TrainerCallback()])
config = {"batch.global_size": 16, "train.duration": 90, "optim.clip_norm": 1.0}
with hvdtrain.training(model, trainer.optimizer, trainer.data, config=config) as training:
    training.state["scheduler"] = trainer.scheduler
    trainer.train()
