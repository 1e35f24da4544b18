#!/usr/bin/env bash
# torchtitan 0.3.0: a checkpoint has wq, wk and wv of a fused projection, but the moments of wqkv.
#
# Guess: in a checkpoint, the optimizer's entries have the names and shapes of the weights that they
# belong to, as torch.distributed.checkpoint requires of programs that reshard both.
# Behavior: FusedQKVLinear, which the debug model of Llama 3 uses by default, splits its weight when
# state_dict() is called. The optimizer's state keeps the name and the shape of the fused parameter,
# with the rows of q, k and v interleaved by group of heads. A program that reads the optimizer by the
# names of the weights finds no moments for the attention's projections.
# Output seen on 2026-11-29:
#   weights: ['wk.weight', 'wq.weight', 'wv.weight']; moments: ['state.wqkv.weight.exp_avg']
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 torchtitan==0.3.0 \
    triton==3.9.0
cat > "$directory/names.py" <<'END'
import sys

import torch
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import FusedQKVLinear

projection = Linear.Config(in_features=8, out_features=16)
module = FusedQKVLinear.Config(head_dim=4, n_heads=2, n_kv_heads=1, wqkv=projection).build()
optimizer = torch.optim.AdamW(module.named_parameters())
module.wqkv(torch.ones(1, 8)).sum().backward()
optimizer.step()
weights = sorted(module.state_dict())
moments = sorted(n for n in get_flat_optim_state_dict(optimizer) if n.endswith("exp_avg"))
print(f"weights: {weights}; moments: {moments}")
expected = ["wk.weight", "wq.weight", "wv.weight"], ["state.wqkv.weight.exp_avg"]
sys.exit((weights, moments) != expected)
END
"$directory/venv/bin/python" "$directory/names.py" 2> "$directory/errors" ||
    { tail -5 "$directory/errors"; exit 1; }
