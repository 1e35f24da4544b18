"""The language model: a GPT that learns to predict the next token of text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain.data.config import DataConfig
from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.tasks import Datasets

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.models.gpt import GPT


@dataclass
class LanguageModelConfig:
    """Keys of the task language_model.

    Args:
        model: the GPT
        data: text or tokens to train on
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)


class LanguageModel:
    """Next-token prediction; torch is imported by its methods, not by its configuration."""

    Config = LanguageModelConfig
    defaults: ClassVar[dict[str, Any]] = {"train.steps": 400, "optim.lr": 3e-3}

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config = config
        self.units = ("tokens", config.model.context)
        self._vocab_size = 0
        self._prompt: list[int] = []

    def datasets(self) -> Datasets:
        from hvdtrain.data.text import Tokenizer, cut, read_text
        from hvdtrain.data.tokens import TokenWindows, read_token_files

        data, context = self.config.data, self.config.model.context
        self._tokenizer = None
        if data.source == "text":
            self._tokenizer = Tokenizer(data.tokenizer)
            self._vocab_size = self._tokenizer.vocab_size
            train_tokens, validation_tokens = read_text(data, self._tokenizer.encode)
            train_arrays, validation_arrays = [train_tokens], [validation_tokens]
        else:
            train_arrays, meta = read_token_files("data.train", data.train)
            self._vocab_size = meta.vocab_size
            if data.validation:
                validation_arrays, other = read_token_files("data.validation", data.validation)
                if other != meta:
                    raise UserError(f"data.train is {meta}, but data.validation is {other}")
            else:
                *rest, last = train_arrays
                last, end = cut(last, data.validation_fraction)
                train_arrays, validation_arrays = [*rest, last], [end]
        self._check_vocabulary()
        train = TokenWindows(train_arrays, context)
        validation = TokenWindows(validation_arrays, context)
        for key, windows in (("data.train", train), ("data.validation", validation)):
            if len(windows) == 0:
                raise UserError(
                    f"{key}: {windows.tokens} tokens (from {_source(data, key)}) are too few for "
                    f"one sample of model.context + 1 = {context + 1}"
                )
        self._prompt = validation[0][: min(16, context)].tolist()
        return Datasets(train, validation, train.fingerprint())

    def _check_vocabulary(self) -> None:
        wanted = self.config.model.vocab_size
        if wanted is not None and wanted < self._vocab_size:
            raise UserError(
                f"model.vocab_size {wanted} is less than the {self._vocab_size} tokens of the data"
            )

    def model(self) -> GPT:
        from hvdtrain.models.gpt import GPT

        config = self.config.model
        return GPT(replace(config, vocab_size=config.vocab_size or self._vocab_size))

    def loss(self, model: GPT, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": model.loss(batch[:, :-1], batch[:, 1:])}

    def sample(self, model: GPT, length: int = 200, max_seconds: float = 20.0) -> str:
        """Text that the model writes after the first 16 tokens of the validation data."""
        import torch

        context = self.config.model.context
        device = next(model.parameters()).device
        tokens = torch.tensor([self._prompt], device=device)
        generator = torch.Generator().manual_seed(0)
        deadline = time.monotonic() + max_seconds
        for _ in range(length):
            logits = model(tokens[:, -context:])[0, -1, : self._vocab_size]
            chosen = torch.multinomial(
                (logits.float().cpu() / 0.8).softmax(-1), 1, generator=generator
            )
            tokens = torch.cat((tokens, chosen.to(device)[None]), dim=1)
            if time.monotonic() > deadline:
                break
        ids = tokens[0].tolist()
        return self._tokenizer.decode(ids) if self._tokenizer else " ".join(map(str, ids))


def _source(data: DataConfig, key: str) -> str:
    """Where tokens come from; validation falls back to a fraction of the training files."""
    named = data.validation if key == "data.validation" and data.validation else data.train
    return ", ".join(named) or "the standard library"
