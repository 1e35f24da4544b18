"""Export of a checkpoint's weights for other programs: model.safetensors and config.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.layout import MODEL, STATE, TENSORS, DamagedError, parse_state, verify
from hvdtrain.errors import UserError
from hvdtrain.files import sync_directory
from hvdtrain.untrusted import SMALL_FILE_BYTES, is_of, open_regular, parse_json, read_regular


def export(checkpoint: Path, config: dict[str, Any], out: Path, ema: bool = False) -> None:
    """Write the directory `out` atomically.

    Args:
        ema: export the averaged weights, see `averaged_weights`.
        config: how the model is built; written to config.json together with the "step" and
            "samples" of the training.

    Raises:
        UserError: `out` exists or cannot be written, or the checkpoint is damaged.
    """
    _check_free(out)
    verify(checkpoint)
    try:
        state = parse_state(read_regular(checkpoint / STATE))
        trained = {name: state[name] for name in ("step", "samples")}
        weights = averaged_weights(checkpoint) if ema else _weights(checkpoint)
        if isinstance(weights, Path):
            _header(weights)
        known = {**_with_vocabulary(config, weights), **trained}
    except OSError as error:
        raise DamagedError(f"checkpoint {checkpoint}: {error.filename}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise DamagedError(f"checkpoint {checkpoint}: {error}") from None
    write_export(out, known, weights)


def _weights(checkpoint: Path) -> Path | dict[str, Any]:
    """Return the model file, or the assembled tensors if the ranks have saved shards."""
    whole = checkpoint / MODEL
    if whole.exists():
        return whole
    from hvdtrain.checkpoint.spread import read_part

    return read_part(checkpoint, "model")


def averaged_weights(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors with the averages of optim.ema_decay, in the model's dtype.

    Raises:
        UserError: the checkpoint has no averages, or is damaged.
    """
    from hvdtrain.checkpoint.spread import read_part

    if not any(checkpoint.glob(f"ema*{TENSORS}")):  # whole, or in shards
        raise UserError(f"{checkpoint} has no averaged weights: its run had no optim.ema_decay")
    model, averages = (read_part(checkpoint, part) for part in ("model", "ema"))
    return model | {name: tensor.to(model[name].dtype) for name, tensor in averages.items()}


def write_export(out: Path, config: dict[str, Any], weights: Path | Mapping[str, Any]) -> None:
    """Write the directory `out` with config.json and model.safetensors atomically.

    Args:
        weights: a file to copy, or tensors by name.

    Raises:
        UserError: `out` exists or cannot be written.
    """
    with new_directory(out) as hidden:
        _write_weights(hidden / MODEL, weights)
        (hidden / "config.json").write_text(json.dumps(config, indent=1) + "\n")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory for files (no subdirectories), which is renamed to `out` on success.

    Raises:
        UserError: `out` exists or cannot be written.
    """
    _check_free(out)
    hidden = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        for path in hidden.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        sync_directory(hidden)
        os.rename(hidden, out)
        sync_directory(hidden.parent)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def dtypes(out: Path) -> list[str]:
    """Return the dtypes of the weights in an exported directory."""
    names = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
    headers = [_header(path) for path in out.glob("*.safetensors")]
    found = {t["dtype"] for header in headers for t in header.values() if "dtype" in t}
    return sorted(names.get(dtype, dtype) for dtype in found)


def _header(path: Path) -> dict[str, Any]:
    """Raise ValueError if the file is not a safetensors file."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(size)) if size < SMALL_FILE_BYTES else None
    if header is None or not is_of(header, dict[str, dict[str, Any]]):
        raise ValueError("not a safetensors file")
    return dict(header)


def _check_free(out: Path) -> None:
    if out.exists():
        raise UserError(f"--out {out} exists already; name a directory that does not")


def _write_weights(path: Path, weights: Path | Mapping[str, Any]) -> None:
    if isinstance(weights, Path):
        shutil.copyfile(weights, path)
        return
    from safetensors.torch import save

    path.write_bytes(save(dict(weights), metadata={"format": "pt"}))


def _with_vocabulary(config: dict[str, Any], weights: Path | Mapping[str, Any]) -> dict[str, Any]:
    """Add the vocabulary size, which the language model takes from the data if no key sets it."""
    model = config.get("model")
    if not isinstance(model, dict) or model.get("vocab_size", 0) is not None:
        return config
    name = "embedding.weight"
    shape = _header(weights)[name]["shape"] if isinstance(weights, Path) else weights[name].shape
    return {**config, "model": {**model, "vocab_size": shape[0]}}
