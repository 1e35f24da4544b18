"""Directories of tiny Transformers models as users have them, and JSON lines to train on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from hvdtrain.tasks.huggingface import HuggingFace
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig
from tests.support.runs import CORPUS

# Positions and vocabulary of each; only GPT-2 has dropout.
POSITIONS, VOCABULARY = 64, 320
_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": POSITIONS,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
    },
    "bert": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
# Chat templates: ChatML, and the same with marks around what the assistant writes.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CLASSES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}


def make(directory: Path, layout: str, class_name: str = "", **facts: Any) -> Path:
    """Make a directory with config.json, model.safetensors and a tokenizer.

    Args:
        layout: llama, gpt2 or bert; with class_name and all sizes, another model_type.
        class_name: class of transformers; default: the first training class of each layout.
        facts: more keys of config.json.
    """
    import transformers  # takes seconds

    end = {"llama": 1, "gpt2": 1}.get(layout)
    known = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": end, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(
        layout, **{**_SIZES.get(layout, {}), **known, **facts}
    )
    torch.manual_seed(0)
    model = getattr(transformers, class_name or _CLASSES[layout])(config)
    model.save_pretrained(directory)
    (_word_pieces() if layout == "bert" else _byte_pairs()).save(str(directory / "tokenizer.json"))
    special = {"eos_token": "</s>"} if end else {"pad_token": "[PAD]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return directory


def add_template(directory: Path, template: str = CHATML) -> Path:
    """Add a chat template, and the special tokens of ChatML, to a directory."""
    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(file))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def chats(file: Path, lines: int = 60) -> Path:
    """Write chats of one to three turns."""
    rows = []
    for number in range(lines):
        messages: list[dict[str, str]] = [{"role": "system", "content": "the work"}]
        for turn in range(1 + number % 3 if number % 7 else 1):
            messages.append({"role": "user", "content": "grant you"[: 2 + number % 7]})
            messages.append({"role": "assistant", "content": "THE" * (1 + (number + turn) % 2)})
        rows.append({"messages": messages[number % 2 :]})
    return write(file, rows)


def _byte_pairs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def _word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[CLS]", "[SEP]", "[PAD]", "[UNK]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=special, show_progress=False
    )
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    # As in some files: hvdtrain must not truncate or pad like this.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=128)
    return tokenizer


def answers(file: Path, lines: int = 60) -> Path:
    """Return prompts of several lengths, and their first words in capitals."""
    rows = []
    for number in range(lines):
        words = ["license", "work", "grant", "the", "you"][number % 5 :]
        rows.append({"prompt": " ".join(words) + ":", "answer": " " + words[0].upper()})
    return write(file, rows)


def labeled(file: Path, lines: int = 60) -> Path:
    """Return texts of several lengths, some of which begin with one word."""
    rows = []
    for number in range(lines):
        first = "License" if number % 2 else "Work"
        text = first + " of the work" * (number % 5)
        rows.append({"text": text, "label": "yes" if number % 2 else "no"})
    return write(file, rows)


def write(file: Path, rows: list[Any]) -> Path:
    """Write one line for each; text is written unchanged."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("\n".join(lines) + "\n")
    return file


class KilledHuggingFace(HuggingFace):
    """HuggingFace; HVDTRAIN_TEST_KILL=process:call sends SIGKILL in that training micro-batch."""

    def __init__(self, config: HuggingFaceTaskConfig) -> None:
        super().__init__(config)
        process, self._last = os.environ["HVDTRAIN_TEST_KILL"].split(":")
        # As at the start: a process of an elastic run prepares as a world of one.
        self._killed = process == psutil.Process().environ().get("HOROVOD_RANK")
        self._calls = 0

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        self._calls += model.training
        if self._killed and self._calls == int(self._last):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)
