"""Labelled images: scikit-learn's digits, or a directory of class directories.

Images are uint8 (channels, side, side). The side includes a margin beyond what a model sees, from
which the image is cropped (augment.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from hvdtrain.data.order import permute
from hvdtrain.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
DIGIT_SIZE, _DIGIT_MARGIN = 8, 2
SPLIT_SEED = 0  # the split depends on the data only, not on the run's seed


class Normalisation(NamedTuple):
    """Mean and standard deviation of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


# The values of ImageNet, which are common for colour photographs.
COLOUR = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DIGIT = Normalisation((0.305,), (0.376,))


class ImageData(NamedTuple):
    """Training and validation data: each sample is an image and its class number."""

    train: Dataset[Any]
    validation: Dataset[Any]
    classes: list[str]
    normalisation: Normalisation
    fingerprint: str


def margin_side(size: int) -> int:
    """Side of the images of a directory if the model sees `size` pixels: 256 for 224."""
    return round(size * 8 / 7)


def digits(validation_fraction: float) -> ImageData:
    """The 1,797 digits of 8x8 pixels from scikit-learn, with a margin of one pixel.

    Raises:
        UserError: scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise UserError(
            "image.data: the digits come with scikit-learn, which is not installed: "
            "pip install 'hvdtrain[image]', or name a folder of your own"
        ) from None
    found = load_digits()
    pixels = torch.from_numpy((found.images * 15).astype(np.uint8))  # 0 to 16 become 0 to 240
    images = torch.nn.functional.pad(pixels, (_DIGIT_MARGIN // 2,) * 4).unsqueeze(1)
    labels = torch.from_numpy(found.target.astype(np.int64))
    order = torch.from_numpy(permute(np.arange(len(labels)), len(labels), SPLIT_SEED, epoch=0))
    ends = int(len(labels) * validation_fraction)
    train, validation = order[ends:], order[:ends]
    digest = hashlib.sha256(images[train].numpy().tobytes() + labels[train].numpy().tobytes())
    return ImageData(
        TensorDataset(images[train], labels[train]),
        TensorDataset(images[validation], labels[validation]),
        [str(name) for name in found.target_names],
        DIGIT,
        digest.hexdigest(),
    )


def folders(data: str, validation: str | None, validation_fraction: float, size: int) -> ImageData:
    """Images in class directories.

    Args:
        data: training data; a fraction is split off for validation if `validation` is None.
        validation: its class directories must be among those of `data`.
        size: pixels that the model sees.

    Raises:
        UserError: Pillow is missing; a directory cannot be read or has no class; or a class has no
            image.
    """
    check_pillow()
    classes = class_folders("image.data", Path(data))
    files = {name: image_files("image.data", Path(data) / name) for name in classes}
    if validation is None:
        taken = {name: _split(files[name], Path(data), validation_fraction) for name in classes}
        files = {name: [f for f in files[name] if f not in taken[name]] for name in classes}
        held_out = {name: sorted(taken[name]) for name in classes}
    else:
        key, root = "image.validation", Path(validation)
        held_out = {}
        for name in class_folders(key, root):
            if name not in files:
                raise UserError(
                    f"{key}: class {name!r} ({root / name}) is only in the validation data; the "
                    f"training data {data} has {', '.join(classes[:10])}"
                    f"{' ...' if len(classes) > 10 else ''}"
                )
            held_out[name] = image_files(key, root / name)
    train, rest = (_samples(part, classes) for part in (files, held_out))
    if not rest:
        raise UserError(
            f"image.data: {data} has too few images for a part of validation: each class has one; "
            "name a folder with image.validation"
        )
    # Evaluation may use only the first samples, which must not all be of one class.
    order = permute(np.arange(len(rest)), len(rest), SPLIT_SEED, epoch=0)
    side = margin_side(size)
    return ImageData(
        ImageFiles(train, side),
        ImageFiles([rest[i] for i in order], side),
        classes,
        COLOUR,
        _fingerprint(train, Path(data)),
    )


def check_pillow() -> None:
    """Raise UserError if Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            "image.data: reading images takes Pillow: pip install 'hvdtrain[image]'"
        ) from None


def class_folders(key: str, folder: Path) -> list[str]:
    """Names of the class directories, sorted.

    Raises:
        UserError: there are none, or the directory cannot be read.
    """
    try:
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and e.name[0] != ".")
    except OSError as error:
        raise UserError(f"{key}: {folder}: {error.strerror}") from None
    if not names:
        raise UserError(
            f"{key}: {folder} has no class folders; images are expected in {folder}/CLASS/"
        )
    return names


def image_files(key: str, folder: Path) -> list[Path]:
    """All images below a class directory, sorted.

    Raises:
        UserError: there are none, or a directory cannot be read.
    """

    def stop(error: OSError) -> None:
        raise UserError(f"{key}: {error.filename}: {error.strerror}")

    found = [
        Path(root) / name
        for root, _, names in os.walk(folder, onerror=stop, followlinks=True)
        for name in names
        if name.lower().endswith(SUFFIXES)
    ]
    if not found:
        raise UserError(f"{key}: class folder {folder} has no image (*{', *'.join(SUFFIXES)})")
    return sorted(found)


def _split(files: Sequence[Path], root: Path, fraction: float) -> set[Path]:
    """Choose a fraction of a class by a hash of names: adding files keeps the choice of others."""
    count = min(round(len(files) * fraction), len(files) - 1)
    if fraction and len(files) > 1:
        count = max(count, 1)
    names = {file: os.fsencode(file.relative_to(root)) for file in files}
    return set(sorted(files, key=lambda file: hashlib.sha256(names[file]).digest())[:count])


def _samples(files: dict[str, list[Path]], classes: Sequence[str]) -> list[tuple[Path, int]]:
    return [(file, n) for n, name in enumerate(classes) for file in files.get(name, ())]


def _fingerprint(samples: Sequence[tuple[Path, int]], root: Path) -> str:
    """Hash names and classes: reading the pixels of a large dataset takes minutes.

    Sizes are not included, so that a run can continue after a broken file is repaired.
    """
    digest = hashlib.sha256()
    for file, label in samples:
        digest.update(os.fsencode(file.relative_to(root)) + f"\0{label}\n".encode())
    return digest.hexdigest()


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Images, decoded on access.

    Args:
        samples: files and their class numbers.
        side: pixels; the shorter side is scaled to this, and the middle is cut out.

    Accessing a sample raises UserError if its file cannot be decoded.
    """

    def __init__(self, samples: Sequence[tuple[Path, int]], side: int) -> None:
        self._samples = samples
        self._side = side

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self._samples[index]
        return decode(file, self._side, str(file)), label


def decode(file: Path | BytesIO, side: int, name: str) -> Tensor:
    """Decode an image to uint8 (3, side, side): scaled, and cropped to the middle.

    Args:
        name: of the image, for messages.

    Raises:
        UserError: it cannot be decoded.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    except MemoryError:
        raise
    except Exception as error:  # each decoder of Pillow has its own exceptions
        reason = f"{error}".partition(str(file))[0].strip(" '\"") or type(error).__name__
        raise UserError(f"image {name} cannot be read ({reason}): repair or remove it") from None
    return torch.from_numpy(np.asarray(fitted).copy()).permute(2, 0, 1).contiguous()
