"""Training of Hugging Face transformers models on text, answers or labels, and their export."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain.errors import UserError
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.tasks.huggingface_data import TextData
    from hvdtrain.tasks.huggingface_model import ModelDirectory

# Files to export in addition to the weights and tokenizer.json.
_COPIED = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
_SHOWN = 5  # number of texts shown with their predicted labels
_PROMPT = 16  # tokens of packed text to continue
_WRITTEN, _SECONDS = 100, 20.0  # most tokens to generate, and the time limit


class HuggingFace:
    """A causal language model or a classifier; its methods import torch."""

    Config = HuggingFaceTaskConfig
    defaults: ClassVar[dict[str, Any]] = {
        "batch.global_size": 16,
        "batch.micro_size": 4,
        "train.steps": 400,
        "optim.lr": 5e-5,
    }

    def __init__(self, config: HuggingFaceTaskConfig) -> None:
        self.config = config
        self.units: tuple[str, int] | None = None
        self._classifies = config.huggingface.learn == "labels"
        self.metrics = ("accuracy",) if self._classifies else ()
        self._directory: ModelDirectory | None = None
        self._data: TextData | None = None

    def datasets(self) -> Datasets:
        from hvdtrain.tasks.huggingface_data import read_data
        from hvdtrain.tasks.huggingface_model import kind_of, read_directory

        own = self.config.huggingface
        self._directory = read_directory(own.model, kind_of(own.learn))
        self._data = read_data(self.config, self._directory)
        if own.learn == "text":
            self.units = ("tokens", self._data.context)
        return self._data.datasets

    def model(self) -> nn.Module:
        from hvdtrain.tasks.huggingface_model import build_trained, check_causal

        assert self._directory is not None and self._data is not None
        # Cached keys and values are for generation, not for training.
        self._directory.text.use_cache = False
        own = self.config.huggingface
        model: nn.Module = build_trained(
            self.config, self._directory, self._data.classes, own.weights
        )
        if self._data.classes is None:
            check_causal(self._directory, model)
        return model

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Sums over tokens, or texts, and their number.

        Args:
            batch: for text int64 (N, context + 1); for answers tokens and targets, (N, context)
                each; for labels tokens (N, context), their numbers (N,) and labels (N,).
        """
        if self._classifies:
            return self._loss_of_labels(model, *batch)
        if self.config.huggingface.learn == "text":
            return _loss_of_tokens(model, batch[:, :-1], batch[:, 1:])
        tokens, targets = _without_padding(batch[0], batch[1], batch[1] >= 0)
        return _loss_of_tokens(model, tokens, targets)

    def _loss_of_labels(
        self, model: nn.Module, tokens: Tensor, lengths: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        import torch
        from torch.nn.functional import cross_entropy

        seen = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        tokens, mask = _without_padding(tokens, seen.long(), seen)
        scores = model(input_ids=tokens, attention_mask=mask).logits
        loss = cross_entropy(scores.float(), labels, reduction="sum")
        right = (scores.detach().argmax(1) == labels).sum()
        return {"loss": (loss, len(labels)), "accuracy": (right, len(labels))}

    def sample(self, model: nn.Module) -> str:
        """Text that the model generates, or predicted labels of the first validation texts."""
        import torch

        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            return self._labels_of_texts(model) if self._classifies else self._written(model)

    def _labels_of_texts(self, model: nn.Module) -> str:
        import torch

        assert self._data is not None and self._data.classes is not None
        data: Any = self._data.datasets.validation
        labels = self._data.classes.labels
        device = next(model.parameters()).device
        shown = []
        for index in range(min(_SHOWN, len(data))):
            tokens, length, _ = data[index]
            own = tokens[None, :length].to(device)
            scores = model(input_ids=own, attention_mask=torch.ones_like(own)).logits
            shown.append(f"{data.text(index)[:60]!r}: {labels[int(scores.argmax())]}")
        return "\n".join(shown)

    def _written(self, model: Any) -> str:
        import torch

        assert self._data is not None
        data: Any = self._data.datasets.validation
        answers = self.config.huggingface.learn == "answers"
        prompt = data.prompt(0) if answers else data[0][:_PROMPT].tolist()
        prompt = prompt[: self._data.context - 1] or [0]
        device = next(model.parameters()).device
        tokens = torch.tensor([prompt], device=device)
        written = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=min(_WRITTEN, self._data.context - len(prompt)),
            max_time=_SECONDS,
            use_cache=True,
            do_sample=True,
            temperature=0.8,
            pad_token_id=0,
        )[0].tolist()
        tokenizer = self._data.tokenizer
        return tokenizer.decode(written) if tokenizer else " ".join(map(str, written))


def _loss_of_tokens(model: nn.Module, tokens: Tensor, targets: Tensor) -> dict[str, Any]:
    """Loss of the next tokens that are not IGNORED.

    Padding is at the end, where no other token sees it, so no mask is needed.
    """
    from torch.nn.functional import cross_entropy

    logits = model(input_ids=tokens).logits.float()
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": (losses, (targets >= 0).sum())}


def _without_padding(tokens: Tensor, other: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the last columns that no sample uses from both; meta tensors are returned unchanged."""
    if tokens.is_meta:
        return tokens, other
    columns = int(used.any(0).nonzero().max()) + 1
    return tokens[:, :columns], other[:, :columns]


# --- export -------------------------------------------------------------------


def export_trained(
    config: HuggingFaceTaskConfig,
    weights: Mapping[str, Tensor],
    out: Path,
    merge: bool,
    max_shard_bytes: int | None = None,
) -> None:
    """Write a directory that transformers or peft loads with from_pretrained; atomically.

    Args:
        config: configuration of the run; its model directory must still exist.
        weights: weights of a checkpoint.
        merge: for a run with LoRA, add the adapters to the weights; otherwise only the adapters are
            written, in peft's format.
        max_shard_bytes: largest size of a file; None: as transformers chooses.

    Raises:
        UserError: something is missing, or `out` exists or cannot be written.
    """
    import torch

    from hvdtrain.checkpoint.export import new_directory
    from hvdtrain.tasks.huggingface_data import classes_of
    from hvdtrain.tasks.huggingface_model import build_trained, kind_of, read_directory

    directory = read_directory(config.huggingface.model, kind_of(config.huggingface.learn))
    classes = classes_of(config, directory)
    dtype = next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point())
    model = build_trained(config, directory, classes, weights=False, dtype=dtype)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = [name for name in weights if name not in tensors]
    other = [n for n, t in weights.items() if n in tensors and tensors[n].shape != t.shape]
    if missing or other:
        raise UserError(
            f"{directory.path} is not the model that the run started from: "
            f"{len(missing + other)} tensors differ, such as {(missing + other)[0]}"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            tensors[name].copy_(tensor)
        if merge:
            model = model.merge_and_unload()
    if not merge and config.lora.rank > 0:
        model.peft_config["default"].base_model_name_or_path = str(directory.path.resolve())
    with new_directory(out) as hidden:
        most = {} if max_shard_bytes is None else {"max_shard_size": max_shard_bytes}
        model.save_pretrained(hidden, **most)
        _copy_tokenizer(config, directory, hidden)


def _copy_tokenizer(config: HuggingFaceTaskConfig, directory: ModelDirectory, out: Path) -> None:
    from hvdtrain.tasks.huggingface_data import tokenizer_file

    for name in _COPIED:
        if (directory.path / name).is_file():
            shutil.copyfile(directory.path / name, out / name)
    if config.data.source == "text":
        shutil.copyfile(tokenizer_file(config, directory), out / "tokenizer.json")
