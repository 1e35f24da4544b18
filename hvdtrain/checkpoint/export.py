"""A checkpoint's weights for other programs: model.safetensors and config.json."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.layout import STATE, TENSORS, verify
from hvdtrain.errors import UserError
from hvdtrain.files import sync_folder, write_synced

_WEIGHTS = TENSORS[0]


def export(checkpoint: Path, config: dict[str, Any], out: Path) -> None:
    """Makes the folder `out`: whole, or not at all.

    Args:
        config: how the model is made; config.json has it, with "step" and "samples" of the
            training added.

    Raises:
        UserError: `out` exists or cannot be written, or the checkpoint is damaged.
    """
    if out.exists():
        raise UserError(f"--out {out} exists already; name a folder that does not")
    verify(checkpoint)
    state = json.loads((checkpoint / STATE).read_text())
    trained = {name: state[name] for name in ("step", "samples")}
    content = json.dumps({**_with_vocabulary(config, checkpoint), **trained}, indent=1) + "\n"
    hidden = out.absolute().with_name(f".{out.absolute().name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir(parents=True)
        shutil.copyfile(checkpoint / _WEIGHTS, hidden / _WEIGHTS)
        with open(hidden / _WEIGHTS, "rb") as file:
            os.fsync(file.fileno())
        write_synced(hidden / "config.json", content.encode())
        sync_folder(hidden)
        os.rename(hidden, out)
        sync_folder(hidden.parent)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _with_vocabulary(config: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The language model takes its vocabulary from the data where no key names it."""
    model = config.get("model")
    if not isinstance(model, dict) or model.get("vocab_size", 0) is not None:
        return config
    with open(checkpoint / _WEIGHTS, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {**config, "model": {**model, "vocab_size": header["embedding.weight"]["shape"][0]}}
