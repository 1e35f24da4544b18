"""Building of the model to train: a directory's model, a classifier's classes, LoRA adapters.

LoRA through `peft`: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig, LoraConfig
from hvdtrain.tasks.huggingface_data import Classes
from hvdtrain.tasks.huggingface_model import CLASSIFIER, Folder, build


def build_trained(
    config: HuggingFaceTaskConfig,
    folder: Folder,
    classes: Classes | None,
    weights: bool,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A transformers.PreTrainedModel, or a peft.PeftModel around it, in train mode.

    Args:
        classes: of a classifier.
        weights: load the directory's weights; else initialise randomly.

    Raises:
        UserError: there is no such model, or it does not support the adapters.
    """
    if classes is not None:
        _prepare_classifier(folder, classes)
    model = build(folder, weights, dtype)
    return _with_adapters(config.lora, model, folder.kind) if config.lora.rank else model


def _prepare_classifier(folder: Folder, classes: Classes) -> None:
    folder.config.id2label = dict(enumerate(classes.labels))
    folder.config.label2id = {name: number for number, name in enumerate(classes.labels)}
    if folder.text.pad_token_id is None:
        folder.text.pad_token_id = classes.padding
    if folder.text.pad_token_id is None:
        raise UserError(
            f"huggingface.model: {folder.path} names no pad_token and no eos_token, and texts of "
            "different lengths need one: add pad_token_id to its config.json"
        )


def _with_adapters(config: LoraConfig, model: Any, kind: str) -> Any:
    """Add adapters; only their parameters, and a classifier's head, are trained."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"lora.rank needs peft ({error}): pip install 'hvdtrain[lora]'; lora.rank 0 trains all "
            "weights"
        ) from None
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS" if kind == CLASSIFIER else "CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.targets or "all-linear",
    )
    try:
        with warnings.catch_warnings():  # about settings that peft corrects itself
            warnings.simplefilter("ignore")
            return peft.get_peft_model(model, adapters)
    except ValueError as error:
        raise UserError(f"lora.targets: {' '.join(str(error).split())[:200]}") from None
