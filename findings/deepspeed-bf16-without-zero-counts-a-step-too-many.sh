#!/usr/bin/env bash
# deepspeed 0.19.8: with bf16 and without ZeRO, Adam has counted 11 steps after 10.
#
# Guess: the optimizer's count of steps is the engine's, with every stage of ZeRO, as both begin at 0
# and no step was skipped.
# Behavior: with bf16 and stage 0, each parameter's "step" is one more than global_steps from the
# first step on, so that Adam's bias correction is the one of the next step; with stage 1 they are
# equal, and so they are in float32.
# Output seen on 2026-11-28, CPU, one process:
#   after 10 steps: {'bf16, stage 0': 11, 'bf16, stage 1': 10, 'float32, stage 0': 10}
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
"${PYTHON:-python3}" -m venv "$directory/venv"
"$directory/venv/bin/python" -m pip install -q torch==2.13.0 numpy==2.4.6 deepspeed==0.19.8 setuptools
cat > "$directory/steps.py" <<'END'
import os
import sys

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29677")

import deepspeed
import torch

found = {}
for bf16, stage in ((True, 0), (True, 1), (False, 0)):
    model = torch.nn.Linear(4, 4)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_batch_size": 2, "bf16": {"enabled": bf16}, "optimizer": optimizer}
    config["zero_optimization"] = {"stage": stage}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    batch = torch.ones(2, 4, dtype=torch.bfloat16 if bf16 else torch.float32)
    for _ in range(10):
        engine.backward(engine(batch).float().sum())
        engine.step()
    assert engine.global_steps == 10 and engine.skipped_steps == 0
    adam = engine.optimizer if hasattr(engine.optimizer, "param_groups") else None
    inner = getattr(adam, "optimizer", adam)
    counts = {int(state["step"]) for state in inner.state.values()}
    assert len(counts) == 1
    found[f"{'bf16' if bf16 else 'float32'}, stage {stage}"] = counts.pop()
print(f"after 10 steps: {found}")
sys.exit(found != {"bf16, stage 0": 11, "bf16, stage 1": 10, "float32, stage 0": 10})
END
PATH="$directory/venv/bin:$PATH" "$directory/venv/bin/python" "$directory/steps.py" \
    2> "$directory/errors" | grep "^after" || { tail -5 "$directory/errors"; exit 1; }
