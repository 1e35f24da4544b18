#!/usr/bin/env bash
# zstandard 0.25.0: of six ways to decompress data of two frames, three return the first frame only.
#
# Guess: all of them return both frames, as Python's gzip returns all members and the program zstd
# all frames (`cat a.zst b.zst` is a valid file), or all of them the first.
# Behavior: decompress() and read_to_iter() end after the first frame without an error or a sign of
# the rest; decompressobj() keeps the rest in unused_data. stream_reader(), open() and copy_stream()
# continue with the second frame. JSON lines that were written in parts lose all but the first part.
# Output seen on 2026-11-27:
#   first frame only: ['decompress', 'decompressobj', 'read_to_iter']; both: ['copy_stream', 'open', 'stream_reader']
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q zstandard==0.25.0
cat > "$directory/frames.py" <<'END'
from io import BytesIO

import zstandard

compressor, reader = zstandard.ZstdCompressor(), zstandard.ZstdDecompressor()
first, second = b'{"x": 1}\n', b'{"x": 2}\n'
frames = compressor.compress(first) + compressor.compress(second)
copied = BytesIO()
reader.copy_stream(BytesIO(frames), copied)
found = {
    "copy_stream": copied.getvalue(),
    "decompress": reader.decompress(frames),
    "decompressobj": reader.decompressobj().decompress(frames),
    "open": zstandard.open(BytesIO(frames), "rb").read(),
    "read_to_iter": b"".join(reader.read_to_iter(BytesIO(frames))),
    "stream_reader": reader.stream_reader(BytesIO(frames)).read(),
}
one = sorted(name for name, content in found.items() if content == first)
both = sorted(name for name, content in found.items() if content == first + second)
print(f"first frame only: {one}; both: {both}")
assert one == ["decompress", "decompressobj", "read_to_iter"]
assert both == ["copy_stream", "open", "stream_reader"]
END
"$directory/venv/bin/python" "$directory/frames.py"
