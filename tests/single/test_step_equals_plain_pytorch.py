"""On one process, a run equals the plain PyTorch training loop."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from hvdtrain.checkpoint.format import read
from hvdtrain.data.order import sample_order
from hvdtrain.data.tokens import TokenWindows
from hvdtrain.models.gpt import GPT
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.runtime.device import seed_all
from tests.support.runs import CORPUS, metrics, train

STEPS, WARMUP, PEAK, FINAL, GLOBAL, MICRO, SEED = 20, 4, 3e-3, 0.1, 8, 2, 7
CLIP = 0.5  # low enough that most steps are clipped


def _by_hand() -> tuple[GPT, list[float], list[float]]:
    """Return the model after 20 steps, with the losses and gradient norms."""
    text = torch.frombuffer(bytearray(CORPUS.read_bytes()), dtype=torch.uint8)
    text = text[: len(text) - int(len(text) * 0.05)]
    windows = TokenWindows([text.numpy()], 32)
    seed_all(SEED)
    model = GPT(GPTConfig(layers=2, heads=2, width=32, context=32, vocab_size=256))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(STEPS):
        if step < WARMUP:
            lr = PEAK * (step + 1) / WARMUP
        else:
            progress = (step - WARMUP) / (STEPS - 1 - WARMUP)
            lr = PEAK * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        total = 0.0
        indices = sample_order(step * GLOBAL, (step + 1) * GLOBAL, len(windows), SEED)
        for micro_batch in indices.reshape(-1, MICRO):
            tokens = torch.stack([windows[i] for i in micro_batch])
            loss = model.loss(tokens[:, :-1], tokens[:, 1:]) / (GLOBAL // MICRO)
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return model, losses, norms


def test_run_on_one_process_gives_the_weights_of_plain_pytorch(tmp_path: Path) -> None:
    flags = (
        f"--seed {SEED} --train.duration {STEPS} --schedule.warmup_steps {WARMUP} --optim.lr {PEAK}"
        f" --optim.clip_norm {CLIP} --model.layers 2"
    )
    directory = train(tmp_path, "run", flags.split())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, losses, norms = _by_hand()
    finally:
        torch.set_num_threads(threads)
    saved = read(directory / f"checkpoints/step_{STEPS:08}").parts["model"]
    parameters = dict(model.named_parameters())
    assert saved.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(saved[name], parameter.detach()), name
    lines = metrics(directory)
    torch.testing.assert_close([line["loss"] for line in lines], losses, rtol=1e-6, atol=0)
    assert [line["grad_norm"] for line in lines] == norms
    assert sum(norm > CLIP for norm in norms) > STEPS // 2
