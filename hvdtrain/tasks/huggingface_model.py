"""Models of `transformers` from a local directory, without downloads and without its code.

https://huggingface.co/docs/transformers/main_classes/model
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.models.attention import shares_heads
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig, LoraConfig

CAUSAL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
_KIND = {CAUSAL: "causal language model", CLASSIFIER: "classifier of texts"}
# Mappings of transformers' configurations to models of each kind.
_MODELS = {
    CAUSAL: "MODEL_FOR_CAUSAL_LM_MAPPING",
    CLASSIFIER: "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
}
# The last one: threads of tokenizers would not survive the fork of loader.workers.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
_POSITIONS_AFTER_PADDING = ("roberta", "camembert", "longformer")
# Maximum number of names in a message.
_NAMED = 6


def kind_of(learn: str | None) -> str:
    """The kind of model for a value of `huggingface.learn`."""
    return CLASSIFIER if learn == "labels" else CAUSAL


def library() -> Any:
    """Import transformers, offline and without log output.

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    os.environ.update(_ENVIRONMENT)  # read during the import
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"the task huggingface needs transformers ({error}): "
            "pip install 'hvdtrain[transformers]'"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@dataclass(frozen=True)
class Classes:
    """Classes of a classifier.

    Args:
        labels: names of the classes.
        padding: the token that pads a text at its end; None if there is none.
    """

    labels: tuple[str, ...]
    padding: int | None


@dataclass(frozen=True)
class ModelDirectory:
    """A model's directory.

    Args:
        path: path of the directory.
        kind: required kind of model, CAUSAL or CLASSIFIER.
        facts: config.json.
        config: the configuration object of transformers.
    """

    path: Path
    kind: str
    facts: dict[str, Any]
    config: Any

    @property
    def text(self) -> Any:
        """The text part of the configuration; in most models, all of it."""
        return self.config.get_text_config()

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model supports; None if unknown.

        RoBERTa and similar models count positions from the padding position on.
        """
        positions: int | None = getattr(self.text, "max_position_embeddings", None)
        if positions and any(name in self.text.model_type for name in _POSITIONS_AFTER_PADDING):
            return positions - 1 - (self.text.pad_token_id or 0)
        return positions

    @property
    def labels(self) -> list[str]:
        """Labels of a classifier, if config.json names them; otherwise empty."""
        names = self.facts.get("id2label")
        trained = any("SequenceClassification" in a for a in self.facts.get("architectures") or ())
        if self.kind != CLASSIFIER or not trained or not isinstance(names, dict):
            return []
        return [str(names[number]) for number in sorted(names, key=int)]

    @property
    def tokenizer(self) -> Path:
        """Path of tokenizer.json; raise UserError if there is none."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise UserError(
                f"huggingface.model: {self.path} has no tokenizer.json: name one with "
                "data.tokenizer, or make it from older files with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
        return path

    @property
    def tokenizer_facts(self) -> dict[str, Any]:
        """tokenizer_config.json; empty if there is none."""
        path = self.path / "tokenizer_config.json"
        return _json(path) if path.is_file() else {}

    def special_token(self, name: str) -> str | None:
        """Special token from tokenizer_config.json, such as eos_token."""
        token = self.tokenizer_facts.get(name)
        if isinstance(token, dict):  # with options for splitting
            token = token.get("content")
        return token if isinstance(token, str) else None

    def number_of(self, name: str) -> int | None:
        """Number of a special token in config.json, such as eos_token_id; the first of several."""
        found = getattr(self.text, name, None)
        if isinstance(found, list):
            return int(found[0]) if found else None
        return found

    @property
    def ends(self) -> list[int]:
        """Tokens that end a generated text, from generation_config.json."""
        path = self.path / "generation_config.json"
        found = _json(path).get("eos_token_id") if path.is_file() else None
        return [n for n in (found if isinstance(found, list) else [found]) if isinstance(n, int)]


