"""The task `image` without a run: models, datasets, augmentation, and errors in the data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hvdtrain.config import parse
from hvdtrain.data.images import class_directories, crop, digits, mix
from hvdtrain.errors import UnsupportedTaskError, UserError
from hvdtrain.models.vision import ResNet, VisionTransformer
from hvdtrain.process.data import build_data
from hvdtrain.runtime.device import seed_all
from hvdtrain.tasks.image import Image, ImageConfig, ImageTaskConfig
from tests.support.datasets import cut_off, draw


# torchvision 0.28: parameters, and entries of state_dict().
@pytest.mark.parametrize(
    ("name", "parameters", "entries"),
    [("resnet18", 11_689_512, 122), ("resnet50", 25_557_032, 320)],
)
def test_resnet_layout_matches_torchvision(name: str, parameters: int, entries: int) -> None:
    model = ResNet(name, size=224, channels=3, classes=1000)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert len(model.state_dict()) == entries
    assert {"conv1.weight", "layer4.1.bn2.running_var", "layer2.0.downsample.0.weight"} < {
        *model.state_dict()
    }
    assert model.eval()(torch.zeros(1, 3, 224, 224)).shape == (1, 1000)


def test_vision_transformer_distinguishes_patch_positions() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(size=8, patch=2, channels=1, classes=10).eval()
    image = torch.rand(1, 1, 8, 8)
    assert model(image).shape == (1, 10)
    assert not torch.allclose(model(image), model(image.roll(2, dims=3)), atol=1e-5)


def test_digits_splits_cover_dataset_with_original_images() -> None:
    from sklearn.datasets import load_digits

    data = digits(0.2)
    train, validation = (
        [part[i][0] for i in range(len(part))]  # type: ignore[arg-type]
        for part in (data.train, data.validation)
    )
    assert (len(train), len(validation)) == (1438, 359)
    cut = crop(torch.stack(train + validation), 8, move=False, flip=False)
    original = torch.from_numpy(load_digits().images)
    assert torch.equal(cut.flatten(1).sum(0).double(), 15 * original.flatten(1).sum(0))


def test_random_crop_covers_all_positions_and_is_reproducible() -> None:
    images = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6).repeat(400, 2, 1, 1)
    seed_all(1, 2, 3)
    cut = crop(images, 4, move=True, flip=True)
    assert cut.shape == (400, 2, 4, 4) and cut.dtype == torch.uint8
    places = {int(image[0].min()) for image in cut}
    assert places == {6 * row + column for row in range(3) for column in range(3)}
    mirrored = (cut[:, 0, 0, 0] > cut[:, 0, 0, 1]).float().mean()
    assert 0.4 < float(mirrored) < 0.6
    seed_all(1, 2, 3)
    assert torch.equal(cut, crop(images, 4, move=True, flip=True))


def test_mixup_blends_images_by_returned_share() -> None:
    torch.manual_seed(0)
    images = torch.rand(8, 1, 2, 2)
    mixed, other, share = mix(images, 0.4)
    assert 0 <= share <= 1 and sorted(other.tolist()) == list(range(8))
    torch.testing.assert_close(mixed, share * images + (1 - share) * images[other])


def _task(**keys: object) -> Image:
    return Image(ImageTaskConfig(ImageConfig(**keys)))  # type: ignore[arg-type]


def test_loss_matches_mixed_and_smoothed_labels() -> None:
    task = _task(mixup=0.3, label_smoothing=0.1, crop=False)
    data = task.datasets().train
    torch.manual_seed(0)
    model = task.model()
    batch = next(iter(DataLoader(data, 16)))
    seed_all(5)
    found = task.loss(model, batch)
    seed_all(5)
    mixed, other, share = mix(task._prepared(batch[0], training=False), 0.3)
    smooth = torch.full((16, 10), 0.1 / 10)
    target = smooth + 0.9 * share * torch.eye(10)[batch[1]]
    target += 0.9 * (1 - share) * torch.eye(10)[batch[1][other]]
    expected = -(target * model(mixed).log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(found["loss"], expected)
    model.eval()
    labels = batch[1]
    scores = model(task._prepared(batch[0], training=False))
    found = task.loss(model, batch)
    plain = torch.nn.functional.cross_entropy(scores, labels)
    torch.testing.assert_close(found["loss"], plain)
    assert found["top1"] == (int((scores.argmax(1) == labels).sum()), 16)
    better = (scores > scores.gather(1, labels[:, None])).sum(1)
    assert found["top5"] == (int((better < 5).sum()), 16)


def test_batchnorm_rejects_micro_batch_of_one_image() -> None:
    task = _task()
    batch = next(iter(DataLoader(task.datasets().train, 1)))
    with pytest.raises(UnsupportedTaskError, match=r"batch.micro_size 1: BatchNorm of resnet8"):
        task.loss(task.model(), batch)


def test_image_directory_splits_are_complete_and_disjoint(tmp_path: Path) -> None:
    draw(tmp_path / "all", 10)
    data = class_directories(str(tmp_path / "all"), None, 0.2, 32)
    assert data.classes == ["blue", "green", "red"]
    train, validation = data.train, data.validation
    image, label = train[0]
    assert image.shape == (3, 37, 37) and image.dtype == torch.uint8 and label == 0
    files = [[file for file, _ in part._samples] for part in (train, validation)]  # type: ignore[attr-defined]
    assert [len(part) for part in files] == [24, 6]
    assert len({*files[0], *files[1]}) == 30
    # The first validation images have several classes.
    assert len({label for _, label in validation._samples[:4]}) > 1  # type: ignore[attr-defined]
    other = draw(tmp_path / "own", 2, classes=("red",))
    separate = class_directories(str(tmp_path / "all"), str(other), 0.2, 32)
    assert (len(separate.train), len(separate.validation)) == (30, 2)  # type: ignore[arg-type]
    assert {label for _, label in separate.validation._samples} == {2}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "data.train: .*/missing: No such file or directory"),
        ("a file", "data.train: .*/a file is neither a directory nor a tar shard"),
        ("no classes", "data.train: .*/no classes has no class directories; .*/CLASS/"),
        ("empty class", r"data.train: class directory .*/empty class/cat has no image \(\*.jpg"),
        ("one each", "too few images to split off validation data"),
    ],
)
def test_unusable_image_directory_is_rejected(tmp_path: Path, what: str, message: str) -> None:
    (tmp_path / "a file").write_text("x")
    (tmp_path / "no classes").mkdir()
    (tmp_path / "empty class" / "cat").mkdir(parents=True)
    draw(tmp_path / "one each", 1)
    with pytest.raises(UserError, match=message):
        class_directories(str(tmp_path / what), None, 0.2, 32)


def test_class_found_only_in_validation_data_is_rejected(tmp_path: Path) -> None:
    train = draw(tmp_path / "train", 2, classes=("red", "blue"))
    validation = draw(tmp_path / "validation", 2)
    message = "class 'green' .*validation/green.* is only in the validation data; .* blue, red"
    with pytest.raises(UserError, match=message):
        class_directories(str(train), str(validation), 0.2, 32)


@pytest.mark.parametrize("file", ["000.png", "001.jpg"])
def test_truncated_image_file_is_named(tmp_path: Path, file: str) -> None:
    broken = cut_off(draw(tmp_path, 2) / "green" / file)
    data = class_directories(str(tmp_path), None, 0.5, 32)
    samples = [*data.train._samples, *data.validation._samples]  # type: ignore[attr-defined]
    number = [path for path, _ in samples].index(broken)
    halves = [data.train, data.validation]
    with pytest.raises(UserError, match=f"^image {broken} cannot be read .*: repair or remove"):
        halves[number // 3][number % 3]
    broken.write_text("no picture")
    with pytest.raises(UserError, match=f"^image {broken} cannot be read .cannot identify"):
        halves[number // 3][number % 3]


def test_digits_dataset_rejects_larger_image_size() -> None:
    with pytest.raises(UserError, match=r"image.size 224 requires your own images"):
        build_data(parse(["--config", "resnet50"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--image.model vit --image.patch 3", "image.patch must divide image.size 8, not be 3"),
        ("--image.model vit --image.sync_batchnorm true", "vit has no BatchNorm"),
        ("--image.label_smoothing 1", r"image.label_smoothing must lie in \[0, 1\)"),
        ("--image.model resnet19", "image.model: expected one of .*'resnet18'.*not resnet19"),
    ],
)
def test_invalid_image_key_is_rejected(flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(["--task", "image", *flags.split()])
