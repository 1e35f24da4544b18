"""Image classification: residual networks and a small vision transformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hvdtrain.config_tiers import basic, expert
from hvdtrain.data.compressed import also_compressed
from hvdtrain.errors import UnsupportedTaskError, UserError, require
from hvdtrain.tasks import Datasets

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.data.images import ImageData

_DIGIT_SIZE, _PHOTO_SIZE = 8, 224
_SHOWN = 10
_SHARDS = also_compressed((".tar",))


@dataclass
class ImageConfig:
    """The model, and regularization.

    Args:
        model: `resnet8`, `resnet18`, `resnet50` or `vit`, a small vision transformer
        classes: number of classes in tar shards, numbered 0 to `image.classes` - 1
        size: side of the square that the model sees, in pixels; null = 224, for the digits 8
        patch: side of a patch of `vit`, divides `image.size`; null = 16, or a quarter of the size
            up to 64
        crop: in training, cut the square out at a random position (digits are shifted)
        flip: in training, mirror half of the images left to right; null = images of a directory,
            not digits
        label_smoothing: in training, fraction of the target that is spread evenly over all classes
        mixup: in training, mix images with weights from Beta(mixup, mixup); 0 = never
        sync_batchnorm: compute BatchNorm's statistics over the global batch; requires one
            micro-batch per step on each rank
    """

    model: Literal["resnet8", "resnet18", "resnet50", "vit"] = basic("resnet8")
    classes: int | None = basic(None)
    size: int | None = basic(None)
    patch: int | None = expert(None)
    crop: bool = True
    flip: bool | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        require(
            0 <= self.label_smoothing < 1,
            f"image.label_smoothing must lie in [0, 1), not {self.label_smoothing}",
        )
        require(self.mixup >= 0, f"image.mixup must be >= 0 (0 = never), not {self.mixup}")
        require(
            not (self.sync_batchnorm and self.model == "vit"),
            "image.sync_batchnorm: image.model vit has no BatchNorm",
        )


@dataclass
class ImageDataConfig:
    """Images to train on.

    Args:
        train: a directory with a directory of images for each class, or tar shards
            ('shards/*.tar', also behind a URL) with images and their class numbers (.cls); null =
            scikit-learn's digits
        validation: the same for validation; null = `data.validation_fraction` of the data
        validation_fraction: fraction of each class for validation (for the digits: of all images)
        cache: directory for the indexes of tar shards; null = next to the shards
    """

    train: str | None = basic(None)
    validation: str | None = basic(None)
    validation_fraction: float = 0.2
    cache: str | None = None

    def __post_init__(self) -> None:
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction must lie in (0, 1), not {self.validation_fraction}",
        )
        require(
            self.train is not None or self.validation is None,
            "data.validation needs data.train, the directory of the training images",
        )
        require(
            self.sharded or self.cache is None,
            "data.cache is for tar shards (*.tar), which data.train does not name",
        )
        require(
            self.validation is None or self.validation.endswith(_SHARDS) == self.sharded,
            "data.train and data.validation must both be directories, or both tar shards (*.tar)",
        )

    @property
    def sharded(self) -> bool:
        """Whether the images are in tar files."""
        return self.train is not None and self.train.endswith(_SHARDS)


@dataclass
class ImageTaskConfig:
    """Keys of the task image.

    Args:
        image: the model that classifies images, and its regularization
        data: images
    """

    image: ImageConfig = field(default_factory=ImageConfig)
    data: ImageDataConfig = field(default_factory=ImageDataConfig)

    def __post_init__(self) -> None:
        image, data = self.image, self.data
        require(
            not data.sharded or (image.classes or 0) >= 2,
            f"data.train {data.train} needs image.classes, the number of classes (>= 2), not "
            f"{image.classes}",
        )
        require(
            data.sharded or image.classes is None,
            "image.classes is for tar shards (*.tar), which data.train does not name",
        )
        require(self.side >= _DIGIT_SIZE, f"image.size must be >= {_DIGIT_SIZE}, not {image.size}")
        require(
            image.model != "vit" or (self.patch_side >= 1 and self.side % self.patch_side == 0),
            f"image.patch must divide image.size {self.side}, not be {self.patch_side}",
        )

    @property
    def side(self) -> int:
        """Side of the square that the model sees, in pixels."""
        return self.image.size or (_PHOTO_SIZE if self.data.train else _DIGIT_SIZE)

    @property
    def patch_side(self) -> int:
        """Side of a patch, in pixels."""
        if self.image.patch is not None:
            return self.image.patch
        return 16 if self.side > 64 else self.side // 4


class Image:
    """Image classification, with top-1 and top-5 accuracy over all ranks."""

    Config = ImageTaskConfig
    metrics = ("top1", "top5")
    units = ("images", 1)
    defaults: ClassVar[dict[str, Any]] = {
        "batch.global_size": 64,
        "batch.micro_size": 32,
        "train.duration": 400,
        "optim.lr": 1e-2,
    }

    def __init__(self, config: ImageTaskConfig) -> None:
        self.config, self._whole = config.image, config
        self._data: ImageData | None = None

    def datasets(self) -> Datasets:
        from hvdtrain.data.images import Reading, class_directories, digits, shards

        config, side = self._whole.data, self._whole.side
        if config.train is None and side != _DIGIT_SIZE:
            raise UserError(
                f"image.size {side} requires your own images, with data.train; the digits have "
                f"{_DIGIT_SIZE} x {_DIGIT_SIZE} pixels"
            )
        if config.train is None:
            self._data = digits(config.validation_fraction)
        else:
            source = config.train, config.validation, config.validation_fraction, side
            self._data = (
                shards(*source, Reading(self.config.classes or 0, config.cache))
                if config.sharded
                else class_directories(*source)
            )
        return Datasets(self._data.train, self._data.validation, self._data.fingerprint)

    def model(self) -> nn.Module:
        from hvdtrain.models.vision import ResNet, VisionTransformer
        from hvdtrain.tasks.sync_batchnorm import synchronize

        assert self._data is not None
        classes, side = len(self._data.classes), self._whole.side
        channels = len(self._data.normalization.mean)
        if self.config.model == "vit":
            return VisionTransformer(side, self._whole.patch_side, channels, classes)
        model = ResNet(self.config.model, side, channels, classes)
        if self.config.sync_batchnorm:
            synchronize(model)
        return model

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The residual blocks, or the layers of the transformer."""
        from torch.nn import TransformerEncoderLayer

        from hvdtrain.models.vision import BasicBlock, Bottleneck

        kinds = (BasicBlock, Bottleneck, TransformerEncoderLayer)
        return [module for module in model.modules() if isinstance(module, kinds)]

    def loss(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
        """Loss of a micro-batch; augmentation, label smoothing and mixup apply in training only.

        Args:
            batch: uint8 images (N, C, H, W) with a margin, and int64 labels (N,).

        Returns:
            The mean loss; for top1 and top5 the number of correct predictions, and N.
        """
        import torch
        from torch.nn.functional import cross_entropy

        from hvdtrain.data.images import mix

        images, labels = self._prepared(batch[0], model.training), batch[1]
        config, count = self.config, len(labels)
        self._check(model, count)
        targets = [(1.0, labels)]
        if model.training and config.mixup:
            images, other, share = mix(images, config.mixup)
            targets = [(share, labels), (1 - share, labels[other])]
        scores = model(images)
        smoothing = config.label_smoothing if model.training else 0.0
        losses = [s * cross_entropy(scores, y, label_smoothing=smoothing) for s, y in targets]
        top1, top5 = torch.stack([s * _right(scores, y) for s, y in targets]).sum(0)
        loss = torch.stack(losses).sum()
        return {"loss": loss, "top1": (top1, count), "top5": (top5, count)}

    def _prepared(self, images: Tensor, training: bool) -> Tensor:
        from hvdtrain.data.images import crop, normalize

        assert self._data is not None
        config = self.config
        flip = config.flip if config.flip is not None else self._whole.data.train is not None
        cut = crop(images, self._whole.side, training and config.crop, training and flip)
        return normalize(cut, self._data.normalization)

    def _check(self, model: nn.Module, count: int) -> None:
        if model.training and count == 1 and self.config.model != "vit":
            raise UnsupportedTaskError(
                f"batch.micro_size 1: BatchNorm of {self.config.model} normalizes over the "
                "micro-batch, which must have at least 2 images"
            )

    def sample(self, model: nn.Module) -> str:
        """Labels and predictions of the first validation images."""
        import torch

        assert self._data is not None
        data, classes = self._data.validation, self._data.classes
        shown = [data[i] for i in range(min(_SHOWN, len(data)))]  # type: ignore[arg-type]
        device = next(model.parameters()).device
        with torch.no_grad():
            images = torch.stack([image for image, _ in shown]).to(device)
            seen = model(self._prepared(images, training=False)).argmax(1).tolist()
        pairs = zip((classes[int(label)] for _, label in shown), seen, strict=True)
        return ", ".join(f"{name} seen as {classes[number]}" for name, number in pairs)


def _right(scores: Tensor, labels: Tensor) -> Tensor:
    """Number of labels with the highest score, and among the five highest: (2,) float64."""
    import torch

    best = scores.detach().topk(min(5, scores.shape[1])).indices == labels[:, None]
    return torch.stack((best[:, 0].sum(), best.sum())).double()
