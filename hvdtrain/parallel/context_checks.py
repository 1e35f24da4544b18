"""Checks of which sequences ranks can split, without importing torch."""

from __future__ import annotations

from hvdtrain.errors import UserError, require
from hvdtrain.models.gpt_config import GPTConfig


def check_context(model: GPTConfig, ranks: int) -> None:
    """Check that `ranks` ranks (`parallel.context`) can split each sequence of a model.

    Raises:
        ValueError: with a message for the user.
    """
    if ranks == 1:
        return
    chunks = 2 * ranks if model.attention == "full" else ranks
    require(
        model.context % chunks == 0,
        f"model.context {model.context} is not a multiple of {chunks}, into which parallel.context "
        f"{ranks} divides it: the nearest that is one is {_nearest(model.context, chunks)}",
    )
    require(
        model.dropout == 0,
        f"parallel.context {ranks} excludes model.dropout {model.dropout}: ranks of a sequence "
        "would draw other numbers than one rank does",
    )
    local = model.context // ranks
    if model.attention == "block_sparse":
        require(
            local % model.block_size == 0,
            f"parallel.context {ranks} gives a rank {local} tokens, which model.block_size "
            f"{model.block_size} does not divide",
        )
    for length, rate in zip(model.segment_lengths, model.dilation_rates, strict=True):
        require(
            local % length == 0 or length % local == 0,
            f"parallel.context {ranks} gives a rank {local} tokens: model.segment_lengths {length} "
            "must divide that or be a multiple of it",
        )
        require(
            length <= local or local % rate == 0,
            f"parallel.context {ranks} gives a rank {local} tokens, which the model.dilation_rates "
            f"{rate} of segments longer than that does not divide",
        )


def check_length(tokens: int, chunks: int, ranks: int) -> None:
    """Raise UserError if a sequence of `tokens` tokens cannot be split into equal chunks."""
    if tokens % chunks:
        raise UserError(
            f"a sequence of {tokens} tokens cannot be shared by the {ranks} ranks of "
            f"parallel.context: it is not a multiple of {chunks}"
        )


def _nearest(tokens: int, chunks: int) -> int:
    return max(1, round(tokens / chunks)) * chunks
