"""Labeled images: scikit-learn's digits, class directories, or tar shards; their augmentation.

Images are uint8 (channels, side, side). The side includes a margin beyond what a model sees, from
which the image is cropped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from hvdtrain.data.file_kinds import described
from hvdtrain.data.files import warn_of_skipped
from hvdtrain.data.order import Indices, permute
from hvdtrain.data.records import TarShards
from hvdtrain.errors import UserError
from hvdtrain.runtime.device import sent

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
# Formats of Pillow's mode "I", which stands for 32 bits, that have at most 16 bits.
_NEVER_32_BITS = ("PNG", "PPM")
_TIFF_BITS = 258  # the tag BitsPerSample
_DIGIT_MARGIN = 2
_MEMBERS = tuple(suffix[1:] for suffix in SUFFIXES)  # of a sample in a tar shard
SPLIT_SEED = 0  # the split depends on the data only, not on the run's seed


class Normalization(NamedTuple):
    """Mean and standard deviation of each channel, of values in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


# The values of ImageNet, which are common for color photographs.
COLOR = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
DIGIT = Normalization((0.305,), (0.376,))


class ImageData(NamedTuple):
    """Training and validation data: each sample is an image and its class number."""

    train: Dataset[Any]
    validation: Dataset[Any]
    classes: list[str]
    normalization: Normalization
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
            "data.train: the digits come with scikit-learn, which is not installed: "
            "pip install 'hvdtrain[image]', or set it to a directory of your own"
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


def class_directories(
    data: str, validation: str | None, validation_fraction: float, size: int
) -> ImageData:
    """Images in class directories.

    Args:
        data: training data; a fraction is split off for validation if `validation` is None.
        validation: its class directories must also be in `data`.
        size: pixels that the model sees.

    Raises:
        UserError: Pillow is missing; a directory cannot be read or has no class; or a class has no
            image.
    """
    check_pillow()
    classes = class_names("data.train", Path(data))
    files = _images_of("data.train", Path(data), classes)
    if validation is None:
        taken = {name: _split(files[name], Path(data), validation_fraction) for name in classes}
        files = {name: [f for f in files[name] if f not in taken[name]] for name in classes}
        held_out = {name: sorted(taken[name]) for name in classes}
    else:
        key, root = "data.validation", Path(validation)
        names = class_names(key, root)
        for name in names:
            if name not in files:
                raise UserError(
                    f"{key}: class {name!r} ({root / name}) is only in the validation data; the "
                    f"training data {data} has {', '.join(classes[:10])}"
                    f"{' ...' if len(classes) > 10 else ''}"
                )
        held_out = _images_of(key, root, names)
    train, rest = (_samples(part, classes) for part in (files, held_out))
    if not rest:
        raise UserError(
            f"data.train: {data} has too few images to split off validation data: each class has "
            "one; set data.validation to a directory"
        )
    # Evaluation may use only the first samples, which must not all be of one class.
    order = permute(np.arange(len(rest)), len(rest), SPLIT_SEED, epoch=0)
    side = margin_side(size)
    return ImageData(
        ImageFiles(train, side),
        ImageFiles([rest[i] for i in order], side),
        classes,
        COLOR,
        _fingerprint(train, Path(data)),
    )


def check_pillow() -> None:
    """Raise UserError if Pillow is missing."""
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            "data.train: reading images requires Pillow: pip install 'hvdtrain[image]'"
        ) from None


def class_names(key: str, directory: Path) -> list[str]:
    """Names of the class directories, sorted.

    Raises:
        UserError: there are none, or the directory cannot be read.
    """
    try:
        names = sorted(e.name for e in os.scandir(directory) if e.is_dir() and e.name[0] != ".")
    except NotADirectoryError:
        content = described(directory)
        raise UserError(
            f"{key}: {directory} is neither a directory nor a tar shard (*.tar)"
            + (f", but {content}" if content else "")
        ) from None
    except OSError as error:
        raise UserError(f"{key}: {directory}: {error.strerror}") from None
    if not names:
        raise UserError(
            f"{key}: {directory} has no class directories; images are expected in "
            f"{directory}/CLASS/"
        )
    return names


