"""A transformer over the cells of a table's row.

After the FT-Transformer (Gorishniy et al., "Revisiting Deep Learning Models for Tabular Data",
2021), with numbers embedded between quantiles (Gorishniy et al., "On Embeddings for Numerical
Features in Tabular Deep Learning", 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_STD = 0.02


@dataclass(frozen=True)
class TableShape:
    """Sizes of the transformer.

    Args:
        layers: number of layers.
        width: size of a cell's embedding; a multiple of `heads`.
        heads: attention heads.
        dropout: in the layers.
    """

    layers: int
    width: int
    heads: int
    dropout: float


class TabGPT(nn.Module):
    """Rows to an embedding of each row and of each of its cells.

    Args:
        sizes: number of codes per column; the columns' codes are numbered consecutively.
        outputs: number of predicted values per row; 0: the model learns to predict hidden cells.
        kept: buffers that are saved with the model, by name.
    """

    def __init__(
        self, sizes: Sequence[int], shape: TableShape, outputs: int, kept: dict[str, Tensor]
    ) -> None:
        super().__init__()
        width = shape.width
        self.sizes = list(sizes)
        self.embedding = nn.Embedding(sum(sizes) + 1, width)  # + 1: upper edge of the last code
        self.columns = nn.Parameter(torch.empty(len(sizes), width))
        self.summary = nn.Parameter(torch.empty(1, width))
        for weight in (self.embedding.weight, self.columns, self.summary):
            nn.init.normal_(weight, std=_STD if weight is not self.embedding.weight else 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, shape.heads, 4 * width, dropout=shape.dropout, activation="gelu",
                batch_first=True, norm_first=True,
            )
            for _ in range(shape.layers)
        )  # fmt: skip
        self.norm = nn.LayerNorm(width)
        if outputs:
            self.head = nn.Linear(width, outputs)
        else:
            self.guess = nn.Linear(width, width)
            self.bias = nn.Parameter(torch.zeros(sum(sizes)))
        for name, tensor in kept.items():
            self.register_buffer(name, tensor)

    def forward(self, codes: Tensor, fractions: Tensor) -> Tensor:
        """Args:
            codes: (N, columns) integers.
            fractions: (N, columns) float32, relative position between a number's code and the next.

        Returns:
            (N, 1 + columns, width): of the row, and of each cell.
        """
        lower, upper = self.embedding(codes), self.embedding(codes + 1)
        cells = torch.lerp(lower, upper, fractions[..., None].to(lower.dtype)) + self.columns
        tokens = torch.cat((self.summary.expand(len(codes), 1, -1), cells), dim=1)
        for layer in self.layers:
            tokens = layer(tokens)
        found: Tensor = self.norm(tokens)
        return found

    def predict(self, codes: Tensor, fractions: Tensor) -> Tensor:
        """(N, outputs)."""
        scores: Tensor = self.head(self(codes, fractions)[:, 0])
        return scores

    def scores_of_codes(self, cells: Tensor, column: int) -> Tensor:
        """Scores of the possible contents of cells.

        Args:
            cells: (M, width), of cells of one column.

        Returns:
            (M, sizes[column])
        """
        begin = sum(self.sizes[:column])
        codes = slice(begin, begin + self.sizes[column])
        scores: Tensor = self.guess(cells) @ self.embedding.weight[codes].T + self.bias[codes]
        return scores
