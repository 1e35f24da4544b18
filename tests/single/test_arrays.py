"""Arrays in HDF5, NetCDF and Zarr files, written by h5py, netCDF4, xarray and zarr."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pytest
import torch
import xarray
import zarr

from hvdtrain.data.arrays import ArrayWindows
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.config import LoaderConfig
from hvdtrain.data.order import build_order, specification_of
from hvdtrain.errors import UserError
from hvdtrain.runtime.mesh import Group

SHAPE, CHUNKS = (100, 12, 20), (8, 6, 20)
VALUES = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
DIMS = ("time", "y", "x")


def _hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        made = file.create_dataset("v", data=VALUES, chunks=CHUNKS, compression="gzip")
        for number, dim in enumerate(DIMS):
            made.dims[number].label = dim


def _contiguous(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["v"] = VALUES.astype(">f4")
        for number, dim in enumerate(DIMS):
            file["v"].dims[number].label = dim


def _netcdf(path: Path, kind: str = "NETCDF4") -> None:
    with netCDF4.Dataset(path, "w", format=kind) as file:
        for dim, size in zip(DIMS, SHAPE, strict=True):
            file.createDimension(dim, size)
        more = {"chunksizes": CHUNKS} if kind == "NETCDF4" else {}
        file.createVariable("v", "f4", DIMS, **more)[:] = VALUES


def _of_xarray(version: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        made = xarray.Dataset({"v": (DIMS, VALUES)})
        encoding = {"v": {"chunks": CHUNKS}}
        made.to_zarr(path, zarr_format=version, encoding=encoding, consolidated=version == 2)

    return write


def _of_zarr(version: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        group = zarr.create_group(store=str(path), zarr_format=version)
        group.create_array("v", data=VALUES, chunks=CHUNKS)

    return write


WRITERS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "HDF5": ("a.h5", _hdf5),
    "HDF5, contiguous, big-endian": ("a.hdf5", _contiguous),
    "NetCDF 4": ("a.nc", _netcdf),
    "NetCDF 3": ("a.nc", lambda path: _netcdf(path, "NETCDF3_64BIT_OFFSET")),
    "Zarr 2 of xarray": ("a.zarr", _of_xarray(2)),
    "Zarr 3 of xarray": ("a.zarr", _of_xarray(3)),
    "Zarr 2": ("a.zarr", _of_zarr(2)),
    "Zarr 3": ("a.zarr", _of_zarr(3)),
}


def written(directory: Path, name: str) -> tuple[str, str]:
    """Write a file; return it and the name of its first dimension."""
    file, write = WRITERS[name]
    write(directory / file)
    return str(directory / file), "dim_0" if name in ("Zarr 2", "Zarr 3") else "time"


@pytest.mark.parametrize("name", WRITERS)
def test_each_position_is_a_sample(tmp_path: Path, name: str) -> None:
    path, time = written(tmp_path, name)
    data = ArrayWindows(path, ["v"], time)
    assert len(data) == 100
    for number in np.random.default_rng(0).permutation(100).tolist():
        assert data[number]["v"].dtype == torch.float32
        assert np.array_equal(data[number]["v"].numpy(), VALUES[number])
    assert data.bytes_read == VALUES.nbytes


@pytest.mark.parametrize("name", WRITERS)
def test_windows_and_patches_cover_the_values(tmp_path: Path, name: str) -> None:
    path, time = written(tmp_path, name)
    y = "dim_1" if time == "dim_0" else "y"
    data = ArrayWindows([path], ["v"], {time: 5, y: 4}, {time: 1})
    found = {}
    for number in range(len(data)):
        sample = data[number]["v"].numpy()
        assert sample.shape == (5, 4, 20)
        first = np.unravel_index(int(sample[0, 0, 0]), SHAPE)
        found[int(first[0]), int(first[1])] = sample
    assert sorted(found) == [(t, y) for t in range(96) for y in range(0, 12, 4)]
    for (t, row), sample in found.items():
        assert np.array_equal(sample, VALUES[t : t + 5, row : row + 4])


def test_several_files_and_arrays_form_one_sequence(tmp_path: Path) -> None:
    for number in (0, 1):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("images", data=VALUES + number, chunks=CHUNKS)
            file.create_dataset("of/labels", data=np.arange(100) + 100 * number, chunks=(7,))
    data = ArrayWindows(str(tmp_path / "*.h5"), ["images", "of/labels"], "dim_0")
    assert len(data) == 200 and int(data.shard_samples.sum()) == 200
    labels = [int(data[number]["of/labels"]) for number in range(200)]
    assert labels == list(range(200))
    assert np.array_equal(data[150]["images"].numpy(), VALUES[50] + 1)


def test_netcdf_values_are_scaled_and_missing_ones_are_nan(tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "a.nc", "w") as file:
        file.createDimension("time", 10)
        packed = file.createVariable("t2m", "i2", ("time",), fill_value=-999)
        packed.scale_factor, packed.add_offset = 0.5, 270.0
        packed[:] = np.ma.masked_equal(270.0 + np.arange(10), 275.0)
    data = ArrayWindows(str(tmp_path / "a.nc"), ["t2m"], {"time": 10})
    expected = 270.0 + np.arange(10)
    expected[5] = np.nan
    np.testing.assert_array_equal(data[0]["t2m"].numpy(), expected)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("window", [1, 4])
def test_sequential_order_reads_each_chunk_about_once(
    tmp_path: Path, ranks: int, window: int
) -> None:
    values = np.arange(2400 * 50, dtype=np.float32).reshape(2400, 50)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("v", data=values, chunks=(16, 50))
    global_size, micro_size, read, used, seen = 24, 4, 0, 0, []
    for rank in range(ranks):
        data = ArrayWindows(str(tmp_path / "a.h5"), ["v"], {"dim_0": window}, {"dim_0": 1})
        config = LoaderConfig(order="sequential", shuffle_buffer=960)
        order = build_order(specification_of(data, config), 0, global_size)
        mine = Assignment(global_size // micro_size, Group(rank, ranks))
        for step in range(len(data) // global_size):
            for micro_batch in mine:
                start = step * global_size + micro_batch * micro_size
                for number in order.samples(start, start + micro_size).tolist():
                    seen.append(number)
                    used += data[number]["v"][0].numel() * 4
        read += data.bytes_read
    assert len(seen) == len(set(seen)) == len(data) // global_size * global_size
    assert read / used < 1.2, "bytes read / bytes of the samples' positions"


def test_many_files_are_not_open_at_once(tmp_path: Path) -> None:
    for number in range(100):
        with h5py.File(tmp_path / f"{number:03}.h5", "w") as file:
            file["v"] = np.full(3, number)
    data = ArrayWindows(str(tmp_path / "*.h5"), "v", "dim_0")
    assert [int(data[3 * number]["v"]) for number in range(100)] == list(range(100))
    links = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    assert 0 < sum(link.suffix == ".h5" and link.parent == tmp_path for link in links) <= 64


def test_chunks_of_a_sample_are_kept_however_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdtrain.data.arrays._CACHE_BYTES", 100)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("v", "w"):
            file.create_dataset(name, data=np.zeros((64, 100)), chunks=(16, 100))
    data = ArrayWindows(str(tmp_path / "a.h5"), ["v", "w"], "dim_0")
    for number in range(64):
        _ = data[number]
    assert data.bytes_read == 2 * 64 * 100 * 8


def test_store_may_be_named_with_a_slash(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "Zarr 3")
    assert len(ArrayWindows(f"{path}/", "v", "dim_0")) == 100


def _sum_of(data: ArrayWindows) -> float:
    return sum(float(data[number]["v"].sum()) for number in range(0, 100, 9))


@pytest.mark.parametrize(
    ("method", "name"), [*(("fork", name) for name in WRITERS), ("spawn", "HDF5")]
)
def test_other_processes_open_files_for_themselves(tmp_path: Path, name: str, method: str) -> None:
    path, time = written(tmp_path, name)
    data = ArrayWindows(path, ["v"], time)
    expected = _sum_of(data)
    assert len(pickle.dumps(data)) < 20_000
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_sum_of, [data] * 4) == [expected] * 4


def test_fingerprint_changes_with_values_and_windows(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "HDF5")
    first = ArrayWindows(path, ["v"], "time").fingerprint()
    assert ArrayWindows(path, ["v"], {"time": 2}).fingerprint() != first
    assert ArrayWindows(path, ["v"], "time").fingerprint() == first
    with h5py.File(path, "a") as file:
        file["v"][0] += 1
    assert ArrayWindows(path, ["v"], "time").fingerprint() != first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["w"], "time"), r"a\.h5 has no array 'w', but v"),
        ((["v"], "t"), r"a\.h5: v has no dimension 't', but time, y, x"),
        (([], "time"), "name at least one array"),
        ((["v"], {"time": 0}), "a window has dimensions with integer lengths of at least 1"),
        ((["v"], {"time": 2.5}), "a window has dimensions with integer lengths"),
        ((["v"], {"time": 2}, {"x": 1}), "a stride has no others"),
        ((["v"], {"time": 101}), "no window fits"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, arguments: tuple[Any, ...], message: str
) -> None:
    path, _ = written(tmp_path, "HDF5")
    with pytest.raises(UserError, match=message):
        ArrayWindows(path, *arguments)


@pytest.mark.parametrize("name", ["a.h5", "a.nc", "a.zarr", "a.txt"])
def test_broken_file_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not an array" * 99)
    with pytest.raises(UserError, match=rf"{name} (cannot be read|is not a file of arrays)"):
        ArrayWindows(str(tmp_path / name), ["v"], "time")
    with pytest.raises(UserError, match="no file matches"):
        ArrayWindows(str(tmp_path / "missing*.h5"), ["v"], "time")