def _images_of(key: str, root: Path, classes: Sequence[str]) -> dict[str, list[Path]]:
    """All images below each class directory, sorted.

    Hidden files and directories are skipped: programs leave copies of images there, such as
    .ipynb_checkpoints/ and ._0001.png. A warning names other files if they are more than a
    hundredth of all.

    Raises:
        UserError: a class has no image, or a directory cannot be read.
    """
    found, others = {}, []
    for name in classes:
        files = sorted(_visible_files(key, root / name))
        found[name] = [file for file in files if file.name.lower().endswith(SUFFIXES)]
        others += [file.name for file in files if not file.name.lower().endswith(SUFFIXES)]
        if not found[name]:
            raise UserError(
                f"{key}: class directory {root / name} has no image (*{', *'.join(SUFFIXES)})"
            )
    if 100 * len(others) > sum(map(len, found.values())):
        warn_of_skipped(f"{key}: {root}", f"an image (*{', *'.join(SUFFIXES)})", others)
    return found


def _visible_files(key: str, directory: Path) -> Iterator[Path]:
    """Files below a directory that are not hidden; raise UserError if one cannot be read."""

    def stop(error: OSError) -> None:
        raise UserError(f"{key}: {error.filename}: {error.strerror}")

    for root, below, names in os.walk(directory, onerror=stop, followlinks=True):
        below[:] = [name for name in below if name[0] != "."]
        yield from (Path(root) / name for name in names if name[0] != ".")


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
    """Decode an image to uint8 (3, side, side): upright, scaled, and cropped to the middle.

    Args:
        name: name of the image, for messages.

    Raises:
        UserError: it cannot be decoded, or the range of its pixels is unknown.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            # Images with broken EXIF data, which causes many exceptions, can be decoded.
            with suppress(Exception):
                ImageOps.exif_transpose(image, in_place=True)
            fitted = ImageOps.fit(_as_rgb(image), (side, side), Image.Resampling.BILINEAR)
    except MemoryError:
        raise
    except Exception as error:  # each decoder of Pillow has its own exceptions
        reason = f"{error}".partition(str(file))[0].strip(" '\"") or type(error).__name__
        raise UserError(f"image {name} cannot be read ({reason}): repair or remove it") from None
    return torch.from_numpy(np.asarray(fitted).copy()).permute(2, 0, 1).contiguous()


def _as_rgb(image: Any) -> Any:
    """An image with 8 bits per channel; gray of up to 16 bits is scaled, which Pillow would clip.

    Raises:
        ValueError: the range of its pixels is unknown.
    """
    from PIL import Image

    mode = image.mode
    if mode == "F" or (mode == "I" and image.format not in _NEVER_32_BITS):
        kind = "floating-point numbers" if mode == "F" else "signed or 32-bit integers"
        raise ValueError(f"its pixels are {kind} of unknown range; convert it to 8 or 16 bits")
    if mode != "I" and not mode.startswith("I;16"):
        return image.convert("RGB")
    bits = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (16,))[0]
    largest = (1 << bits) - 1
    scaled = (np.asarray(image).astype(np.uint32) * 255 + largest // 2) // largest
    return Image.fromarray(scaled.astype(np.uint8)).convert("RGB")


# --- tar shards in WebDataset's format: 0001.jpg (or .png, ...) and 0001.cls ---


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

    @property
    def shard_samples(self) -> Indices:
        """Number of samples of each shard, in the order of the samples."""
        return self._shards.shard_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sample = self._shards[index]
        name = f"{sample.get('__key__')} of {sample['__shard__']}"
        image = next((sample[suffix] for suffix in _MEMBERS if suffix in sample), None)
        if image is None:
            found = ", ".join(key for key in sample if not key.startswith("__"))
            raise UserError(f"sample {name} has no image (*.{', *.'.join(_MEMBERS)}), but {found}")
        return decode(BytesIO(image), self._side, name), self._label(sample, name)

    def _label(self, sample: dict[str, Any], name: str) -> int:
        written = sample.get("cls", b"").decode(errors="replace").strip()
        if not written.isdecimal():
            raise UserError(f"sample {name}: its .cls is not a class number, but {written!r}")
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
    opened = TarShards([data], read.cache, "data.train")
    train: Dataset[Any] = ImageShards(opened, read.classes, side)
    if validation is not None:
        kept = TarShards([validation], read.cache, "data.validation")
        held_out = _mixed(ImageShards(kept, read.classes, side))
    else:
        mixed, count = _mixed(train), len(opened)
        ends = min(max(int(count * fraction), 1), count - 1)
        if ends < 1:
            raise UserError(f"data.train: {data} has one sample, so none remains for validation")
        held_out = Subset(mixed, range(ends))
        train = Subset(mixed, range(ends, count))
    names = [str(number) for number in range(read.classes)]
    return ImageData(train, held_out, names, COLOR, opened.fingerprint())


def _mixed(samples: Dataset[Any]) -> Dataset[Any]:
    """Shuffle: evaluation may use only the first samples, and shards may be sorted by class."""
    count = len(samples)  # type: ignore[arg-type]
    order = permute(np.arange(count), count, SPLIT_SEED, epoch=0)
    return Subset(samples, order)  # type: ignore[arg-type]


# --- augmentation of a micro-batch --------------------------------------------
#
# Random numbers come from torch's CPU generator, like dropout on the CPU. It is seeded for each
# micro-batch, so the result does not depend on the rank that processes it.


def crop(images: Tensor, size: int, move: bool, flip: bool) -> Tensor:
    """Cut a square out of each image.

    Args:
        images: (N, C, H, W), H and W at least `size`.
        size: side of the square.
        move: cut at a random position, else from the middle.
        flip: mirror the image left to right with probability 1/2.

    Returns:
        (N, C, size, size), same dtype and device.
    """
    count, _, height, width = images.shape
    room = torch.tensor([[height - size], [width - size]])
    drawn = torch.rand(2, count) if move else torch.full((2, count), 0.5)
    # 0.5 is the middle; rand() < 1, so the last position is as likely as any other.
    top, left = (drawn * (room + 1)).long() if move else (room // 2).expand(2, count)
    rows = top[:, None] + torch.arange(size)
    columns = left[:, None] + torch.arange(size)
    if flip:
        mirrored = torch.rand(count) < 0.5
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    device = images.device
    sample = torch.arange(count, device=device)[:, None, None]
    cut = images[sample, :, sent(rows, device)[:, :, None], sent(columns, device)[:, None, :]]
    return cut.permute(0, 3, 1, 2).contiguous()


def normalize(images: Tensor, normalization: Normalization) -> Tensor:
    """Args: images: (N, C, H, W) uint8. Returns: float32, mean about 0, deviation about 1."""
    mean, std = (sent(torch.tensor(values), images.device) for values in normalization)
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]


def mix(images: Tensor, alpha: float) -> tuple[Tensor, Tensor, float]:
    """Mixup (Zhang et al., arXiv:1710.09412): mix each image with another of the micro-batch.

    Args:
        images: (N, C, H, W) float.
        alpha: > 0; one mixing coefficient per micro-batch is drawn from Beta(alpha, alpha).

    Returns:
        The mixtures; int64 (N,), the index of each image's partner; the weight of the image itself.
    """
    share = float(torch.distributions.Beta(alpha, alpha).sample())
    other = sent(torch.randperm(len(images)), images.device)
    return images.lerp(images[other], 1 - share), other, share
