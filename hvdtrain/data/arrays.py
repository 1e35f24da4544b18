"""Samples from arrays in HDF5, NetCDF and Zarr files (extra `arrays`).

An array is stored in chunks, which are read and decompressed as a whole. A process therefore keeps
the chunks that it has read last. The samples that begin in one chunk have neighboring numbers, so
that `loader.order sequential` reads each chunk about once.
"""

from __future__ import annotations

import glob
import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hvdtrain.data.files import Fingerprint
from hvdtrain.data.remote import is_url
from hvdtrain.errors import UserError

# Of the chunks that a process keeps.
_CACHE_BYTES = 1 << 28
# Neighboring chunks that form a shard: a window at the border of two shards reads a chunk of each.
_CHUNKS_PER_SHARD = 8
_FINGERPRINT_SAMPLES = 8
_OPEN_FILES = 64
# Of arrays without chunks: windows whose numbers are neighbors.
_WINDOWS_AT_ONCE = 1024
_ZARR, _HDF5, _NETCDF = (".zarr",), (".h5", ".hdf5", ".he5"), (".nc", ".nc4", ".cdf", ".netcdf")


class _Array(NamedTuple):
    """An array of a file.

    Args:
        values: supports slices, and returns numpy arrays.
        dims: names of its dimensions.
        chunks: lengths of a chunk; None: an array without chunks.
        axes: number of each windowed dimension, and the length of what is read at once along it.
    """

    values: Any
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None
    axes: tuple[tuple[int, int], ...] = ()


class _Grid(NamedTuple):
    """Windows of a file, by the chunk in which they begin.

    Args:
        origins: per windowed dimension and chunk, the first positions of its windows.
        ends: number of windows in all chunks up to each one, in C order.
    """

    origins: list[list[list[int]]]
    ends: list[int]

    def origin(self, number: int) -> tuple[int, ...]:
        """Return the first position of a window in each windowed dimension."""
        chunk = bisect_right(self.ends, number)
        if chunk:
            number -= self.ends[chunk - 1]
        positions = []
        for chunks in reversed(self.origins):  # the last dimension changes first
            chunk, place = divmod(chunk, len(chunks))
            positions.append(chunks[place])
        found = []
        for there in positions:
            number, at = divmod(number, len(there))
            found.append(there[at])
        return tuple(reversed(found))


class _OpenArrays:
    """Open files, and the chunks that were read last, of one process: after a fork, of the new one.

    Attributes:
        bytes_read: of the chunks that this process has read.
        of_sample: the most chunks that a sample has needed: at least as many are kept.
    """

    def __init__(
        self, paths: Sequence[str], names: Sequence[str], window: Mapping[str, int]
    ) -> None:
        self._paths, self._names, self._window = paths, names, window
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._arrays: OrderedDict[int, dict[str, _Array]] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, str, tuple[int, ...]], NDArray[Any]] = OrderedDict()
        self._cached = self.bytes_read = 0
        self.of_sample = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self._paths, "names": self._names, "window": self._window}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def opened(self, file: int) -> dict[str, _Array]:
        """The arrays of a file, which each process opens for itself."""
        if self._process != os.getpid():
            self._reset()
        arrays = self._arrays.pop(file, None)
        if arrays is None:
            path = self._paths[file]
            with _errors(path):
                arrays = {
                    name: self._checked(path, name, _OPENERS[os.path.splitext(path)[1]](path, name))
                    for name in self._names
                }
            while len(self._arrays) >= _OPEN_FILES:
                self._arrays.popitem(last=False)  # closes it
        self._arrays[file] = arrays  # most recently used last
        return arrays

    def _checked(self, path: str, name: str, array: _Array) -> _Array:
        missing = [dim for dim in self._window if dim not in array.dims]
        if missing:
            raise UserError(
                f"{path}: {name} has no dimension {missing[0]!r}, but {', '.join(array.dims)}"
            )
        if array.dtype.kind not in "biuf":
            raise UserError(f"{path}: {name} has the dtype {array.dtype}: only numbers are read")
        axes = []
        for dim, size in self._window.items():
            at = array.dims.index(dim)
            axes.append((at, min(array.chunks[at], array.shape[at]) if array.chunks else size))
        return array._replace(axes=tuple(axes))

    def chunk(self, file: int, name: str, place: tuple[int, ...]) -> NDArray[Any]:
        """Return a chunk, complete in the dimensions that are not windowed.

        Args:
            place: its number in each windowed dimension.
        """
        found = self._chunks.pop((file, name, place), None)
        if found is None:
            array = self.opened(file)[name]
            part = [slice(None)] * len(array.shape)
            for at, (axis, length) in zip(place, array.axes, strict=True):
                part[axis] = slice(at * length, min((at + 1) * length, array.shape[axis]))
            with _errors(self._paths[file]):
                found = np.asarray(array.values[tuple(part)]).astype(array.dtype, copy=False)
            self._cached += found.nbytes
            self.bytes_read += found.nbytes
            while len(self._chunks) >= max(1, self.of_sample) and self._cached > _CACHE_BYTES:
                self._cached -= self._chunks.popitem(last=False)[1].nbytes
        self._chunks[file, name, place] = found  # most recently used last
        return found


