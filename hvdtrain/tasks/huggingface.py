"""Training of Hugging Face transformers models on text, answers or labels, and their export."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain.errors import UserError
from hvdtrain.log import logger
from hvdtrain.tasks import Datasets
from hvdtrain.tasks.huggingface_config import HuggingFaceTaskConfig

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.models.sampling import Sampling
    from hvdtrain.tasks.huggingface_data import TextData
    from hvdtrain.tasks.huggingface_model import ModelDirectory

# Files to export in addition to the weights and tokenizer.json.
_COPIED = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
_SHOWN = 5  # number of texts shown with their predicted labels


class HuggingFace:
    """Models of transformers: causal language models and classifiers, with LoRA."""

    Config = HuggingFaceTaskConfig
    defaults: ClassVar[dict[str, Any]] = {
        "batch.global_size": 16,
        "batch.micro_size": 4,
        "train.duration": 400,
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
        from hvdtrain.data.tokens import TokenWindows
        from hvdtrain.tasks.huggingface_data import read_data
        from hvdtrain.tasks.huggingface_model import kind_of, read_directory

        own = self.config.huggingface
        self._directory = read_directory(own.model, kind_of(own.learn))
        self._data = read_data(self.config, self._directory)
        if isinstance(self._data.datasets.train, TokenWindows):
            self.units = ("tokens", self._data.context)
        return self._data.datasets

    def model(self) -> nn.Module:
        from hvdtrain.tasks.huggingface_model import (
            build_trained,
            check_causal,
            check_separable,
            has_weights,
        )

        assert self._directory is not None and self._data is not None
        # Cached keys and values are for generation, not for training.
        self._directory.text.use_cache = False
        own, weights = self.config.huggingface, has_weights(self._directory.path)
        if not weights:
            logger.warning("huggingface.model: %s has no weights: random ones", own.model)
        model: nn.Module = build_trained(self.config, self._directory, self._data.classes, weights)
        if self._data.classes is None:
            check_causal(self._directory, model)
        if own.pack or self._data.apart:
            check_separable(self._directory, model)
        return model

    @staticmethod
    def collate(samples: list[Any]) -> Any:
        """Return a batch of samples.

        Returns:
            For text int64 as in TokenWindows, (N, context + 1) or (N, 2, context + 1); for answers
            tokens and targets, (N, context) each, and with huggingface.pack positions (N, context);
            for labels tokens (N, context), their numbers (N,) and labels (N,). Except for text,
            last the number of columns that some sample uses: on a GPU, `loss` would have to wait
            for it.
        """
        from torch import Tensor
        from torch.utils.data import default_collate

        batch = default_collate(samples)
        if isinstance(batch, Tensor):
            return batch
        numbers = batch[1]  # targets of answers, or numbers of tokens
        used = numbers if numbers.dim() == 1 else (numbers >= 0).any(0).nonzero() + 1
        return [*batch, int(used.max())]

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Sums over tokens, or texts, and their number.

        Args:
            batch: from `collate`, on the device.
        """
        from torch import Tensor

        if self._classifies:
            return self._loss_of_labels(model, *batch)
        if not isinstance(batch, Tensor):
            return _loss_of_tokens(model, *_without_padding(*batch))
        from hvdtrain.data.tokens import tokens_of

        tokens, targets = tokens_of(batch)[:, :-1], tokens_of(batch)[:, 1:]
        assert self._data is not None
        if not self._data.apart:
            return _loss_of_tokens(model, tokens, targets)
        if self._data.separator is not None:
            ends = tokens == self._data.separator
        else:
            ends = batch[:, 1, :-1] != batch[:, 1, 1:]
        return _loss_of_tokens(model, tokens, *_separated(targets, ends))

    def _loss_of_labels(
        self, model: nn.Module, tokens: Tensor, lengths: Tensor, labels: Tensor, columns: int
    ) -> dict[str, Any]:
        import torch
        from torch.nn.functional import cross_entropy

        seen = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        tokens, mask = _without_padding(tokens, seen.long(), columns)
        scores = model(input_ids=tokens, attention_mask=mask).logits
        loss = cross_entropy(scores.float(), labels, reduction="sum")
        right = (scores.detach().argmax(1) == labels).sum()
        return {"loss": (loss, len(labels)), "accuracy": (right, len(labels))}

    def sample(self, model: nn.Module) -> str:
        """Text that the model generates, or predicted labels of the first validation texts."""
        import torch

        with torch.no_grad():
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
        from hvdtrain.models.sampling import Sampling

        assert self._data is not None
        prompt = list(self._data.prompt) or [0]
        sampling = Sampling(length=min(100, self._data.context - len(prompt)), max_seconds=20.0)
        written = prompt + _continuation(model, prompt, sampling, self._data.ends)
        tokenizer = self._data.tokenizer
        return tokenizer.decode(written) if tokenizer else " ".join(map(str, written))

    def trained_model(self, weights: Mapping[str, Tensor], tokenizer: str | None = None) -> Any:
        """Build the model of a checkpoint's weights, ready for `generate`, without the data.

        Args:
            tokenizer: a tokenizer.json to use instead of the run's.

        Raises:
            UserError: the run trained a classifier; the model's directory or a tokenizer is
                missing, or does not fit.
        """
        if self._classifies:
            raise UserError("huggingface.learn labels trains a classifier, which writes no text")
        if tokenizer is not None:
            data = replace(self.config.data, source="text", tokenizer=tokenizer)
            self.config = replace(self.config, data=data)
        self._directory, model = _load(self.config, weights)
        return model

    def generate(
        self, model: Any, prompt: str, sampling: Sampling, data_format: str | None = None
    ) -> str:
        """Return the text that a model from `trained_model` generates after a prompt.

        Args:
            data_format: format of the data in the run's manifest.json. A model of `chat` answers
                the prompt as a user's message, one of `alpaca` as an instruction; other models
                continue the prompt, and the text begins with it.

        Raises:
            UserError: the prompt is empty or too long.
        """
        from hvdtrain.tasks.huggingface_data import prompt_of

        assert self._directory is not None
        tokenizer, tokens, ends = prompt_of(self.config, self._directory, prompt, data_format)
        positions = self._directory.positions
        if not tokens or (positions and len(tokens) >= positions):
            raise UserError(
                f"the prompt has {len(tokens)} tokens; the model needs at least 1 to start from"
                + (f", and has {positions} positions" if positions else "")
            )
        if positions:
            sampling = replace(sampling, length=min(sampling.length, positions - len(tokens)))
        written = _continuation(model, tokens, sampling, ends)
        return tokenizer.decode(written if data_format in ("chat", "alpaca") else tokens + written)


