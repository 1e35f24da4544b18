#!/usr/bin/env bash
# torch 2.13.0 (a build without CUDA): FakeTensorMode makes some CUDA tensors, and refuses others.
#
# Guess: fake tensors have no memory, so either all operations on a fake "cuda" device work in a
# build for CPUs, or none does.
# Behavior: factories and matrix products work; in-place random numbers, copies to the device and
# therefore every nn.Linear fail, because these look up the device's guard. torch 2.11.0+cu130
# without a driver runs them all.
# Output seen on 2026-11-27:
#   works: empty, full, matmul, randn, tensor
#   RuntimeError: Linear, to, uniform_
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cat > "$directory/fake.py" <<'END'
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

OPERATIONS = {
    "empty": lambda: torch.empty(2, device="cuda"),
    "full": lambda: torch.full((2,), 1.0, device="cuda"),
    "randn": lambda: torch.randn(2, device="cuda"),
    "tensor": lambda: torch.tensor([1.0], device="cuda"),
    "matmul": lambda: torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda"),
    "to": lambda: torch.ones(2).to("cuda"),
    "uniform_": lambda: torch.empty(2, device="cuda").uniform_(),
    "Linear": lambda: torch.nn.Linear(8, 8, device="cuda"),
}
if torch.version.cuda:
    print("not run: pip installed a build with CUDA; set its index to the builds for CPUs")
    raise SystemExit(2)
works, fails = [], []
for name, operation in OPERATIONS.items():
    with FakeTensorMode():
        try:
            operation()
            works.append(name)
        except RuntimeError as error:
            assert "not linked with support for cuda" in str(error), error
            fails.append(name)
print("works:", ", ".join(sorted(works)))
print("RuntimeError:", ", ".join(sorted(fails)))
assert sorted(fails) == ["Linear", "to", "uniform_"]
END
"$directory/venv/bin/python" "$directory/fake.py"
