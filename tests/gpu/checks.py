"""The checks of `make gpu-check`: check, expected, result, ok.

Runs in the environment that tests/gpu/check.py creates. Each check starts hvdtrain's own commands
with a limit; a failure does not prevent other checks. The results so far are in the results
directory after each check, in case the machine is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from hvdtrain.bench.elastic import recovered
from hvdtrain.bench.jobs import ControlledJob
from hvdtrain.bench.jobs import train as endless_training
from hvdtrain.errors import EXIT_USER
from hvdtrain.launch.commands import elastic_horovodrun, horovodrun, mpirun
from tests.gpu.machine import CURVE, HVDTRAIN, STEPS, Machine, compare, lines

PARAMETERS = 124_000_000  # minimum for gpt-small


@dataclass(frozen=True)
class Check:
    """A row: `look` returns the result or raises; `gpus`: number of GPUs that it needs."""

    name: str
    wanted: str
    look: Callable[[Machine], str]
    gpus: int = 0


@dataclass(frozen=True)
class Row:
    """Result of a check; ok None: it could not run here."""

    check: str
    wanted: str
    seen: str
    ok: bool | None
    seconds: float


def a_gpu(machine: Machine) -> str:
    name, version = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    assert float(product.sum()) == 64**3
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return f"{machine.gpus} x {name} ({version}), torch {torch.__version__}, NCCL {nccl}"


def build(machine: Machine) -> str:
    said = machine.run([*horovodrun(1, [])[:1], "--check-build"], 60)
    wanted = {"PyTorch", "Gloo"} | ({"NCCL"} if machine.gpus else set())
    built = set(re.findall(r"\[X\] (\S+)", said))
    seen = ", ".join(sorted(built))
    assert wanted <= built, seen
    return seen


def all_reduce(machine: Machine) -> str:
    said = machine.run([*HVDTRAIN, "horovod", "check"], 200)
    return ", ".join(line for line in said.splitlines() if line)


def curve(machine: Machine) -> str:
    run = machine.train("one", [], 120, "--profile.steps 9:11 --checkpoint.every 100")
    device = json.loads((run / "manifest.json").read_text())["device"]
    assert device == machine.device, f"trained on {device}"
    steps = lines(run / "metrics.jsonl")
    first, last = steps[0]["loss"], steps[-1]["loss"]
    assert last < first - 1, f"the loss went from {first} to {last}"
    step = median(line["step_seconds"] for line in steps)
    return f"{compare(run, machine.train('cpu', [], 240))}; a step {1000 * step:.0f} ms"


def timers(machine: Machine) -> str:
    # On a GPU a phase counts when the device has left it, so the first line includes the start.
    told = lines(machine.work / "one" / "ranks.jsonl")[1:]
    wall = sum(line["wall_seconds"][0] for line in told)
    phases = dict.fromkeys(told[0]["phases"], 0.0)
    for line in told:
        for name in phases:
            phases[name] += line["phases"][name][0]
    steps = lines(machine.work / "one" / "metrics.jsonl")
    slack = 3 * max(line["step_seconds"] for line in steps[2:])
    seen = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds)
    seen += f"; together {sum(phases.values()):.2f} of {wall:.2f} s"
    assert abs(sum(phases.values()) - wall) <= slack, seen
    assert 0.5 <= phases["backward"] / phases["forward"] <= 5, seen
    return seen


def memory(machine: Machine) -> str:
    last = lines(machine.work / "one" / "ranks.jsonl")[-1]["device_memory_bytes"][0]
    seen = f"{last / 1e9:.2f} GB"
    # Weights and AdamW's two moments; gradients are temporary.
    assert last >= 12 * PARAMETERS if machine.gpus else last == 0, seen
    return seen


def profile(machine: Machine) -> str:
    said = machine.run([*HVDTRAIN, "profile", "summary", str(machine.work / "one")], 60)
    found = re.search(r"^time +(.+)\nrank 0 on \S+ +(.+)$", said, re.MULTILINE)
    assert found, said
    for words in ("peak device memory", "kernel"):
        assert (words in said) == bool(machine.gpus), f"{words!r}: {said}"
    columns = zip(*(re.split(r" {2,}", line.strip()) for line in found.groups()), strict=True)
    return ", ".join(" ".join(column) for column in columns)


def resume(machine: Machine) -> str:
    run = machine.train("one", [], 120, f"--train.duration {STEPS + 4}")
    steps = [line["step"] for line in lines(run / "metrics.jsonl")]
    assert steps == list(range(1, STEPS + 5)), str(steps)
    machine.run([*HVDTRAIN, "ckpt", "verify", str(run)], 60)
    machine.run([*HVDTRAIN, "audit", str(run)], 60)
    return f"steps {steps[0]} to {steps[-1]} once each, checkpoints and audit fine"


def generate(machine: Machine) -> str:
    flags = ["--prompt", "def ", "--length", "40", "--temperature", "0"]
    said = machine.run([*HVDTRAIN, "generate", str(machine.work / "one"), *flags], 60)
    assert "def " in said, said
    return repr(said.strip()[-50:])


def two_ranks(machine: Machine) -> str:
    run = machine.train("two", horovodrun(2, machine.wrapper, hosts=machine.hosts), 180)
    told = lines(run / "ranks.jsonl")[-1]["device_memory_bytes"]
    assert len(told) == 2 and all(bool(n) == bool(machine.gpus) for n in told), str(told)
    return compare(run, machine.work / "one")


def refused(machine: Machine) -> str:
    ranks = machine.gpus + 1
    said = machine.run(horovodrun(ranks, machine.rank("refused")), 120, wanted=EXIT_USER)
    found = re.search(rf"has {machine.gpus} GPUs, but {ranks} ranks[^\n]*", said)
    assert found, said[-500:]
    return found.group()


def by_mpirun(machine: Machine) -> str:
    if shutil.which("mpirun") is None:
        raise NotHereError("not run: no mpirun here")
    return compare(machine.train("mpi", mpirun(2, []), 180), machine.work / "one")


def kill(machine: Machine) -> str:
    root = machine.work / "killed"
    root.mkdir()
    discover = ["printf", "%s\\n", *machine.hosts.split(",")]
    flags = ["--config", machine.preset, *machine.model]
    command = [*machine.wrapper, *endless_training(sys.executable, flags, root)]
    try:
        with ControlledJob(elastic_horovodrun(2, 1, 2, discover, command), root) as job:
            job.wait_for(lambda lines: bool(lines) and lines[-1]["world_size"] == 2, "2 ranks")
            job.wait_for_more(5)
            since = time.time()
            job.kill_one()
            job.wait_for(lambda lines: lines[-1]["world_size"] == 1, "the kill's effect")
            job.wait_for(lambda lines: lines[-1]["world_size"] == 2, "the new rank's first step")
            job.wait_for_more(2)
            found = recovered(job.lines(), job.events(), since, 2)
    finally:
        with machine.log.open("a") as log:
            log.write((root / "output").read_text(errors="replace"))
    machine.run([*HVDTRAIN, "audit", str(root / "bench")], 60)
    return (
        f"{found.pause:.1f} s without a step, both ranks again after {found.whole:.1f} s, "
        "no step lost or done twice"
    )


CHECKS = (
    Check("GPU", "torch computes on it", a_gpu, gpus=1),
    Check("Horovod's build", "PyTorch, Gloo, and NCCL for GPUs", build),
    Check("hvdtrain horovod check", "a sum over 2 ranks by each controller", all_reduce),
    Check("losses of one rank", f"the CPU's losses, within {CURVE}", curve),
    Check("phases of a step", "add up to the wall time; backward 0.5 to 5 x forward", timers),
    Check("device memory", "weights and the optimizer's state at least", memory),
    Check("profile", "of two steps, with the device's memory", profile),
    Check("resume", "no step lost or done twice", resume),
    Check("generate", "text from the checkpoint", generate),
    Check("losses of two ranks", f"one rank's losses, within {CURVE}", two_ranks),
    Check("more ranks than GPUs", f"exit code {EXIT_USER} and one message", refused, gpus=1),
    Check("two ranks by mpirun", f"the losses of one, {CURVE} apart at most", by_mpirun, gpus=2),
    Check("kill -9 of a rank", "the other continues, a new one joins", kill),
)


class NotHereError(Exception):
    """A check cannot run on this machine; the message says why."""


def look(check: Check, machine: Machine) -> Row:
    """Run one check; any error becomes its result."""
    began = time.monotonic()
    ok: bool | None = True
    try:
        if machine.gpus < check.gpus:
            raise NotHereError(f"not run: {machine.gpus} of {check.gpus} GPUs here")
        seen = check.look(machine)
    except NotHereError as error:
        ok, seen = None, str(error)
    except Exception as error:
        ok, seen = False, f"{type(error).__name__}: {error}"
    return Row(check.name, check.wanted, " ".join(seen.split()), ok, time.monotonic() - began)


def show(rows: list[Row]) -> str:
    """Format the table as Markdown."""
    words = {True: "yes", False: "NO", None: "-"}
    text = "| check | wanted | seen | ok | s |\n| --- | --- | --- | --- | --- |\n"
    for row in rows:
        seen = row.seen.replace("|", "/")
        text += f"| {row.check} | {row.wanted} | {seen} | {words[row.ok]} | {row.seconds:.0f} |\n"
    return text


def main() -> int:
    """Return 0: all checks passed; 1: a check failed; 2: none failed, but there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    work = args.work
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    machine = Machine(args.gpus, work, args.out / "log.txt")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    rows: list[Row] = []
    for check in CHECKS:
        rows.append(look(check, machine))
        print(show(rows[-1:]).splitlines()[-1], flush=True)
        (args.out / "table.md").write_text(show(rows))
        (args.out / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"\n{show(rows)}")
    failed = [row.check for row in rows if row.ok is False]
    if failed:
        print(f"gpu-check: failed: {', '.join(failed)}; what was said: {machine.log}")
        return 1
    if not machine.gpus:
        print("gpu-check: no GPU here: nothing is proven but the script itself")
        return 2
    print("gpu-check: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
