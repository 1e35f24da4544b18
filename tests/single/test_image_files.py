"""Image files as cameras, microscopes and editors leave them: depth, orientation, hidden copies."""

from __future__ import annotations

import gzip
import shutil
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.data.images import class_directories, decode
from hvdtrain.errors import UserError
from tests.support.datasets import draw

SIDE = 32
RAMP = np.linspace(0, 1, SIDE * SIDE).reshape(SIDE, SIDE)
EXPECTED = np.round(RAMP * 255)


def _written(pixels: NDArray[np.generic], name: str) -> BytesIO:
    found = BytesIO()
    Image.fromarray(pixels).save(found, name)
    found.seek(0)
    return found


def _twelve_bits() -> BytesIO:
    """A TIFF file of 12 bits per pixel, as of cameras for microscopes; Pillow only reads them."""
    pixels = np.round(RAMP * 4095).astype(np.uint32).reshape(-1, 2)
    pairs = (pixels[:, 0] << 12) | pixels[:, 1]
    content = b"".join(int(pair).to_bytes(3, "big") for pair in pairs)
    # Width, height, bits, no compression, black is 0, offset, samples, rows, bytes.
    facts = {256: SIDE, 257: SIDE, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: SIDE}
    facts[279] = len(content)
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in facts.items())
    head = struct.pack("<2sHI", b"II", 42, 8 + len(content))
    return BytesIO(head + content + struct.pack("<H", len(facts)) + tags + bytes(4))


@pytest.mark.parametrize("kind", ["png", "tiff", "ppm", "big-endian tiff", "12 bits", "8 bits"])
def test_gray_of_more_than_8_bits_is_scaled_from_its_range(kind: str) -> None:
    wide = np.round(RAMP * 65535).astype(np.uint16)
    if kind == "12 bits":
        file = _twelve_bits()
    elif kind == "8 bits":
        file = _written(EXPECTED.astype(np.uint8), "png")
    elif kind == "big-endian tiff":
        file = BytesIO()
        Image.frombytes("I;16B", (SIDE, SIDE), wide.astype(">u2").tobytes()).save(file, "tiff")
    else:
        file = _written(wide, kind)
    found = decode(file, SIDE, "x").numpy()
    assert found.shape == (3, SIDE, SIDE) and (found == found[:1]).all()
    assert np.abs(found[0] - EXPECTED).max() <= 1


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(np.int32, "signed or 32-bit integers"), (np.float32, "floating-point numbers")],
)
def test_image_of_unknown_range_is_refused_by_name(
    tmp_path: Path, dtype: type[np.generic], message: str
) -> None:
    for name in ("red", "blue"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.fromarray((RAMP * 100).astype(dtype)).save(tmp_path / name / f"{number}.tif")
    data = class_directories(str(tmp_path), None, 0.5, SIDE)
    with pytest.raises(UserError, match=rf"^image {tmp_path}/.*\.tif cannot be read .*{message}"):
        _ = data.train[0]


@pytest.mark.parametrize("name", ["jpeg", "png", "webp", "tiff"])
@pytest.mark.parametrize(("orientation", "corner"), [(1, (0, 0)), (3, (1, 1)), (6, (0, 1))])
def test_orientation_of_a_camera_is_applied(
    name: str, orientation: int, corner: tuple[int, int]
) -> None:
    pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
    pixels[: SIDE // 2, : SIDE // 2] = 255  # the corner at the top left, as it is stored
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    Image.fromarray(pixels).save(file, name, exif=exif)
    file.seek(0)
    found = decode(file, SIDE, "x")[0].float()
    half = SIDE // 2
    means = found.view(2, half, 2, half).mean((1, 3))
    assert means[corner] > 200 and means.sum() - means[corner] < 100


def test_image_with_broken_exif_data_is_read() -> None:
    file = BytesIO()
    Image.fromarray(EXPECTED.astype(np.uint8)).save(file, "png", exif=b"Exif\0\0II*\0\xff\xff\xff")
    file.seek(0)
    assert np.abs(decode(file, SIDE, "x")[0].numpy() - EXPECTED).max() == 0


def test_hidden_images_and_directories_are_no_samples(tmp_path: Path) -> None:
    clean, used = draw(tmp_path / "clean", 10), draw(tmp_path / "used", 10)
    for directory in used.iterdir():
        # What Jupyter and macOS add.
        (directory / ".ipynb_checkpoints").mkdir()
        for file in sorted(directory.glob("[0-9]*")):
            copy = directory / ".ipynb_checkpoints" / f"{file.stem}-checkpoint{file.suffix}"
            shutil.copy(file, copy)
            (directory / f"._{file.name}").write_bytes(b"\0\5\26\7\0\2\0\0Mac OS X")
    found = [class_directories(str(root), None, 0.2, SIDE) for root in (clean, used)]
    lengths = [(len(data.train), len(data.validation)) for data in found]  # type: ignore[arg-type]
    assert lengths[0] == lengths[1] == (24, 6)
    assert found[0].fingerprint == found[1].fingerprint
    (used / "red/more").mkdir()
    shutil.copy(used / "red/000.png", used / "red/more")
    more = class_directories(str(used), None, 0.2, SIDE)
    assert len(more.train) + len(more.validation) == 31  # type: ignore[arg-type]


def test_files_that_are_no_images_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = draw(tmp_path / "data", 4)
    class_directories(str(data), None, 0.2, SIDE)
    assert not caplog.records
    for name in ("red", "blue"):
        (data / name / f"{name}.heic").write_bytes(b"\0\0\0\x18ftypheic")
    class_directories(str(data), None, 0.2, SIDE)
    (record,) = caplog.records
    assert f"data.train: {data}: skipped" in record.message
    assert record.message.endswith("blue.heic, red.heic")


def test_compressed_shard_is_named_with_its_command(tmp_path: Path) -> None:
    file = tmp_path / "shard.tar.gz"
    file.write_bytes(gzip.compress(bytes(1024)))
    with pytest.raises(
        UserError, match=r"neither a directory nor .*compressed with gzip: .*gunzip"
    ):
        class_directories(str(file), None, 0.2, SIDE)