def read_directory(path: str | None, kind: str) -> ModelDirectory:
    """Read a model's directory; raise UserError if there is no model that can be trained."""
    if not path:
        raise UserError(
            "huggingface.model: set it to the directory of a model, with its config.json; nothing "
            "is downloaded"
        )
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise UserError(
            f"huggingface.model: no directory {path} (from {os.getcwd()}); nothing is downloaded: "
            "a model is a directory with config.json, *.safetensors and tokenizer.json"
        )
    if not (directory / "config.json").is_file():
        adapters = (
            " (LoRA adapters alone are not a model)" * (directory / "adapter_config.json").is_file()
        )
        raise UserError(f"huggingface.model: {directory} has no config.json{adapters}")
    facts = _json(directory / "config.json")
    if (directory / "adapter_config.json").is_file():
        raise UserError(
            f"huggingface.model: {directory} has adapters in addition to its model: merge them "
            "first, or remove adapter_config.json"
        )
    if "quantization_config" in facts:
        raise UserError(
            f"huggingface.model: the weights in {directory} are quantized, and cannot be trained: "
            "use the original weights"
        )
    config = _config(directory, facts)
    if type(config) not in getattr(library(), _MODELS[kind]):
        raise UserError(
            f"huggingface.model: {directory} is a {config.model_type!r} model, and transformers "
            f"{library().__version__} has no {_KIND[kind]} of this type"
        )
    return ModelDirectory(directory, kind, facts, config)