def _continuation(
    model: Any, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int] = ()
) -> list[int]:
    """Tokens that a model writes after a prompt; `ends`: tokens that end the text, as eos does."""
    import torch

    device = next(model.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    known = model.generation_config.eos_token_id
    end = {*ends, *(known if isinstance(known, list) else [known] if known is not None else [])}
    draws: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        draws = {"do_sample": True, "temperature": sampling.temperature}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(sampling.seed)
        written = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=sampling.length,
            max_time=sampling.max_seconds,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=sorted(end) or None,
            **draws,
        )
    found: list[int] = written[0, len(prompt) :].tolist()
    return found


def _loss_of_tokens(
    model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
) -> dict[str, Any]:
    """Loss of the next tokens that are not IGNORED.

    Padding is at the end, where no other token sees it, so no mask is needed. transformers makes a
    mask that separates documents from positions that restart; check_separable has verified it.
    """
    import torch
    from torch.nn.functional import cross_entropy

    more = {} if positions is None else {"position_ids": positions}
    if tokens.is_meta:  # transformers reads the values of positions, unless it gets a whole mask
        shape = (len(tokens), 1, tokens.shape[1], tokens.shape[1])
        more["attention_mask"] = torch.ones(shape, dtype=torch.bool, device=tokens.device)
    logits = model(input_ids=tokens, **more).logits.float()
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return {"loss": (losses, (targets >= 0).sum())}


def _separated(targets: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and positions (N, context) of documents.

    The last token of a document has no target, because another document begins after it.

    Args:
        ends: bool (N, context): whether a token is the last one of its document.
    """
    import torch

    from hvdtrain.tasks.huggingface_data import IGNORED

    numbers = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    begins = torch.where(ends, numbers + 1, 0).cummax(dim=1).values
    begins = torch.cat((torch.zeros_like(begins[:, :1]), begins[:, :-1]), dim=1)
    return targets.masked_fill(ends, IGNORED), numbers - begins


def _without_padding(*batch: Any) -> tuple[Tensor, ...]:
    """Drop the last columns, which no sample uses; meta tensors are returned unchanged.

    Args:
        batch: tensors (N, context), and the number of columns that are used.
    """
    *tensors, columns = batch
    # FLOPs are counted for whole samples.
    return tuple(each if each.is_meta else each[:, :columns] for each in tensors)


def _load(
    config: HuggingFaceTaskConfig, weights: Mapping[str, Tensor]
) -> tuple[ModelDirectory, Any]:
    """The model's directory, and the model with the weights of a checkpoint.

    Raises:
        UserError: the directory is missing, or is not the one that the run started from.
    """
    import torch

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
    return directory, model


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
    from hvdtrain.checkpoint.export import new_directory

    directory, model = _load(config, weights)
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
    template = config.huggingface.chat_template
    if template is not None:
        shutil.copyfile(Path(template).expanduser(), out / "chat_template.jinja")
    if config.data.source != "tokens":
        shutil.copyfile(tokenizer_file(config, directory), out / "tokenizer.json")
