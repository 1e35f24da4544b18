"""The language model: a GPT that learns to predict the next token of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain.data.config import DataConfig
from hvdtrain.errors import UserError
from hvdtrain.models.gpt_config import GPTConfig
from hvdtrain.tasks import Datasets

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.data.mixture import Mixture
    from hvdtrain.data.text import Tokenizer
    from hvdtrain.data.token_files import TokenMeta
    from hvdtrain.models.gpt import GPT
    from hvdtrain.models.sampling import Sampling


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
    """Language models: prediction of the next token of text."""

    Config = LanguageModelConfig
    defaults: ClassVar[dict[str, Any]] = {"train.duration": 400, "optim.lr": 3e-3}
    metrics: tuple[str, ...] = ()

    def __init__(self, config: LanguageModelConfig) -> None:
        self.config = config
        self.units = ("tokens", config.model.context)
        # With data.mixture, the loss of each source; a subclass may have metrics of its own.
        self.metrics = (*self.metrics, *(f"loss_{name}" for name in config.data.mixture))
        self._mixture: Mixture | None = None
        self._vocab_size = 0
        self._separator: int | None = None  # of documents, with data.document_mask
        self._token_bytes: Tensor | None = None
        self._prompt: list[int] = []
        self._tokenizer: Tokenizer | None = None

    @property
    def validation_metrics(self) -> tuple[str, ...]:
        """Empty if the bytes per token are unknown: token files whose tokens.json lacks them."""
        return () if self._token_bytes is None else ("bits_per_byte",)

    def datasets(self) -> Datasets:
        from hvdtrain.data.mixture import Mixture
        from hvdtrain.data.packed import read_packed, separate_documents
        from hvdtrain.data.text import Tokenizer
        from hvdtrain.data.tokens import tokens_of

        data, context = self.config.data, self.config.model.context
        sources = data.sources()
        is_text = any(source.source != "tokens" for source in sources.values())
        self._tokenizer = described = None
        if is_text or data.tokenizer is not None:
            self._tokenizer = tokenizer = Tokenizer(data.tokenizer)
            if data.tokenizer is not None:
                described = replace(tokenizer.meta, separator=tokenizer.end)
        packed = {
            name: read_packed(source, self._tokenizer, described)
            for name, source in sources.items()
        }
        if described is not None and not data.mixture:
            name, size = packed[""].meta.vocabulary
            if size != described.vocab_size:
                raise UserError(
                    f"data.tokenizer is {described.tokenizer} with {described.vocab_size} tokens, "
                    f"but tokens.json next to the files of data.train names {name} with {size}"
                )
        self._take_over({name: one.meta for name, one in packed.items()})
        with_documents = False
        if data.document_mask:
            self._separator, with_documents = separate_documents(packed)
        of_windows = context, "model.context", self._vocab_size, with_documents
        windows = {name: one.windows(*of_windows) for name, one in packed.items()}
        trains, validations = ({n: pair[i] for n, pair in windows.items()} for i in (0, 1))
        first = next(iter(validations.values()))
        self._prompt = tokens_of(first[0][None])[0, : min(16, context)].tolist()
        if not data.mixture:
            train = trains[""]
            return Datasets(train, first, train.fingerprint())
        weights = {name: source.weight for name, source in data.mixture.items()}
        mixture = self._mixture = Mixture(trains, weights, data.mixture_weights)
        return Datasets(mixture, mixture.validation(validations), mixture.fingerprint())

    def _take_over(self, metas: Mapping[str, TokenMeta]) -> None:
        """Store the metadata of the data's tokens, given those of each source."""
        import torch

        from hvdtrain.data.packed import common_meta

        meta = common_meta(metas)
        self._vocab_size = meta.vocab_size
        sizes = meta.bytes_of_tokens()
        self._token_bytes = None if sizes is None else torch.from_numpy(sizes)
        wanted = self.config.model.vocab_size
        if wanted is not None and wanted < self._vocab_size:
            raise UserError(
                f"model.vocab_size {wanted} is less than the {self._vocab_size} tokens of the data"
            )

    def model(self) -> GPT:
        from hvdtrain.models.gpt import GPT

        config = self.config.model
        return GPT(replace(config, vocab_size=config.vocab_size or self._vocab_size))

    def loss(self, model: GPT, batch: Any) -> dict[str, Any]:
        """The mean in nats per token, of a mixture also the sums of each source; in evaluation also
        the bits, and the number of bytes of text.

        Args:
            batch: int64 as in TokenWindows, (batch, context + 1) or (batch, 2, context + 1); of a
                mixture also sources (batch,).
        """
        from hvdtrain.data.tokens import tokens_of

        samples, of_samples = batch, None
        if self._mixture is not None:
            samples, sources = batch
            of_samples = sources.double()  # receives the sums
        tokens, targets = tokens_of(samples)[:, :-1], tokens_of(samples)[:, 1:]
        documents = None
        if samples.dim() == 3:
            documents = self._documents(samples)
        elif self._separator is not None:
            documents = (tokens == self._separator).cumsum(dim=1)
        found: dict[str, Any] = {}
        found["loss"] = loss = model.loss(tokens, targets, documents, of_samples)
        if self._mixture is not None and of_samples is not None:
            found |= self._mixture.losses(of_samples, sources, targets.shape[1])
        if model.training or self._token_bytes is None:
            return found
        from hvdtrain.runtime.device import sent

        sizes = sent(self._token_bytes, targets.device)[targets]
        bits = loss.double() * targets.numel() / math.log(2)
        return {**found, "bits_per_byte": (bits, sizes.sum())}

    def _documents(self, samples: Tensor) -> Tensor:
        """Numbers of the documents (batch, context), from an index.

        A separator at the end of a document begins the next one, as without an index: the model
        sees the first token of a document after a separator, and nothing before it.
        """
        import torch

        now, following = samples[:, 1, :-1], samples[:, 1, 1:]
        if self._separator is None:
            return now
        return torch.where(samples[:, 0, :-1] == self._separator, following, now)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """The perplexity: the number of equally likely tokens that would be as hard to predict."""
        try:
            return {"perplexity": math.exp(means["loss"])}
        except OverflowError:
            return {"perplexity": math.inf}

    def sample(self, model: GPT) -> str:
        """Text that the model generates after the first 16 tokens of the validation data."""
        from hvdtrain.models.sampling import Sampling

        sampling = Sampling(max_seconds=20.0)
        return self._text(self._continued(model, self._prompt, sampling))

    def trained_model(self, weights: Mapping[str, Tensor], tokenizer: str | None = None) -> GPT:
        """Build the model of a checkpoint's weights, ready for `generate`, without the data.

        Args:
            tokenizer: a tokenizer.json, for data.source tokens.

        Raises:
            UserError: the tokenizer of the data is unknown or does not fit, or the weights do not
                match this configuration.
        """
        rows = weights["embedding.weight"].shape[0]
        self._tokenizer = self._tokenizer_of_data(tokenizer)
        self._vocab_size = self._tokenizer.vocab_size
        self._separator = self._tokenizer.end if self.config.data.document_mask else None
        if self._vocab_size > rows:
            raise UserError(
                f"the tokenizer {self._tokenizer.name} has {self._vocab_size} tokens, but the "
                f"model knows {rows}: it was trained with another tokenizer"
            )
        return self.model_of(weights)

    def model_of(self, weights: Mapping[str, Tensor]) -> GPT:
        """Build the model of a checkpoint's weights, without the data or a tokenizer.

        Raises:
            UserError: the weights do not match this configuration.
        """
        from hvdtrain.models.gpt import GPT

        rows = weights["embedding.weight"].shape[0]
        model = GPT(replace(self.config.model, vocab_size=rows))
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            first = " ".join(str(error).split())[:200]
            raise UserError(f"the weights do not match this configuration: {first} ...") from None
        return model

    def _tokenizer_of_data(self, file: str | None) -> Tokenizer:
        from hvdtrain.data.files import find_files
        from hvdtrain.data.text import Tokenizer
        from hvdtrain.data.token_files import TokenMeta

        data = self.config.data
        first, *_ = sources = list(data.sources().values())
        file = file or data.tokenizer
        if file is None and all(source.source == "tokens" for source in sources):
            name = TokenMeta.read(find_files(first.key("train"), first.train)[0]).tokenizer
            if name != "bytes":
                raise UserError(
                    f"the tokens were made with {name}: pass that file with --tokenizer"
                )
        return Tokenizer(file)

    def generate(self, model: GPT, prompt: str, sampling: Sampling) -> str:
        """Return `prompt` and the text that a model from `trained_model` generates after it.

        Raises:
            UserError: the prompt is empty.
        """
        assert self._tokenizer is not None
        tokens = [int(token) for token in self._tokenizer.encode(prompt.encode())]
        if not tokens:
            raise UserError("the prompt is empty: the model needs a token to start from")
        return self._text(self._continued(model, tokens, sampling))

    def _continued(self, model: GPT, tokens: list[int], sampling: Sampling) -> list[int]:
        from hvdtrain.models.sampling import continue_tokens

        return continue_tokens(model, tokens, self._vocab_size, sampling, self._separator)

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if self._tokenizer else " ".join(map(str, tokens))
