#!/usr/bin/env bash
# litdata 0.2.76: tuples of text and an integer, written with compression, cannot be read back.
#
# Guess: `optimize(..., compression="zstd")` compresses chunks of any samples, and its own
# StreamingDataset returns what was written, as it does without compression.
# Behavior: samples that are (str, int) are stored uncompressed, while index.json says "zstd";
# StreamingDataset then looks for frames in the chunks and raises. Without compression, and for
# samples that are a dict with an array, it returns what was written.
# Output seen on 2026-11-28:
#   (str, int), zstd: RuntimeError; (str, int): equal; arrays, zstd: equal
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 litdata==0.2.76 zstd==1.5.7.2
cat > "$directory/back.py" <<'END'
import sys
from pathlib import Path

import numpy as np
from litdata import StreamingDataset, optimize


def pair(number):
    return f"sample {number}", number


def arrays(number):
    return {"x": np.full(50, number, dtype=np.float32)}


def outcome(name, make, compression):
    path = Path(sys.argv[1]) / name
    optimize(make, list(range(40)), str(path), chunk_size=20, num_workers=1, compression=compression)
    try:
        data = StreamingDataset(str(path), cache_dir=f"{path}_cache", shuffle=False)
        found = [data[number] for number in range(len(data))]
    except Exception as error:
        return type(error).__name__
    for number, one in enumerate(found):
        assert len(found) == 40
        assert (one["x"] == number).all() if make is arrays else tuple(one) == pair(number)
    return "equal"


if __name__ == "__main__":
    found = [outcome("a", pair, "zstd"), outcome("b", pair, None), outcome("c", arrays, "zstd")]
    print("(str, int), zstd: {}; (str, int): {}; arrays, zstd: {}".format(*found), flush=True)
    sys.exit(found[0] == "equal" or found[1:] != ["equal", "equal"])
END
"$directory/venv/bin/python" "$directory/back.py" "$directory" 2> "$directory/errors" | grep "^(str" ||
    { tail -5 "$directory/errors"; exit 1; }
