"""Export of a trained model to a directory that transformers or peft loads with from_pretrained."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.checkpoint.export import new_directory
from hvdtrain.errors import UserError
from hvdtrain.tasks.huggingface_build import build_trained
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig
from hvdtrain.tasks.huggingface_data import classes_of, tokenizer_file
from hvdtrain.tasks.huggingface_model import Folder, kind_of, read_directory

# Files to copy in addition to the weights and tokenizer.json.
_COPIED = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip


@torch.no_grad()
def export_trained(
    config: HuggingFaceTaskConfig, weights: Mapping[str, Tensor], out: Path, merge: bool
) -> None:
    """Write the directory `out` atomically.

    Args:
        config: of the run; its model directory must still exist.
        weights: of a checkpoint.
        merge: for a run with LoRA, add the adapters to the weights; otherwise only the adapters are
            written, in peft's format.

    Raises:
        UserError: something is missing, or `out` exists or cannot be written.
    """
    lora = config.lora.rank > 0
    folder = read_directory(config.huggingface.model, kind_of(config.huggingface.learn))
    classes = classes_of(config, folder)
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    model = build_trained(config, folder, classes, weights=False, dtype=dtype)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = [name for name in weights if name not in tensors]
    other = [n for n, t in weights.items() if n in tensors and tensors[n].shape != t.shape]
    if missing or other:
        raise UserError(
            f"{folder.path} is not the folder that the run began with: {len(missing + other)} "
            f"tensors differ, such as {(missing + other)[0]}"
        )
    for name, tensor in weights.items():
        tensors[name].copy_(tensor)
    if merge:
        model = model.merge_and_unload()
    elif lora:
        model.peft_config["default"].base_model_name_or_path = str(folder.path.resolve())
    with new_directory(out) as hidden:
        model.save_pretrained(hidden)
        _copy_tokenizer(config, folder, hidden)


def _copy_tokenizer(config: HuggingFaceTaskConfig, folder: Folder, out: Path) -> None:
    for name in _COPIED:
        if (folder.path / name).is_file():
            shutil.copyfile(folder.path / name, out / name)
    if config.data.source == "text":
        shutil.copyfile(tokenizer_file(config, folder), out / "tokenizer.json")
