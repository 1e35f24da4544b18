"""Runs of script.py, and comparisons of their ends."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hvdtrain.launch.commands import elastic_horovodrun
from tests.support import runs, warm
from tests.support.job import Finished
from tests.support.own_loops import EXACT, FLAGS
from tests.support.third_parties.part import DURATION

PRELOAD = "torch._dynamo pytorch_optimizer bitsandbytes vector_quantize_pytorch"
STOPPED_AFTER = 11  # steps, of a run that is resumed
SECONDS = 300.0
SCRIPT = str(Path(__file__).with_name("script.py"))
End = Mapping[str, Mapping[str, Tensor]]  # of a rank: part -> tensors by name


class PartsError(Exception):
    """A run has not ended well; the message is the line that says why."""


def whole(root: Path, parts: Sequence[str], launcher: str = "") -> list[End]:
    """Train parts; return what each rank has at the end."""
    _check(_start(root, parts, DURATION, launcher))
    return _ends(root)


def resumed(root: Path, parts: Sequence[str]) -> list[End]:
    """Train parts in a run that ends early, and resume it in another process."""
    _check(_start(root, parts, STOPPED_AFTER))
    for path in root.glob("end.*"):
        path.unlink()
    return whole(root, parts)


def replaced(root: Path, parts: Sequence[str]) -> list[End]:
    """Train parts on three ranks, of which one is killed and replaced by a new process."""
    hosts = root / "hosts"
    hosts.parent.mkdir(parents=True, exist_ok=True)
    hosts.write_text("localhost:3\n")
    rank = ["--network-interfaces", "lo", warm.python(3, PRELOAD), SCRIPT]
    command = elastic_horovodrun(3, 1, 3, ["cat", str(hosts)], rank)
    done = _started(root, parts, DURATION, "", command, HVDTRAIN_TEST_KILL=str(root / "killed"))
    _check(done)
    sizes = [line["world_size"] for line in runs.metrics(root / "run")]
    if [size for n, size in enumerate(sizes) if sizes[n - 1 : n] != [size]] != [3, 2, 3]:
        raise PartsError(_error(done) or f"no rank was replaced: {sizes}")
    return _ends(root)


def difference(ends: Sequence[End], expected: End, part: str) -> float:
    """Return the largest difference of an element of a part on any rank; 0: bitwise identical."""
    found = 0.0
    for end in ends:
        assert end[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            other = end[part][name]
            if tensor.shape != other.shape or tensor.dtype != other.dtype:
                return float("inf")
            if not torch.equal(tensor, other):
                apart = (tensor.double() - other.double()).abs().max()
                found = max(found, float(apart.nan_to_num(float("inf"))))
    return found


def _start(root: Path, parts: Sequence[str], steps: int, launcher: str = "") -> Finished:
    ranks = int([*launcher.split(":"), "1"][1])
    return _started(root, parts, steps, launcher, [warm.python(ranks, PRELOAD), SCRIPT])


def _started(
    root: Path,
    parts: Sequence[str],
    steps: int,
    launcher: str,
    command: Sequence[str],
    **more: str,
) -> Finished:
    env = {
        "HVDTRAIN_TEST_PARTS": json.dumps([*parts]),
        "HVDTRAIN_TEST_END": str(root / "end"),
        **more,
        "PYTHONPATH": os.pathsep.join([str(runs.REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    flags = [*FLAGS, *EXACT, "--train.duration", str(steps), "--run.root", str(root)]
    flags += ["--run.id", "run"]
    return runs.start(root / "output", flags, launcher, env, command).wait(SECONDS)


def _check(done: Finished) -> None:
    if done.returncode:
        raise PartsError(_error(done) or str(done))


def _error(done: Finished) -> str:
    """Return the line that says why a rank has ended."""
    lines = [line.strip() for line in done.stderr.splitlines()]
    for pattern in (
        r"hvdtrain: error: (?:rank \d+ on \S+: )?(.*)",
        r"(\w*(?:Error|Exception): .*)",
    ):
        found = [match[1] for line in lines if (match := re.search(pattern, line))]
        if found:
            return found[-1]
    return ""


def _ends(root: Path) -> list[End]:
    return [torch.load(path, weights_only=True) for path in sorted(root.glob("end.*"))]