def _config(directory: Path, facts: dict[str, Any]) -> Any:
    transformers = library()
    try:
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each architecture raises its own errors
        if "auto_map" in facts:
            raise UserError(
                f"huggingface.model: {directory} requires its own code (auto_map in config.json), "
                f"which is not run; transformers {transformers.__version__} does not include "
                f"{facts.get('model_type')!r}"
            ) from None
        raise _unreadable(directory / "config.json", error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"huggingface.model: {path}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"huggingface.model: {path} is not a JSON object")
    return content


def build(
    directory: ModelDirectory, weights: bool, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model, in train mode.

    Args:
        weights: load the directory's weights; else initialize randomly.

    Raises:
        UserError: transformers has no such model, or the weights are missing or do not fit.
    """
    transformers = library()
    transformers.AttentionInterface.register("sdpa", _attention)
    of_kind = getattr(transformers, directory.kind)
    options = {"trust_remote_code": False}
    try:
        if weights:
            _check_weights(directory.path)
            model, report = of_kind.from_pretrained(
                directory.path, config=directory.config, dtype=dtype, local_files_only=True,
                use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True,
                **options,
            )  # fmt: skip
            _check_report(directory, report)
        else:
            model = of_kind.from_config(directory.config, dtype=dtype, **options)
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, ImportError) as error:
        raise _unreadable(directory.path, error) from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise _unreadable(directory.path, error) from None
    model.train()  # from_pretrained returns it in eval mode, without dropout
    assert isinstance(model, nn.Module)
    return model


class _Ungrouped(NamedTuple):
    """A module's properties without its number of groups, by which heads would be repeated."""

    is_causal: bool


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """transformers' use of torch's attention, with equally many heads if the kernel needs them.

    transformers relies on kernels that accept fewer heads of keys and values, see `shares_heads`.

    Args:
        query: (batch, heads, time, head_size).
        key, value: (batch, key heads, time, head_size).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    share = query.shape[1] // key.shape[1]
    of_model: Any = module
    if share > 1 and not shares_heads(query):
        key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
        of_model = _Ungrouped(getattr(module, "is_causal", True))
    return sdpa_attention_forward(of_model, query, key, value, *args, **kwargs)


def has_weights(directory: Path) -> bool:
    """Whether a directory has weights of any kind, complete or not."""
    return any(
        (
            *directory.glob("*.safetensors"),
            *directory.glob("*.bin"),
            *directory.glob("*.index.json"),
        )
    )


def _check_weights(directory: Path) -> None:
    """Raise UserError if a file of the weights is missing."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = set(_json(index).get("weight_map", {}).values())
        missing = sorted(name for name in files if not (directory / name).is_file())
        if missing:
            raise UserError(f"huggingface.model: {directory} has no {', '.join(missing[:_NAMED])}")
    elif not (directory / "model.safetensors").is_file():
        pickled = sorted(path.name for path in directory.glob("*.bin"))
        instead = (
            f"; {pickled[0]} is a pickle, which can run code when it is loaded: convert it with "
            "save_pretrained of transformers, on a machine where that is safe"
            if pickled
            else ""
        )
        raise UserError(f"huggingface.model: {directory} has no model.safetensors{instead}")


def _check_report(directory: ModelDirectory, report: dict[str, Any]) -> None:
    """Check from_pretrained's report on the weights; a classifier's head may be missing."""
    missing = sorted(report["missing_keys"])
    shapes = sorted(str(key[0]) for key in report["mismatched_keys"])
    layers = [name for name in [*missing, *shapes] if re.search(r"\.\d+\.", name)]
    wrong = [*missing, *shapes] if directory.kind == CAUSAL else layers
    if wrong:
        raise UserError(
            f"huggingface.model: the weights in {directory.path} do not match its config.json: "
            f"missing or of another shape: {listed(wrong)}"
        )
    if missing or shapes:
        logger.warning("huggingface.model: initialized randomly: %s", listed([*missing, *shapes]))
    if report["unexpected_keys"]:
        unused = listed(sorted(report["unexpected_keys"]))
        logger.warning("huggingface.model: unused weights: %s", unused)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


@torch.no_grad()
def check_causal(directory: ModelDirectory, model: nn.Module) -> None:
    """Check that no prediction depends on later tokens, as BERT's does: it would learn nothing.

    Raises:
        UserError: a prediction depends on later tokens.
    """
    trained = model.training
    model.eval()
    count = min(8, directory.positions or 8)
    one = torch.arange(1, count + 1)[None] % directory.text.vocab_size
    other = one.clone()
    other[0, -1] = 0
    before, after = (model(input_ids=tokens).logits[0, :-1] for tokens in (one, other))
    model.train(trained)
    if (before - after).abs().max() > 1e-4 * before.abs().max():
        raise UserError(
            f"huggingface.model: {directory.path}: {type(model).__name__} attends to the tokens "
            "that it must predict; if its architecture can be causal, set is_decoder to true in "
            "config.json"
        )


@torch.no_grad()
def check_separable(directory: ModelDirectory, model: nn.Module) -> None:
    """Check that documents in one sample do not see each other: positions restart at each.

    transformers derives the mask from the positions, but some architectures ignore them.

    Raises:
        UserError: a prediction depends on an earlier document, or the model has no positions.
    """
    trained = model.training
    model.eval()
    first, second = 3, min(5, (directory.positions or 8) - 3)
    tokens = torch.arange(1, first + second + 1)[None] % directory.text.vocab_size
    positions = torch.cat((torch.arange(first), torch.arange(second)))[None]
    try:
        packed = model(input_ids=tokens, position_ids=positions).logits[0, first:]
        alone = model(input_ids=tokens[:, first:]).logits[0]
        separate = bool((packed - alone).abs().max() <= 1e-4 * alone.abs().max())
    except TypeError:  # no argument position_ids
        separate = False
    model.train(trained)
    if not separate:
        raise UserError(
            f"huggingface.model: {directory.path}: {type(model).__name__} cannot keep the "
            "documents of a sample apart: set huggingface.pack and data.document_mask to false"
        )


# --- the model to train: with a classifier's classes, with LoRA adapters ------


def build_trained(
    config: HuggingFaceTaskConfig,
    directory: ModelDirectory,
    classes: Classes | None,
    weights: bool,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A transformers.PreTrainedModel, or a peft.PeftModel around it, in train mode.

    LoRA: Hu et al., arXiv:2106.09685.

    Args:
        classes: classes of a classifier.
        weights: load the directory's weights; else initialize randomly.

    Raises:
        UserError: there is no such model, or it does not support the adapters.
    """
    if classes is not None:
        _prepare_classifier(directory, classes)
    model = build(directory, weights, dtype)
    return _with_adapters(config.lora, model, directory.kind) if config.lora.rank else model


def _prepare_classifier(directory: ModelDirectory, classes: Classes) -> None:
    directory.config.id2label = dict(enumerate(classes.labels))
    directory.config.label2id = {name: number for number, name in enumerate(classes.labels)}
    if directory.text.pad_token_id is None:
        directory.text.pad_token_id = classes.padding
    if directory.text.pad_token_id is None:
        raise UserError(
            f"huggingface.model: {directory.path} has neither a pad_token nor an eos_token, and "
            "texts of different lengths need one: add pad_token_id to its config.json"
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
