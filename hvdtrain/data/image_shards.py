"""Labelled images in WebDataset tar shards: 0001.jpg (or .png, ...) and 0001.cls."""

from __future__ import annotations

from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset

from hvdtrain.data.images import (
    COLOUR,
    SPLIT_SEED,
    SUFFIXES,
    ImageData,
    check_pillow,
    decode,
    margin_side,
)
from hvdtrain.data.order import permute
from hvdtrain.data.records import TarShards
from hvdtrain.errors import UserError

_IMAGES = tuple(suffix[1:] for suffix in SUFFIXES)


class Reading(NamedTuple):
    """Options for reading shards.

    Args:
        classes: number of classes.
        cache: directory for indexes; None = next to the shards.
    """

    classes: int
    cache: str | None = None


class ImageShards(Dataset[tuple[Tensor, int]]):
    """Images, decoded on access, and their class numbers.

    Args:
        shards: samples with an image under its suffix, and a class under "cls".
        classes: number of classes.
        side: pixels; the shorter side is scaled to this, and the middle is cut out.

    Accessing a sample raises UserError if it lacks an image or class, cannot be decoded, or has an
    invalid class.
    """

    def __init__(self, shards: TarShards, classes: int, side: int) -> None:
        self._shards = shards
        self._classes = classes
        self._side = side

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = self._shards[index]
        name = f"{sample.get('__key__')} of {sample['__shard__']}"
        image = next((sample[suffix] for suffix in _IMAGES if suffix in sample), None)
        if image is None:
            found = ", ".join(key for key in sample if not key.startswith("__"))
            raise UserError(f"sample {name} has no image (*.{', *.'.join(_IMAGES)}), but {found}")
        return decode(BytesIO(image), self._side, name), self._label(sample, name)

    def _label(self, sample: dict[str, Any], name: str) -> int:
        written = sample.get("cls", b"").decode(errors="replace").strip()
        if not written.isdecimal():
            raise UserError(f"sample {name}: its .cls is no number of a class, but {written!r}")
        if int(written) >= self._classes:
            raise UserError(
                f"sample {name} is of class {written}, but image.classes {self._classes} means "
                f"classes 0 to {self._classes - 1}"
            )
        return int(written)


def shards(
    data: str, validation: str | None, fraction: float, size: int, read: Reading
) -> ImageData:
    """Open images in shards.

    Args:
        data: for training, a file or glob; a fraction is split off for validation unless
            `validation` is given.
        size: pixels that the model sees.

    Raises:
        UserError: Pillow is missing, there are no shards, or one is broken.
    """
    check_pillow()
    side = margin_side(size)
    opened = TarShards([data], read.cache, "image.data")
    train: Dataset[Any] = ImageShards(opened, read.classes, side)
    if validation is not None:
        kept = TarShards([validation], read.cache, "image.validation")
        held_out = _mixed(ImageShards(kept, read.classes, side))
    else:
        mixed, count = _mixed(train), len(opened)
        ends = min(max(int(count * fraction), 1), count - 1)
        if ends < 1:
            raise UserError(f"image.data: {data} has one sample: there is none for validation")
        held_out = Subset(mixed, range(ends))
        train = Subset(mixed, range(ends, count))
    names = [str(number) for number in range(read.classes)]
    return ImageData(train, held_out, names, COLOUR, opened.fingerprint())


def _mixed(samples: Dataset[Any]) -> Dataset[Any]:
    """Shuffle: evaluation may use only the first samples, and shards may be sorted by class."""
    count = len(samples)  # type: ignore[arg-type]
    order = permute(np.arange(count), count, SPLIT_SEED, epoch=0)
    return Subset(samples, order)  # type: ignore[arg-type]
