#!/usr/bin/env bash
# torch 2.13.0: a tensor that is a lazy conjugate, or a lazy negation, comes from a process of
# DataLoader with other values.
#
# x.conj() only sets a flag, and so does x.conj().imag.
#
# Guess: with num_workers=1 a DataLoader yields what it yields with num_workers=0.
# Behavior: the flag is not sent with the memory, and the values are those before the conjugation.
# No error, no warning. Collation hides it, because torch.stack makes a new tensor; without it
# (batch_size=None, or a collate_fn that keeps the samples) the imaginary part changes its sign.
# Output seen on 2026-11-29:
#   num_workers=0: [(1-2j), (3+4j)] [-2.0, 4.0]
#   num_workers=1: [(1+2j), (3-4j)] [2.0, -4.0]
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
cat > "$directory/loaded.py" <<'END'
import torch
from torch.utils.data import DataLoader, Dataset


class Conjugates(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
        return conjugate, conjugate.imag


def loaded(workers):
    loader = DataLoader(Conjugates(), batch_size=None, num_workers=workers)
    conjugate, imaginary = next(iter(loader))
    print(f"num_workers={workers}:", conjugate.tolist(), imaginary.tolist())
    return conjugate.tolist(), imaginary.tolist()


if __name__ == "__main__":
    alone, ahead = loaded(0), loaded(1)
    assert alone == ([1 - 2j, 3 + 4j], [-2.0, 4.0]), alone
    assert ahead == ([1 + 2j, 3 - 4j], [2.0, -4.0]), ahead
END
"$directory/venv/bin/python" "$directory/loaded.py"
