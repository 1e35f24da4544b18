"""What a rank of the task `huggingface` imports, for the parents of forked ranks (warm.py)."""

import importlib

from hvdtrain.tasks.huggingface_model import library

library()
for _name in ("llama", "gpt2", "bert"):
    importlib.import_module(f"transformers.models.{_name}.modeling_{_name}")
importlib.import_module("peft")
