"""Runs that other trainers begin, and that hvdtrain continues: one function for each trainer.

    python -m tests.support.other_trainers train DIR       trains and saves with the real trainers
    python -m tests.support.other_trainers continue DIR --run.root ROOT

Each trains 20 steps and saves after 10. Both parts build the same model, optimizer and data.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import hvdtrain
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig

STEPS, SAVED_AT = 20, 10
GLOBAL, MICRO = 8, 2
VOCABULARY, CONTEXT = 31, 12
Loss = Callable[[nn.Module, Any], Tensor]


class Samples(Dataset[Any]):
    """Samples made from their numbers, which are recorded when they are read."""

    fingerprint = "made from numbers"

    def __init__(self, make: Callable[[torch.Generator], Any], size: int) -> None:
        self._make, self._size = make, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._make(torch.Generator().manual_seed(index))


def _rows(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, generator=generator)
    return x, x.sum().sin()[None]


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (CONTEXT,), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _batches(data: Samples, seed: int) -> Iterator[Any]:
    """Global batches as torch's DistributedSampler orders the samples."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, seed=seed)
    loader = DataLoader(data, GLOBAL, sampler=sampler)
    for epoch in range(STEPS * GLOBAL // len(data)):
        sampler.set_epoch(epoch)
        yield from loader


def _mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def _squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _continue(
    name: str,
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset[Any] | None,
    loss: Loss,
    scheduler: Any = None,
    rate: Callable[[int], float] | None = None,
    keys: Mapping[str, Any] | None = None,
) -> None:
    config = {
        "batch.global_size": GLOBAL, "batch.micro_size": MICRO, "train.duration": STEPS,
        "telemetry.port": 0, "run.id": name, **(keys or {}),
    }  # fmt: skip
    words, source = sys.argv[3:], directory / name
    with hvdtrain.training(model, optimizer, data, config=config, argv=words, takeover=source) as t:
        if scheduler is not None:
            t.state["scheduler"] = scheduler
        for step in t:
            if rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate(step.index)
            with step:
                for batch in step:
                    step.backward(loss(model, batch))
            if scheduler is not None:
                scheduler.step()


# --- nanoGPT ------------------------------------------------------------------


class _NanoBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)}
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn["c_proj"](y)
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class NanoGpt(nn.Module):
    """A GPT with the names of nanoGPT's, whose last layer is its embedding."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, width),
                "wpe": nn.Embedding(CONTEXT, width),
                "h": nn.ModuleList(_NanoBlock(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        of, places = self.transformer, torch.arange(tokens.shape[1])
        x = of["wte"](tokens) + of["wpe"](places)
        for block in of["h"]:  # type: ignore[union-attr]
            x = block(x)
        logits: Tensor = self.lm_head(of["ln_f"](x))
        return logits


def _nano() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and the optimizer of its configure_optimizers."""
    torch.manual_seed(2)
    model = NanoGpt()
    parameters = [*model.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def _nano_rate(step: int) -> float:
    return 1e-2 * (step + 1) / 5 if step < 4 else 1e-2 * (1 - step / 40)


def _nano_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["input_ids"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _train_nanogpt(path: Path) -> Iterator[float]:
    model, optimizer = _nano()
    compiled = torch.compile(model)  # not called: its state_dict() has other names
    batches = _batches(Samples(_tokens, 4 * GLOBAL), seed=11)
    for step in range(STEPS):
        if step == SAVED_AT:
            content = {
                "model": compiled.state_dict(), "optimizer": optimizer.state_dict(),
                "model_args": {"n_layer": 2, "n_head": 2, "n_embd": 16}, "iter_num": step,
                "best_val_loss": torch.tensor(3.0),
                "config": {
                    "batch_size": MICRO, "gradient_accumulation_steps": GLOBAL // MICRO,
                    "grad_clip": 1.0,
                },
            }  # fmt: skip
            torch.save(content, path)
        for group in optimizer.param_groups:
            group["lr"] = _nano_rate(step)
        loss = _nano_loss(model, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _continue_nanogpt(name: str, directory: Path) -> None:
    model, optimizer = _nano()
    keys = {"loader.order": "torch", "seed": 11, "optim.clip_norm": 1.0}
    data = Samples(_tokens, 4 * GLOBAL)
    _continue(name, directory, model, optimizer, data, _nano_loss, rate=_nano_rate, keys=keys)


# --- a PyTorch script, whose optimizer counts no steps ------------------------


def _script() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def _train_script(path: Path) -> Iterator[float]:
    model, optimizer, scheduler = _script()
    for step, batch in enumerate(_batches(Samples(_rows, 4 * GLOBAL), seed=0)):
        if step == SAVED_AT:
            states = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
            content: dict[str, Any] = {name: one.state_dict() for name, one in states.items()}
            content["lr_scheduler"] = [content["lr_scheduler"]]
            torch.save({**content, "epoch": 2, "step": 2, "global_step": torch.tensor(step)}, path)
        loss = _squares(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield loss.item()


def _continue_script(name: str, directory: Path) -> None:
    model, optimizer, scheduler = _script()
    keys = {"loader.order": "torch", "seed": 0}
    data = Samples(_rows, 4 * GLOBAL)
    _continue(name, directory, model, optimizer, data, _squares, scheduler, keys=keys)


# --- the Trainer of transformers ----------------------------------------------


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, **sizes))


def _train_transformers(path: Path) -> Iterator[float]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(path), max_steps=STEPS, save_steps=SAVED_AT, logging_steps=1, seed=42,
        per_device_train_batch_size=MICRO, gradient_accumulation_steps=GLOBAL // MICRO,
        learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=4, weight_decay=0.1,
        report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(llama(), arguments, train_dataset=Samples(_tokens, 6 * GLOBAL))
    trainer.train()
    shutil.rmtree(path / f"checkpoint-{STEPS}")  # else it is the newest one
    yield from (line["loss"] for line in trainer.state.log_history if "loss" in line)


def _continue_transformers(name: str, directory: Path) -> None:
    from transformers import Trainer, get_cosine_schedule_with_warmup

    model = llama()
    decayed = {*Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    named = [*model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if n in decayed], "weight_decay": 0.1},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, STEPS)
    keys = {"loader.order": "torch", "seed": 42, "optim.clip_norm": 1.0}
    data = Samples(_tokens, 6 * GLOBAL)
    _continue(
        name, directory, model, optimizer, data, lambda m, b: m(**b).loss, scheduler, keys=keys
    )


def _adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = llama()
    torch.manual_seed(4)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def _train_peft(path: Path) -> Iterator[float]:
    """Adapters of PEFT, with an optimizer of one group."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(path), max_steps=STEPS, save_steps=SAVED_AT, logging_steps=1, seed=42,
        per_device_train_batch_size=GLOBAL, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = _adapted()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    data = Samples(_tokens, 6 * GLOBAL)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    shutil.rmtree(path / f"checkpoint-{STEPS}")
    yield from (line["loss"] for line in trainer.state.log_history if "loss" in line)


def _continue_peft(name: str, directory: Path) -> None:
    model = _adapted()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    keys = {"loader.order": "torch", "seed": 42, "optim.clip_norm": 1.0}
    data = Samples(_tokens, 6 * GLOBAL)
    loss: Loss = lambda model, batch: model(**batch).loss  # noqa: E731
    _continue(name, directory, model, optimizer, data, loss, scheduler, keys=keys)


# --- Accelerate ---------------------------------------------------------------


def _adam() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def _train_accelerate(path: Path) -> Iterator[float]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    sampler = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=sampler)
    model, optimizer, scheduler = _adam()
    torch.manual_seed(5)
    loader = DataLoader(Samples(_rows, 4 * GLOBAL), GLOBAL, shuffle=True)
    own = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = own
    step = 0
    for _ in range(STEPS // 4):
        for batch in loader:
            if step == SAVED_AT:
                accelerator.save_state(str(path))
            loss = _squares(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            yield loss.item()


def _continue_adam(name: str, directory: Path, seed: int = 5, clip_norm: float = 0.0) -> None:
    model, optimizer, scheduler = _adam()
    keys: dict[str, Any] = {"loader.order": "torch", "seed": seed, "optim.clip_norm": clip_norm}
    data = Samples(_rows, 4 * GLOBAL)
    _continue(name, directory, model, optimizer, data, _squares, scheduler, keys=keys)


# --- Lightning ----------------------------------------------------------------


def _train_lightning(path: Path) -> Iterator[float]:
    import pytorch_lightning as pl

    found: list[float] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.own_optimizer, self.scheduler = _adam()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = _squares(self.net, batch)
            found.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            schedule = {"scheduler": self.scheduler, "interval": "step"}
            return {"optimizer": self.own_optimizer, "lr_scheduler": schedule}

    data = Samples(_rows, 4 * GLOBAL)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1, 0, seed=7)
    saves = pl.callbacks.ModelCheckpoint(
        path.parent, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1
    )
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", logger=False, callbacks=[saves],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data, GLOBAL, sampler=sampler))
    (path.parent / f"step={SAVED_AT}.ckpt").rename(path)
    yield from found


# --- DeepSpeed ----------------------------------------------------------------


def _train_deepspeed(path: Path) -> Iterator[float]:
    """Of stage 1, converted by DeepSpeed's own tool. By default it clips gradients to 1."""
    from argparse import Namespace

    import deepspeed
    from deepspeed.checkpoint import ds_to_universal

    model, optimizer, scheduler = _adam()
    config = {
        "train_batch_size": GLOBAL, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    for step, batch in enumerate(_batches(Samples(_rows, 4 * GLOBAL), seed=9)):
        if step == SAVED_AT:
            engine.save_checkpoint(str(path.parent / "deepspeed_own"), tag="own")
        loss = _squares(engine, batch)
        engine.backward(loss)
        engine.step()
        yield loss.item()
    arguments = Namespace(
        input_folder=str(path.parent / "deepspeed_own/own"), output_folder=str(path),
        num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True,
        inject_missing_state=True,
    )  # fmt: skip
    ds_to_universal.main(arguments)


# --- torchtitan, Megatron-LM: their files, saved by them on a CPU -------------
#
# Both need a GPU unless many of their functions are replaced, so tests keep their files. torchtitan
# 0.3.0's own Trainer has saved one; the other is of megatron-core 0.16.1's GPTModel, optimizer and
# dist_checkpointing. losses.json has the losses of the 20 steps that they did.

_DATA = Path(__file__).parents[1] / "data"
_WORDS, _LENGTH = 12, 8  # tokens in the vocabulary, and in a sample


def _kept(source: Path) -> Callable[[Path], Iterator[float]]:
    def train(path: Path) -> Iterator[float]:
        shutil.copytree(source, path)
        yield from json.loads((source / "losses.json").read_text())

    return train


def _gpt(**sizes: Any) -> nn.Module:
    return GPT(
        GPTConfig(
            heads=2, width=8, mlp="swiglu", mlp_width=12, bias=False, vocab_size=_WORDS,
            context=_LENGTH, **sizes,
        )
    )  # fmt: skip


def _next_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class _Chains(Samples):
    """Samples in the order of their numbers, four in a step."""

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._of = make
        self.shard_samples = [4 * STEPS]

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> Tensor:
        return self._of(index)


_IN_ORDER = {"batch.global_size": 4, "loader.order": "sequential", "loader.shuffle_buffer": 4}


def _titan_sample(index: int) -> Tensor:
    """A document between the tokens 0 and 1."""
    generator = torch.Generator().manual_seed(index)
    words = [int(torch.randint(0, _WORDS - 2, (1,), generator=generator))]
    while len(words) < _LENGTH - 1:
        words.append((3 * words[-1] + 1) % (_WORDS - 2))
    return torch.tensor([0, *(word + 2 for word in words), 1])


def _continue_torchtitan(name: str, directory: Path) -> None:
    model = _gpt(layers=1, kv_heads=1, norm="rms", tied_embeddings=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    data = _Chains(_titan_sample)
    _continue(name, directory, model, optimizer, data, _next_tokens, keys=_IN_ORDER)


def _megatron_sample(index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index // 4 + 1)  # the step's number
    tokens = [torch.randint(0, _WORDS, (4,), generator=generator)[index % 4]]
    while len(tokens) < _LENGTH + 1:
        tokens.append((3 * tokens[-1] + 1) % _WORDS)
    return torch.stack(tokens)


def _continue_megatron(name: str, directory: Path) -> None:
    model = _gpt(layers=2, positions="learned")
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, 1e-3, (0.9, 0.95))
    data = _Chains(_megatron_sample)
    _continue(name, directory, model, optimizer, data, _next_tokens, keys=_IN_ORDER)


# --- all ----------------------------------------------------------------------

TRAINERS: dict[str, tuple[Callable[[Path], Iterator[float]], Callable[[str, Path], None]]] = {
    "nanogpt.pt": (_train_nanogpt, _continue_nanogpt),
    "script.pt": (_train_script, _continue_script),
    "transformers": (_train_transformers, _continue_transformers),
    "peft": (_train_peft, _continue_peft),
    "accelerate": (_train_accelerate, _continue_adam),
    "torchtitan": (_kept(_DATA / "torchtitan-0.3.0/run"), _continue_torchtitan),
    "megatron": (_kept(_DATA / "megatron-core-0.16.1"), _continue_megatron),
    "deepspeed": (
        _train_deepspeed,
        lambda name, directory: _continue_adam(name, directory, seed=9, clip_norm=1.0),
    ),
    "lightning.ckpt": (
        _train_lightning,
        lambda name, directory: _continue_adam(name, directory, seed=7),
    ),
}


def main(action: str, directory: Path) -> None:
    if action == "train":
        losses = {name: [*train(directory / name)] for name, (train, _) in TRAINERS.items()}
        (directory / "losses.json").write_text(json.dumps(losses))
        return
    for name, (_, go_on) in TRAINERS.items():
        go_on(name, directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
