"""Configuration of the task huggingface."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.data.config import DataConfig
from hvdtrain.errors import require

_DATE = "2026-01-01"  # of runs that configure none


@dataclass
class HuggingFaceConfig:
    """A model of transformers, and its training objective.

    Args:
        model: directory with config.json, tokenizer.json and *.safetensors, from whose weights
            training starts; without *.safetensors it starts from random weights
        learn: `text`: each next token of text or tokens; `answers`: the answers to prompts and the
            assistant's turns of chats, from JSON lines; `labels`: the classes of texts, from JSON
            lines; null = `answers` or `text`, as the first of the JSON lines shows; `text` for
            other files
        context: maximum tokens per sample; null = as many as the model has positions, up to 1024
        input_key: key of a JSON line's prompt, chat or text; null = recognized; for labels `text`
        target_key: key of a JSON line's answer or label; null = recognized; for labels `label`
        chat_template: file with a chat template (Jinja) to use instead of the tokenizer's, also for
            prompts and answers; null = the tokenizer's, for chats and Alpaca's records
        date: day that a chat template writes as the current date, such as 2026-11-30; null =
            2026-01-01: all ranks and all starts of a run see the same tokens
        pack: put several answers or chats into one sample of `huggingface.context` tokens; none of
            them sees another
        labels: names of the classes; empty = the classes of the directory's classifier, or else of
            the data
        truncate: truncate a JSON line of more than `huggingface.context` tokens at its end; false =
            abort the run
    """

    model: str | None = basic(None)
    learn: Literal["text", "answers", "labels"] | None = basic(None)
    context: int | None = basic(None)
    input_key: str | None = None
    target_key: str | None = None
    chat_template: str | None = None
    date: str | None = None
    pack: bool = False
    labels: list[str] = field(default_factory=list)
    truncate: bool = False

    def __post_init__(self) -> None:
        require(
            self.context is None or self.context >= 2,
            f"huggingface.context must be >= 2, not {self.context}",
        )
        try:
            _ = self.day
        except ValueError:
            raise ValueError(
                f"huggingface.date must be a day such as 2026-11-30, not {self.date!r}"
            ) from None
        require(
            not self.labels or self.learn == "labels",
            f"huggingface.labels are for huggingface.learn labels, not {self.learn}",
        )
        require(
            self.learn in (None, "answers") or not (self.pack or self.chat_template),
            "huggingface.pack and huggingface.chat_template are for huggingface.learn answers, not "
            f"{self.learn}",
        )

    @property
    def day(self) -> datetime.date:
        """The day that a chat template writes as the current date."""
        return datetime.date.fromisoformat(self.date or _DATE)


@dataclass
class LoraConfig:
    """Adapters, which are trained instead of the weights.

    Args:
        rank: rank of the matrices added to a layer's weights; 0 = no LoRA: all weights are trained
        alpha: the matrices' product is scaled by alpha / rank
        dropout: dropout rate of the adapters' inputs
        targets: layers with adapters, by the last parts of their names; empty = all linear layers
            except the head
    """

    rank: int = basic(0)
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] = expert(factory=list)

    def __post_init__(self) -> None:
        require(self.rank >= 0, f"lora.rank must be >= 0 (0 = no LoRA), not {self.rank}")
        require(self.alpha > 0, f"lora.alpha must be > 0, not {self.alpha}")
        require(0 <= self.dropout < 1, f"lora.dropout must lie in [0, 1), not {self.dropout}")


@dataclass
class HuggingFaceTaskConfig:
    """Keys of the task huggingface.

    Args:
        huggingface: the model, and its training objective
        lora: adapters, which are trained instead of the weights
        data: text, tokens or JSON lines; `data.tokenizer` null is the directory's tokenizer
    """

    huggingface: HuggingFaceConfig = field(default_factory=HuggingFaceConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
