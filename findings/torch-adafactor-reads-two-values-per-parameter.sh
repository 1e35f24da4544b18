#!/usr/bin/env bash
# torch 2.13.0: torch.optim.Adafactor reads two values of each parameter on the host in every step.
#
# Guess: like AdamW, it computes its step on the device, and the host reads nothing but the step
# counter, which is a tensor on the CPU.
# Behavior: the norms of a parameter and of its update are read with .item(), so a GPU is waited for
# twice per parameter and step. AdamW, SGD and Muon read nothing.
# Output seen on 2026-11-27:
#   values read in a step of 10 parameters: {'Adafactor': 20, 'AdamW': 0, 'SGD': 0, 'Muon': 0}
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6
cat > "$directory/reads.py" <<'END'
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Reads(TorchDispatchMode):
    """Counts values that the host reads, except those of step counters."""

    def __init__(self, counters):
        super().__init__()
        self.counters, self.count = {id(c) for c in counters}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        read = func is torch.ops.aten._local_scalar_dense.default
        self.count += read and id(args[0]) not in self.counters
        return func(*args, **(kwargs or {}))


found = {}
for name in ("Adafactor", "AdamW", "SGD", "Muon"):
    parameters = [torch.nn.Parameter(torch.randn(4, 4)) for _ in range(10)]
    optimizer = getattr(torch.optim, name)(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.randn(4, 4)
    optimizer.step()
    counters = [state["step"] for state in optimizer.state.values() if "step" in state]
    with Reads(counters) as reads:
        optimizer.step()
    found[name] = reads.count
print(f"values read in a step of 10 parameters: {found}")
assert found == {"Adafactor": 20, "AdamW": 0, "SGD": 0, "Muon": 0}
END
"$directory/venv/bin/python" "$directory/reads.py"
