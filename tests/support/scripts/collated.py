"""A script whose samples are dataclasses of different lengths, which its `collate` pads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import hvdtrain


@dataclass
class Sample:
    values: torch.Tensor  # (length, 1)
    label: str | None


def collate(samples: list[Sample]) -> tuple[PackedSequence, list[str | None]]:
    packed = pack_sequence([sample.values for sample in samples], enforce_sorted=False)
    return packed, [sample.label for sample in samples]


torch.manual_seed(0)
model = nn.ModuleDict({"lstm": nn.LSTM(1, 4), "head": nn.Linear(4, 1)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = torch.randint(1, 7, (64,), generator=torch.Generator().manual_seed(1)).tolist()
data = [Sample(torch.full((n, 1), n / 7), "odd" if n % 2 else None) for n in lengths]

with hvdtrain.training(model, optimizer, data, collate=collate) as training:
    for step in training:
        with step:
            for packed, labels in step:
                _, (last, _) = model["lstm"](packed)
                wanted = torch.tensor([[float(label is not None)] for label in labels])
                step.backward((model["head"](last[0]) - wanted).square().mean())
