"""Parameters that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from hvdtrain.errors import UserError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Exclude parameters from training.

    Args:
        patterns: of their names, with * and ? as in a shell.

    Raises:
        UserError: a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"optim.freeze: {pattern!r} matches no parameter of the model; there are "
                f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
