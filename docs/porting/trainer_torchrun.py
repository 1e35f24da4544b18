from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class TrainingArguments:
    max_steps: int = 90
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    max_grad_norm: float = 1.0
    eval_steps: int = 20


class TrainerCallback:
    def on_log(self, args, step, logs):
        if dist.get_rank() == 0:
            print(f"step {step + 1} of {args.max_steps}: {logs}")


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset, callbacks=()):
        self.args, self.callbacks = args, callbacks
        self.data, self.eval_dataset = train_dataset, eval_dataset
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.schedule)

    def schedule(self, step):
        warmup, last = self.args.warmup_steps, self.args.max_steps
        return min((step + 1) / warmup, max(0.0, (last - step) / (last - warmup)))

    def compute_loss(self, batch):
        return nn.functional.mse_loss(self.model(batch["x"]), batch["labels"])

    def batches(self):
        sampler = DistributedSampler(self.data)
        loader = DataLoader(self.data, self.args.per_device_train_batch_size, sampler=sampler)
        for epoch in range(self.args.max_steps):
            sampler.set_epoch(epoch)
            yield from loader

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        own = range(dist.get_rank(), len(self.eval_dataset), dist.get_world_size())
        total = torch.zeros(2)
        for batch in DataLoader(Subset(self.eval_dataset, own), 8):
            total += torch.tensor([self.compute_loss(batch) * len(batch["x"]), len(batch["x"])])
        dist.all_reduce(total)
        self.model.train()
        return total[0] / total[1]

    def maybe_evaluate(self, step):
        if (step + 1) % self.args.eval_steps == 0:
            loss = self.evaluate()
            for callback in self.callbacks:
                callback.on_log(self.args, step, {"eval_loss": float(loss)})

    def train(self):
        accumulated, batches = self.args.gradient_accumulation_steps, self.batches()
        for step in range(self.args.max_steps):
            for _ in range(accumulated):
                loss = self.compute_loss(next(batches)) / accumulated
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.maybe_evaluate(step)


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(512, 16)
data = [{"x": row, "labels": row.sin().sum(0, keepdim=True)} for row in x]
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
trainer = Trainer(model, TrainingArguments(), data[:448], data[448:], [TrainerCallback()])
trainer.train()
dist.destroy_process_group()
