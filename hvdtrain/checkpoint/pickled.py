"""Files of `torch.save`, read without executing anything.

They are pickles. `torch.load(weights_only=True)` reads them, with inert objects in place of all
classes and functions that a file names beyond tensors and plain values, such as a program's own
enumerations.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdtrain.errors import UserError

_SCALAR = np.float64(0).__reduce__()[0]
# They only make values: numbers of numpy, and the arguments of a command line.
_PLAIN = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": np.dtype,
    "numpy._core.multiarray.scalar": _SCALAR,
    "numpy.core.multiarray.scalar": _SCALAR,  # before numpy 2
    "_codecs.encode": codecs.encode,
}
_DTYPES = [type(np.dtype(letter)) for letter in "?bBhHiIlLqQefd"]
# What torch.load, and code that searches its result, raise for content that is not as expected.
UNEXPECTED = (
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError),
    *(pickle.UnpicklingError, AssertionError),
)


class Inert:
    """Takes the place of an object whose class is not loaded.

    Attributes:
        arguments: with which it would have been built.
        state: its attributes, as far as they are in a dict.
    """

    arguments: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *arguments: Any) -> Inert:  # a pickle need not call __init__
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}


def read_pickled(path: Path) -> dict[str, Any]:
    """Return the dict in a file of `torch.save`, with its tensors on the CPU.

    Raises:
        UserError: it cannot be read, or is not such a file.
    """
    found = read_object(path)
    if not isinstance(found, Mapping):
        raise UserError(f"{path} is not what is expected: it has no dict")
    return dict(found)


def read_object(path: Path) -> Any:
    """Return the object in a file of `torch.save`; see `read_pickled`.

    Raises:
        UserError: it cannot be read, or is not such a file.
    """
    try:
        return load_inert(str(path), mmap=True)
    except OSError as error:
        if error.errno != errno.EINVAL:  # torch raises it for a file that was cut off
            raise UserError(f"{path}: {error.strerror or error}") from None
        reason = "it was cut off"
    except UNEXPECTED as error:
        reason = first_line(error)
    raise UserError(f"{path} is not a complete file of torch.save: {reason}")


def load_inert(source: str | BytesIO, mmap: bool = False) -> Any:
    """Return what `torch.save` has written, with inert objects as above.

    Raises:
        OSError: it cannot be read.
        UNEXPECTED: `torch.save` has not written it.
    """
    names = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    if isinstance(source, BytesIO):
        source.seek(0)
    known: list[Any] = [(_PLAIN.get(name, Inert), name) for name in names]
    with torch.serialization.safe_globals([*known, *_DTYPES]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def first_line(error: BaseException) -> str:
    """The first line of an error; torch's have many."""
    line = (str(error) or type(error).__name__).strip().splitlines()[0]
    if "eights_only" in line or line.startswith("Weights only"):  # it advises to execute the file
        return "it has objects that are neither tensors nor plain values"
    return line