class ArrayWindows(Dataset[dict[str, Tensor]]):
    """A sample is {name of an array: its values in a window}, as tensors of its dtype.

    Files follow each other; no window crosses their border. Values of NetCDF files, and of Zarr
    stores of xarray, are decoded as xarray does: scaled, and missing ones NaN. Dimensions without a
    name are dim_0, dim_1 and so on.

    Args:
        patterns: files (*.h5, *.hdf5, *.nc), stores (*.zarr) or globs, with the same arrays.
        names: of the arrays, such as "t2m" or "group/images"; or the name of one.
        window: dimension -> length of a window; or one dimension, along which each position is a
            sample without this dimension. All arrays have these dimensions, with equal lengths.
            Other dimensions are read completely.
        stride: dimension -> distance of two windows; default: their length, so that they do not
            overlap.
        key: what the patterns come from, for messages.

    Attributes:
        shard_samples: number of samples in each group of chunks, int64, in the order of the
            samples.

    Raises:
        UserError: a package is missing, or a file is broken or has no such array or dimension.
    """

    def __init__(
        self,
        patterns: Sequence[str] | str,
        names: Sequence[str] | str,
        window: Mapping[str, int] | str,
        stride: Mapping[str, int] | None = None,
        key: str = "ArrayWindows",
    ) -> None:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        self._key = key
        self._paths = [path for pattern in patterns for path in self._expanded(pattern)]
        self._names = [names] if isinstance(names, str) else list(names)
        if not self._names:
            raise UserError(f"{key}: name at least one array")
        self._single = isinstance(window, str)
        self._window = {window: 1} if isinstance(window, str) else dict(window)
        self._stride = {**self._window, **(stride or {})}
        lengths = [*self._window.values(), *self._stride.values()]
        fits = self._window and self._stride.keys() == self._window.keys()
        if not fits or not all(isinstance(length, int) and length >= 1 for length in lengths):
            raise UserError(
                f"{key}: a window has dimensions with integer lengths of at least 1, and a stride "
                f"has no others, not {self._window} and {self._stride}"
            )
        self._files = _OpenArrays(self._paths, self._names, self._window)
        self._grids = [self._grid(file) for file in range(len(self._paths))]
        counts = [grid.ends[-1] for grid in self._grids]
        if not sum(counts):
            raise UserError(f"{key}: {', '.join(self._paths[:3])}: no window fits: {self._window}")
        self._starts: list[int] = np.cumsum([0, *counts]).tolist()
        ends = [
            self._starts[file] + np.array(grid.ends[_CHUNKS_PER_SHARD - 1 : -1 : _CHUNKS_PER_SHARD])
            for file, grid in enumerate(self._grids)
        ]
        borders = np.unique(np.concatenate([self._starts, *ends]))
        self.shard_samples = np.diff(borders).astype(np.int64)

    @property
    def bytes_read(self) -> int:
        """Bytes of the chunks that this process has read."""
        return self._files.bytes_read

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect_right(self._starts, index) - 1
        origin = self._grids[file].origin(index - self._starts[file])
        return {name: torch.from_numpy(self._read(file, name, origin)) for name in self._names}

    def fingerprint(self) -> Fingerprint:
        """16 hex digits that change with the arrays' shapes and dtypes, or with some values."""
        digest = hashlib.sha256(repr((self._names, self._window, self._stride)).encode())
        for file in range(len(self._paths)):
            of_file = [(a.dims, a.shape, a.dtype.str) for a in self._files.opened(file).values()]
            digest.update(repr(of_file).encode())
        for index in np.linspace(0, len(self) - 1, min(len(self), _FINGERPRINT_SAMPLES)):
            for values in self[int(index)].values():
                digest.update(values.numpy().tobytes())
        return Fingerprint(digest.hexdigest()[:16])

    def _expanded(self, pattern: str) -> list[str]:
        pattern = pattern.removeprefix("file://")
        if is_url(pattern):
            raise UserError(f"{self._key}: {pattern}: arrays are read from local files")
        # Completion by a shell ends a directory's name with a slash.
        found = sorted(glob.glob(os.path.expanduser(pattern).rstrip("/")))
        if not found:
            raise UserError(f"{self._key}: no file matches {pattern!r} (from {os.getcwd()})")
        for path in found:
            if not path.endswith(_ZARR + _HDF5 + _NETCDF):
                known = ", *".join(_ZARR + _HDF5 + _NETCDF)
                raise UserError(f"{self._key}: {path} is not a file of arrays (*{known})")
        return found

    def _grid(self, file: int) -> _Grid:
        arrays = self._files.opened(file)
        origins: list[list[list[int]]] = []
        for dim, length in self._window.items():
            sizes = {array.shape[array.dims.index(dim)] for array in arrays.values()}
            if len(sizes) > 1:
                raise UserError(
                    f"{self._paths[file]}: the arrays differ in the length of {dim}: "
                    + ", ".join(f"{n} {a.shape[a.dims.index(dim)]}" for n, a in arrays.items())
                )
            positions = np.arange(0, sizes.pop() - length + 1, self._stride[dim])
            at = len(origins)
            chunks = [array.axes[at][1] for array in arrays.values() if array.chunks]
            chunk = max(chunks, default=_WINDOWS_AT_ONCE * self._stride[dim])
            borders = np.flatnonzero(np.diff(positions // chunk)) + 1
            origins.append([part.tolist() for part in np.split(positions, borders)])
        counts = [np.array([len(part) for part in chunks]) for chunks in origins]
        whole = counts[0]
        for count in counts[1:]:
            whole = np.multiply.outer(whole, count)
        return _Grid(origins, np.cumsum(whole.ravel()).tolist())

    def _read(self, file: int, name: str, origin: tuple[int, ...]) -> NDArray[Any]:
        array = self._files.opened(file)[name]
        sizes = [*self._window.values()]
        touched = [
            range(start // length, (start + size - 1) // length + 1)
            for start, size, (_, length) in zip(origin, sizes, array.axes, strict=True)
        ]
        shape = list(array.shape)
        for (axis, _), size in zip(array.axes, sizes, strict=True):
            shape[axis] = size
        chunks = len(self._names) * prod(map(len, touched))
        self._files.of_sample = max(self._files.of_sample, chunks)
        out = np.empty(shape, array.dtype)
        into, of_chunk = [slice(None)] * len(shape), [slice(None)] * len(shape)
        for place in product(*touched):
            chunk = self._files.chunk(file, name, place)
            for at, start, size, (axis, length) in zip(
                place, origin, sizes, array.axes, strict=True
            ):
                begin = max(start, at * length)
                end = min(start + size, at * length + chunk.shape[axis])
                into[axis] = slice(begin - start, end - start)
                of_chunk[axis] = slice(begin - at * length, end - at * length)
            out[tuple(into)] = chunk[tuple(of_chunk)]
        return out.squeeze(array.axes[0][0]) if self._single else out


# --- formats -------------------------------------------------------------------


@contextmanager
def _errors(path: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"{path}: {error.name or error} is missing: pip install 'hvdtrain[arrays]'"
        ) from None
    except UserError:
        raise
    except Exception as error:  # each library has errors of its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {reason})") from None


def _hdf5(path: str, name: str) -> _Array:
    import h5py

    file = h5py.File(path, "r")
    if name not in file or not isinstance(file[name], h5py.Dataset):
        found: list[str] = []
        file.visititems(lambda n, item: found.append(n) if isinstance(item, h5py.Dataset) else None)
        raise _without(path, name, found)
    values = file[name]
    dims = tuple(dim.label or f"dim_{number}" for number, dim in enumerate(values.dims))
    native = values.dtype.newbyteorder("=")
    return _Array(values, dims, values.shape, native, values.chunks)


def _zarr(path: str, name: str) -> _Array:
    import zarr

    store = zarr.open(path, mode="r")
    is_array = isinstance(store, zarr.Array)
    found = {"": store} if is_array else dict(store.members(max_depth=None))
    if not isinstance(found.get(name), zarr.Array):
        raise _without(path, name, [n for n, v in found.items() if isinstance(v, zarr.Array)])
    array = found[name]
    of_xarray = "_ARRAY_DIMENSIONS" in array.attrs
    named = getattr(array.metadata, "dimension_names", None)
    if of_xarray or (named and all(named)):
        return _xarray(path, name, engine="zarr", consolidated=False)
    dims = tuple(f"dim_{number}" for number in range(array.ndim))
    # A shard contains chunks that can be read alone.
    return _Array(array, dims, array.shape, array.dtype.newbyteorder("="), array.chunks)


def _xarray(path: str, name: str, **options: Any) -> _Array:
    import xarray

    group, _, last = name.rpartition("/")
    options = {"group": group or None, **options}
    opened = xarray.open_dataset(path, decode_times=False, cache=False, chunks=None, **options)
    if last not in opened.variables:
        raise _without(path, name, [str(n) for n in opened.variables])
    variable = opened.variables[last]
    stored = variable.encoding
    chunks = stored.get("chunks") or stored.get("chunksizes")
    dtype = variable.dtype.newbyteorder("=")
    dims = tuple(map(str, variable.dims))
    return _Array(_Lazy(variable), dims, variable.shape, dtype, chunks)


class _Lazy:
    """A variable of xarray whose slices are numpy arrays."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    def __getitem__(self, part: tuple[slice, ...]) -> NDArray[Any]:
        values: NDArray[Any] = self._variable[part].values
        return values


def _without(path: str, name: str, names: Sequence[str]) -> UserError:
    return UserError(f"{path} has no array {name!r}, but {', '.join(names) or 'none'}")


_OPENERS: dict[str, Callable[[str, str], _Array]] = {
    **dict.fromkeys(_ZARR, _zarr),
    **dict.fromkeys(_HDF5, _hdf5),
    **dict.fromkeys(_NETCDF, _xarray),
}
