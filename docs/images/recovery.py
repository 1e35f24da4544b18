"""Draws docs/images/recovery.png: an elastic run with a killed rank, and the same run undisturbed.

    flags="--model.layers 2 --model.heads 2 --model.width 64 --model.context 64
        --data.train text.txt --batch.global_size 24 --batch.micro_size 2 --train.duration 240
        --eval.every 0 --checkpoint.every 1000 --optim.lr 2e-3 --schedule.warmup_steps 10"
    horovodrun --gloo -np 3 python -m hvdtrain.train $flags --run.id calm
    horovodrun --gloo -np 3 --min-np 1 --max-np 3 --host-discovery-script 'echo localhost:3' \
        python -m hvdtrain.train $flags --run.id killed    # kill -9 rank 0 after step 60
    python docs/images/recovery.py runs/calm runs/killed docs/images/recovery.png

text.txt is the source code of Python's argparse; the pid of rank 0 is in runs/killed/.owner.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

UNDISTURBED, DISTURBED, FAILURE, JOIN = "#f0b27a", "#1f4e79", "#c0392b", "#27803b"


def read(run: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / file).read_text().splitlines()]


def main(calm: str, killed: str, picture: str) -> None:
    undisturbed, lines = read(calm, "metrics.jsonl"), read(killed, "metrics.jsonl")
    ended = {line["step"]: line["time"] for line in lines}
    starts = {event.get("cause"): event["step"] for event in read(killed, "events.jsonl")}
    died, joined = starts["failure"], starts["hosts"]
    plt.rcParams |= {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9.2, 4.6), height_ratios=[3, 1.25], sharex=True, dpi=120
    )
    steps = [line["step"] for line in lines]
    for curve, label, color, width in (
        (undisturbed, "undisturbed run", UNDISTURBED, 5),
        (lines, "run with the killed rank", DISTURBED, 1.3),
    ):
        losses = [line["loss"] for line in curve]
        top.plot(steps, losses, color=color, linewidth=width, label=label)
    bottom.step(steps, [line["world_size"] for line in lines], where="mid", color=DISTURBED)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        for step, color in ((died, FAILURE), (joined, JOIN)):
            axes.axvline(step + 0.5, color=color, linestyle="--", linewidth=1.2)
    pause, absence = ended[died + 1] - ended[died], ended[joined + 1] - ended[died]
    height = 0.8 * top.get_ylim()[1]
    said = f"rank 0 killed\nnext step after {pause:.1f} s\nno step lost"
    top.text(died + 3, height, said, color=FAILURE, verticalalignment="top")
    said = f"a new process joins\n{absence:.0f} s after the kill"
    top.text(joined + 3, height, said, color=JOIN, verticalalignment="top")
    top.set_ylabel("training loss")
    top.legend(frameon=False, loc="upper right")
    bottom.set(ylabel="ranks", xlabel="step", xlim=(0, steps[-1]), ylim=(0, 3.4), yticks=range(4))
    figure.tight_layout()
    figure.savefig(picture)


if __name__ == "__main__":
    main(*sys.argv[1:])
